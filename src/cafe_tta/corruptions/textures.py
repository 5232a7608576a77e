"""Frost textures: the published ones where they are installed, else a procedural stand-in."""

import hashlib
import warnings
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from .pixels import Images

# The package carries the six published pictures without the third, which is the second once more, and numbers
# on: its 3 and 4 are the published 4 and 5; its 5 is the published 6, which the scripts never use. Its first two
# are the published PNG files stored as JPEG, on average 4.4 and 2.8 grey levels away from them.
STANDARD_FILES = {
    "frost1.jpg": "14fdc6377405baf7d8a4bd6043cb153fef8a22332bf141c0cf50026ef6ded822",
    "frost2.jpg": "219ca775787e1d20121fb19ab2bf1a632cf04c3304c9c208d5c1bf82da71df2e",
    "frost3.jpg": "3f8b91ca1a9fa7167b09e773da53f5ae60d0a1fd88f02a783f6e328a72887f6e",
    "frost4.jpg": "5fc6a19df4a429ba68abdcc8f8a4278d4c9f81c9ccafd2c92ab0c8cf8992ebd2",
}
# With the published third, the second picture comes with a probability of 40 %.
PICKED_FROM = ("frost1.jpg", "frost2.jpg", "frost2.jpg", "frost3.jpg", "frost4.jpg")


@lru_cache(maxsize=1)
def standard_folder() -> Path | None:
    """Folder of the published textures, or None if one of them is missing or another picture."""
    spec = find_spec("torch_uncertainty_assets")
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "frost"
        if all(
            (folder / name).is_file() and hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
            for name, digest in STANDARD_FILES.items()
        ):
            return folder
    return None


def procedural_texture(number: int, height: int = 400, width: int = 600) -> Images:
    """Bluish white crystals: ridges of smooth noise at several scales. Not the published frost."""
    import cv2

    rng = np.random.Generator(np.random.Philox(key=number))
    ridges = np.zeros((height, width), np.float32)
    for sigma in (2.0, 5.0, 12.0, 30.0):
        noise = cv2.GaussianBlur(rng.standard_normal((height, width), np.float32), (0, 0), sigma)
        ridges += 1 - np.minimum(np.abs(noise) / noise.std(), 1)
    ridges *= 255 / ridges.max()
    tint = np.array([0.85, 0.95, 1.0], np.float32)
    picture: Images = np.clip(ridges[..., None] * tint + 20, 0, 255).astype(np.uint8)
    return picture


@lru_cache(maxsize=1)
def full_size() -> tuple[Images, ...]:
    """The five textures to pick from, RGB, each (height, width, 3)."""
    folder = standard_folder()
    if folder is None:
        warnings.warn(
            "the published frost textures are not installed (`pip install torch-uncertainty-assets`); "
            "a procedural texture stands in, so label results with frost as non-standard",
            stacklevel=2,
        )
        return tuple(procedural_texture(number) for number in range(len(PICKED_FROM)))
    import cv2

    pictures: dict[str, Images] = {}
    for name in STANDARD_FILES:
        # Decoded from memory: `imread` cannot open every path on every system.
        encoded = np.frombuffer((folder / name).read_bytes(), np.uint8)
        decoded = np.asarray(cv2.imdecode(encoded, cv2.IMREAD_COLOR), np.uint8)
        pictures[name] = np.ascontiguousarray(decoded[..., ::-1])  # OpenCV's order is BGR
    return tuple(pictures[name] for name in PICKED_FROM)


@lru_cache(maxsize=8)
def textures(rescale: float, height: int, width: int) -> tuple[Images, ...]:
    """The five textures times `rescale`, or times what just covers an image of this size plus a pixel."""
    import cv2

    fitted = []
    for picture in full_size():
        factor = max(rescale, (height + 1) / picture.shape[0], (width + 1) / picture.shape[1])
        if factor != 1:  # by factor, not by size: OpenCV then samples at exactly this scale, as published
            resized = cv2.resize(picture, None, fx=factor, fy=factor, interpolation=cv2.INTER_LINEAR)
            picture = np.asarray(resized, np.uint8)
        fitted.append(picture)
    return tuple(fitted)
