"""What the corruptions share: truncation to uint8, grey layers spread to three channels, Gaussian kernels."""

from functools import lru_cache
from typing import Any, TypeVar

import cv2
import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8]  # (N, H, W, 3), RGB
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Reals = npt.NDArray[np.floating[Any]]
Value = TypeVar("Value", np.uint8, np.float32)

# The second map of `cv2.remap` when the first holds both coordinates; the stubs forbid None, OpenCV does not.
NO_MAP: Any = None

# The published scripts cut the fraction off. A value that is a whole number in exact arithmetic may come out
# a hair below it; without a nudge, larger than the rounding errors, a flat area would lose a grey level at random.
NUDGES = {"f": 2e-4, "d": 1e-9}  # by type: float32, float64


def truncate(values: Reals) -> Images:
    """Clip to 0..255 and drop the fraction; uses `values` as scratch space."""
    values += NUDGES[values.dtype.char]
    np.clip(values, 0, 255, out=values)
    return values.astype(np.uint8)


def spread(layers: npt.NDArray[Value]) -> npt.NDArray[Value]:
    """(N, H, W) grey layers to (N, H, W, 3); broadcasting along a last axis of 3 would be far slower."""
    count, height, width = layers.shape
    tall = np.ascontiguousarray(layers).reshape(count * height, width)
    return np.asarray(cv2.merge((tall, tall, tall)), layers.dtype).reshape(count, height, width, 3)


@lru_cache(maxsize=64)
def gaussian_kernel(sigma: float, cut: float) -> Doubles:
    """w_i ~ exp(-i^2 / 2 sigma^2) for |i| <= int(cut * sigma + 1/2), sum 1."""
    radius = int(cut * sigma + 0.5)
    if radius == 0:
        return np.ones(1)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return np.asarray(weights / weights.sum())


def gaussian_smooth(image: Images | Reals, sigma: float) -> Reals:
    """Gaussian blur of one image or layer, kernel cut at 4 sigma, edge pixels repeated outside.

    The smallest kernels change values by less than float32 resolves, and truncation shows it: they need float64.
    """
    kernel = gaussian_kernel(sigma, 4.0)
    if len(kernel) <= 5:
        exact = cv2.sepFilter2D(image.astype(np.float64), -1, kernel, kernel, borderType=cv2.BORDER_REPLICATE)
        return np.asarray(exact, np.float64)
    fast = cv2.sepFilter2D(image, cv2.CV_32F, kernel, kernel, borderType=cv2.BORDER_REPLICATE)
    return np.asarray(fast, np.float32)


def gaussian_smooth_all(images: Images, sigma: float) -> Reals:
    """Gaussian blur of each image of a batch."""
    smoothed: Reals = np.stack([gaussian_smooth(image, sigma) for image in images])
    return smoothed
