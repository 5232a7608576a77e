"""Corruptions of the user's own: a function of one image, its severity and a random generator.

    def sand(image, severity, random):
        grains = random.random(image.shape[:2]) < 0.02 * severity
        return np.where(grains[..., None], np.uint8([194, 178, 128]), image)

The generator of an image depends on the seed, the corruption, the severity and the image's index alone.
"""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .randomness import Streams
from .table import Corruption, each

_FIRST_ID = 2**20  # far above those of the table


def as_corruption(name: str, found: Any) -> Corruption:
    """A row of the table, or one that is made of a function."""
    if isinstance(found, Corruption):
        return found
    if isinstance(found, type) or not callable(found):
        got = type(found).__name__
        raise TypeError(f"expected {name} to be a corruption, a function of (image, severity, random), but got {got}")
    severities = each(1, 2, 3, 4, 5)
    made = _batched(name, found)
    return Corruption(_FIRST_ID + zlib.crc32(name.encode()), "own", made, severities, severities, severities)


def _batched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def corrupt(images: npt.NDArray[np.uint8], streams: Streams, severity: int) -> npt.NDArray[np.uint8]:
        result = np.empty_like(images)
        for number, random in enumerate(streams):
            made = np.asarray(function(images[number].copy(), severity, random))
            if made.shape != images[number].shape or made.dtype != np.uint8:
                raise ValueError(
                    f"expected {name} to return uint8 pixels of shape {images[number].shape}, but got {made.dtype}, "
                    f"{made.shape}"
                )
            result[number] = made
        return result

    return corrupt
