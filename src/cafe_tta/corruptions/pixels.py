"""What the corruptions share: truncation to uint8, grey layers spread to three channels, Gaussian kernels."""

from functools import lru_cache

import cv2
import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8]  # (N, H, W, 3), RGB
Floats = npt.NDArray[np.float32]

# The published scripts cut the fraction off. A value that is a whole number in exact arithmetic may come out of
# float32 a hair below it; without this nudge a flat area would lose a grey level at random.
NUDGE = np.float32(1e-3)


def truncate(values: Floats) -> Images:
    """Clip to 0..255 and drop the fraction; uses `values` as scratch space."""
    values += NUDGE
    np.clip(values, 0, 255, out=values)
    return values.astype(np.uint8)


def spread(layers: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """(N, H, W) grey layers to (N, H, W, 3); broadcasting along a last axis of 3 would be far slower."""
    count, height, width = layers.shape
    tall = np.ascontiguousarray(layers).reshape(count * height, width)
    return cv2.merge((tall, tall, tall)).reshape(count, height, width, 3)


@lru_cache(maxsize=64)
def gaussian_kernel(sigma: float, cut: float) -> Floats:
    """w_i ~ exp(-i^2 / 2 sigma^2) for |i| <= int(cut * sigma + 1/2), sum 1."""
    radius = int(cut * sigma + 0.5)
    if radius == 0:
        return np.ones(1, np.float32)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return (weights / weights.sum()).astype(np.float32)


def gaussian_smooth(image: npt.NDArray[np.generic], sigma: float) -> Floats:
    """Gaussian blur of one image or layer, kernel cut at 4 sigma, edge pixels repeated outside."""
    kernel = gaussian_kernel(sigma, 4.0)
    return cv2.sepFilter2D(image, cv2.CV_32F, kernel, kernel, borderType=cv2.BORDER_REPLICATE)
