"""The corruptions of ImageNet-C and CIFAR-10-C, batched (https://arxiv.org/abs/1903.12261).

The results follow the published scripts, quirks included: truncation to uint8, glass blur that copies instead
of swapping, elastic displacements scaled by 244. The published random numbers were never seeded, so random
corruptions agree with the published sets in distribution, not image by image. The published ImageNet-C and
Tiny-ImageNet-C files were saved once more as JPEG of quality 85; that pass is left to the caller.

Images of other sizes than the published 32, 224 and 64 pixels, square or not, are taken as they are: lengths
in pixels keep their published value, zoom and pixelate work on each axis by itself, the fog map grows to the
next power of two that covers the image, and frost textures are enlarged just enough where they would not
cover it.
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Final

import numpy as np
import numpy.typing as npt

from .own import as_corruption
from .randomness import Streams
from .table import CORRUPTIONS, PRESETS, Corruption

__all__ = ["CORRUPTIONS", "HELD_OUT", "NAMES", "PRESETS", "Corruption", "choose_names", "corrupt", "frost_is_standard"]

NAMES: Final = tuple(name for name, row in CORRUPTIONS.items() if row.group in ("noise", "blur", "weather", "digital"))
HELD_OUT: Final = tuple(name for name, row in CORRUPTIONS.items() if row.group == "extra")  # for validation
_GROUPS: Final = {"all": NAMES, "held-out": HELD_OUT}


def corrupt(
    images: npt.NDArray[np.uint8],
    name: str,
    severity: int,
    seed: int = 0,
    preset: str = "cifar",
    indices: npt.ArrayLike | None = None,
) -> npt.NDArray[np.uint8]:
    """Corrupted copies of RGB images (N, H, W, 3), the same for an image whatever batch it comes in.

    `indices` (N,) are the indices of the images in their data set, by default 0 .. N - 1. Together with the seed, the
    corruption and the severity, they alone decide the random numbers, so that a loader may ask for image i by itself:
    `corrupt(image[None], "fog", 5, indices=[i])[0]`.

    >>> images = np.full((2, 32, 32, 3), 100, np.uint8)
    >>> corrupt(images, "brightness", severity=2)[0, 0, 0].tolist()
    [125, 125, 125]
    """
    name = corruption_name(name)
    if preset not in PRESETS:
        raise ValueError(_unknown("preset", preset, PRESETS))
    if not _is_whole(severity) or not 1 <= severity <= 5:
        raise ValueError(f"`severity` must be 1, 2, 3, 4 or 5, got {severity!r}")
    if not _is_whole(seed) or not 0 <= seed < 2**64:
        raise ValueError(f"`seed` must be a whole number from 0 to 2**64 - 1, got {seed!r}")
    _check_images(images)
    indices = _check_indices(indices, len(images))
    if images.size == 0:
        return images.copy()
    row = CORRUPTIONS[name]
    parameters = row.parameters(preset, severity)
    height, width = images.shape[1:3]
    needed = row.smallest_side(*parameters)
    if min(height, width) < needed:
        raise ValueError(
            f"{name} at severity {severity} of preset {preset!r} needs images of at least "
            f"{needed} x {needed} pixels, got {height} x {width}"
        )
    function = row.load()  # here, not above: importing the package must not load OpenCV, Pillow and SciPy
    block = max(1, row.block // images[0].size)
    corrupted = np.empty(images.shape, np.uint8)
    for start in range(0, len(images), block):
        part = slice(start, start + block)
        streams = Streams(int(seed), row.id, int(severity), indices[part])
        corrupted[part] = function(np.ascontiguousarray(images[part]), streams, *parameters)
    return corrupted


def corruption_name(text: str, known: Iterable[str] = ()) -> str:
    """The key in `CORRUPTIONS` of a corruption by its name, or by package.module:function, which is then added."""
    from cafe_tta import plugins  # here, not above: importing this package must not load PyTorch

    name = text if text in known else plugins.add("corruptions", text, CORRUPTIONS, as_corruption)
    if name is None:
        raise plugins.unknown("corruption", "corruptions", text, dict.fromkeys([*known, *CORRUPTIONS]))
    return name


def choose_names(names: str | Iterable[str], known: Iterable[str] = ()) -> tuple[str, ...]:
    """Corruptions by their names, or by `all` (the 15 of the paper) and `held-out`, in the order of the table.

    A name may also be package.module:function for one of your own, or one of `known`: those of a corrupted data set.

    >>> choose_names("fog,snow"), choose_names(["held-out"])[0]
    (('snow', 'fog'), 'speckle_noise')
    """
    chosen: set[str] = set()
    for name in (part.strip() for part in (names.split(",") if isinstance(names, str) else names)):
        chosen |= set(_GROUPS[name]) if name in _GROUPS else {corruption_name(name, (*_GROUPS, *known))}
    return tuple(name for name in dict.fromkeys([*CORRUPTIONS, *known]) if name in chosen)


def frost_is_standard() -> bool:
    """Whether the published frost textures are installed.

    They come with the package `torch-uncertainty-assets`. Without them, a procedural texture is used instead, and
    results with frost have to be labelled non-standard.
    """
    from .textures import standard_folder

    return standard_folder() is not None


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _unknown(kind: str, name: object, known: Collection[str]) -> str:
    near = get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}; {hint}Expected one of: {', '.join(known)}"


def _check_images(images: object) -> None:
    if not isinstance(images, np.ndarray):
        raise TypeError(f"`images` must be a numpy array of uint8, (N, H, W, 3), got {type(images).__name__}")
    if images.dtype != np.uint8:
        raise TypeError(
            f"`images` must be of dtype uint8, with values from 0 to 255, got {images.dtype}; "
            "convert images in 0..1 with (255 * images).round().astype('uint8')"
        )
    if images.ndim == 3:
        raise ValueError(f"`images` must have shape (N, H, W, 3), got {images.shape}; pass one image as image[None]")
    if images.ndim != 4 or images.shape[3] != 3:
        hint = (
            "; move the channels last with .transpose(0, 2, 3, 1)" if images.ndim == 4 and images.shape[1] == 3 else ""
        )
        raise ValueError(f"`images` must have shape (N, H, W, 3), got {images.shape}{hint}")
    if images.shape[0] and 0 in images.shape:
        raise ValueError(f"`images` must have pixels, got shape {images.shape}")


def _check_indices(indices: npt.ArrayLike | None, count: int) -> npt.NDArray[np.int64]:
    if indices is None:
        return np.arange(count)
    checked = np.asarray(indices)
    if checked.shape != (count,):
        raise ValueError(f"`indices` must have one entry per image, shape ({count},), got {checked.shape}")
    if count and checked.dtype.kind not in "iu":
        raise TypeError(f"`indices` must be integers, got {checked.dtype}")
    if count and checked.min() < 0:
        raise ValueError(f"`indices` must not be negative, got {checked.min()}")
    return checked.astype(np.int64)
