"""Motion blur as ImageMagick does it: one-sided, along a line of whole-pixel offsets."""

from collections.abc import Iterable
from functools import lru_cache
from math import ceil, cos, radians, sin

import cv2
import numpy as np

from .pixels import Floats, Images, truncate


@lru_cache(maxsize=64)
def tap_weights(radius: float, sigma: float) -> tuple[float, ...]:
    """w_i ~ exp(-i^2 / 2 sigma^2) for i = 0 .. 2 radius, sum 1, without the tail that no pixel can feel."""
    weights = np.exp(-0.5 * (np.arange(2 * int(radius) + 1) / sigma) ** 2)
    weights /= weights.sum()
    return tuple(weights[weights > 1e-7].tolist())


def motion_taps(radius: float, sigma: float, angle: float) -> dict[tuple[int, int], float]:
    """Weight of each offset (dy, dx): tap i lies at (ceil(i sin a - 1/2), ceil(i cos a - 1/2))."""
    down, right = sin(radians(angle)), cos(radians(angle))
    taps: dict[tuple[int, int], float] = {}
    for i, weight in enumerate(tap_weights(radius, sigma)):
        offset = ceil(i * down - 0.5), ceil(i * right - 0.5)
        taps[offset] = taps.get(offset, 0.0) + weight
    return taps


def smear(image: Images, radius: float, sigma: float, angle: float) -> Floats:
    """Motion blur of one image or layer, edge pixels repeated outside, before truncation."""
    taps = motion_taps(radius, sigma, angle)
    downs, rights = zip(*taps, strict=True)
    top, left = max(0, -min(downs)), max(0, -min(rights))
    bottom, right = max(0, *downs), max(0, *rights)
    padded = cv2.copyMakeBorder(image, top, bottom, left, right, cv2.BORDER_REPLICATE).astype(np.float32)
    height, width = image.shape[:2]
    total = np.zeros(image.shape, np.float32)
    for (dy, dx), weight in taps.items():
        shifted = padded[top + dy : top + dy + height, left + dx : left + dx + width]
        cv2.scaleAdd(shifted, weight, total, total)
    return total


def motion_blur(images: Images, streams: Iterable[np.random.Generator], radius: float, sigma: float) -> Images:
    """Smear each image in a direction of -45 to 45 degrees."""
    blurred = np.empty(images.shape, np.float32)
    for n, stream in enumerate(streams):
        blurred[n] = smear(images[n], radius, sigma, stream.uniform(-45, 45))
    return truncate(blurred)
