"""Which function makes which corruption, the smallest image it takes, how batches are cut into blocks."""

from collections.abc import Callable, Mapping
from math import ceil

import numpy as np
import numpy.typing as npt

from . import blur, digital, glass, held_out, motion, noise, weather
from .parameters import IDS, Row
from .pixels import Images
from .randomness import Streams

FUNCTIONS: Mapping[str, Callable[..., Images]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": glass.glass_blur,
    "motion_blur": motion.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "saturate": held_out.saturate,
    "spatter": held_out.spatter,
}

# Values per block: small enough to stay in the cache, large enough to spread the cost of calls over many
# small images. Zoom blur reads a large matrix per block and wants several large images at once.
BLOCK = 100_000
ZOOM_BLOCK = 2_500_000


def smallest_side(name: str, parameters: Row) -> int:
    """The shortest side an image needs for this corruption to mean anything."""
    if name == "glass_blur":
        return 2 * int(parameters[1]) + 1  # else no pixel has room to look around
    if name == "pixelate":
        return ceil(1 / parameters[0])  # else nothing is left after shrinking
    if name == "elastic_transform":
        return 3  # else the three anchors coincide
    return 1


def run(images: Images, name: str, severity: int, seed: int, parameters: Row, indices: npt.NDArray[np.int64]) -> Images:
    """Corrupt a checked batch, block by block."""
    function = FUNCTIONS[name]
    block = max(1, (ZOOM_BLOCK if name == "zoom_blur" else BLOCK) // images[0].size)
    corrupted = np.empty(images.shape, np.uint8)
    for start in range(0, len(images), block):
        part = slice(start, start + block)
        streams = Streams(seed, IDS[name], severity, indices[part])
        corrupted[part] = function(np.ascontiguousarray(images[part]), streams, *parameters)
    return corrupted
