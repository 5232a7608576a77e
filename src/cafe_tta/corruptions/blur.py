"""Blurs that are the same for every image: defocus, zoom, Gaussian."""

from functools import lru_cache
from math import ceil

import cv2
import numpy as np
import numpy.typing as npt
from scipy import sparse

from .pixels import Doubles, Images, gaussian_smooth_all, truncate

# Pixels of an image whose zoom blur is one cached matrix; by the image's size alone, so that batches do not matter.
LARGEST_ZOOM_MATRIX = 256 * 256


@lru_cache(maxsize=32)
def disk_kernel(radius: float, alias_sigma: float) -> Doubles:
    """0/1 disk of the given radius, sum 1, smoothed by a small Gaussian."""
    reach = 8 if radius <= 8 else int(radius)
    squares = np.arange(-reach, reach + 1) ** 2
    disk = (squares[:, None] + squares <= radius**2).astype(np.float64)
    window = 3 if radius <= 8 else 5
    # OpenCV mirrors the kernel at its own border, so disks that touch it (radius 8, 10) do not quite keep sum
    # 1.
    kernel = cv2.GaussianBlur(disk / disk.sum(), (window, window), sigmaX=alias_sigma)
    margin = min(int(kernel.any(axis).argmax()) for axis in (0, 1))
    inside = slice(margin, len(kernel) - margin)
    return np.ascontiguousarray(kernel[inside, inside])  # most of the 17 x 17 grid is zeros for small disks


def defocus_blur(images: Images, _streams: object, radius: float, alias_sigma: float) -> Images:
    """Correlate with a disk; mirror border without repeating the edge."""
    kernel = disk_kernel(radius, alias_sigma)
    values = images.astype(np.float64)
    for image in values:
        cv2.filter2D(image, -1, kernel, dst=image, borderType=cv2.BORDER_REFLECT_101)
    return truncate(values)


def gaussian_blur(images: Images, _streams: object, sigma: float) -> Images:
    """Gaussian blur, kernel cut at 4 sigma, edge pixels repeated outside."""
    return truncate(gaussian_smooth_all(images, sigma))


def zoom_positions(side: int, factor: float) -> Doubles:
    """Where the pixels of one axis, enlarged by `factor` around the centre, lie on the original axis.

    The central ceil(side / factor) pixels are stretched to round(that * factor), first onto first and last
    onto last.
    """
    crop = ceil(side / factor)
    enlarged = round(crop * factor)
    step = (crop - 1) / (enlarged - 1) if enlarged > 1 else 0.0
    steps = (enlarged - side) // 2 + np.arange(side)
    return np.asarray((side - crop) // 2 + np.minimum(steps * step, crop - 1), np.float64)


def interpolation_matrix(positions: Doubles) -> sparse.csr_array:
    """(side, side) matrix that reads an axis at the given positions, linearly."""
    side = len(positions)
    lower = np.minimum(positions.astype(int), max(side - 2, 0))
    fraction = positions - lower
    rows = np.arange(side)
    entries = (
        np.concatenate((1 - fraction, fraction)),
        (np.tile(rows, 2), np.concatenate((lower, lower + 1))),
    )
    return sparse.csr_array(entries, shape=(side, side + 1))[:, :side]


@lru_cache(maxsize=8)  # about 14 MB each at 224 x 224
def zoom_matrix(height: int, width: int, start: float, stop: float, step: float) -> sparse.csr_array:
    """Mean of the image and its enlargements by arange(start, stop, step), as one matrix over pixels."""
    factors = np.arange(start, stop, step).tolist()  # rounding included: (1, 1.11, .01) gives 12 factors
    total = sparse.csr_array(sparse.eye_array(height * width))
    for factor in factors:
        rows, columns = (interpolation_matrix(zoom_positions(side, factor)) for side in (height, width))
        total = total + sparse.kron(rows, columns, format="csr")
    matrix = sparse.csr_array((total / (len(factors) + 1)).astype(np.float32))
    matrix.eliminate_zeros()
    matrix.sort_indices()
    return matrix


def _zoom_blur_by_axes(image: npt.NDArray[np.uint8], start: float, stop: float, step: float) -> npt.NDArray[np.uint8]:
    """The same for an image whose matrix over pixels would not fit into memory: rows first, then columns."""
    height, width, _ = image.shape
    factors = np.arange(start, stop, step).tolist()
    values = image.astype(np.float32)
    total = values.copy()
    for factor in factors:
        rows, columns = (
            interpolation_matrix(zoom_positions(side, factor)).astype(np.float32) for side in (height, width)
        )
        stretched = (rows @ values.reshape(height, width * 3)).reshape(height, width, 3)
        turned = np.ascontiguousarray(stretched.swapaxes(0, 1)).reshape(width, height * 3)
        total += (columns @ turned).reshape(width, height, 3).swapaxes(0, 1)
    return truncate(total / np.float32(len(factors) + 1))


def zoom_blur(images: Images, _streams: object, start: float, stop: float, step: float) -> Images:
    """Average the image with enlargements of itself; factor 1 is one of them, so the image counts twice."""
    count, height, width, _ = images.shape
    if height * width > LARGEST_ZOOM_MATRIX:
        return np.stack([_zoom_blur_by_axes(image, start, stop, step) for image in images])
    # Pixels by (image, channel): scipy adds up whole rows, each column by itself, so a batch equals its
    # images.
    columns = images.reshape(count, height * width, 3).swapaxes(0, 1).astype(np.float32, order="C")
    blurred = zoom_matrix(height, width, start, stop, step) @ columns.reshape(height * width, 3 * count)
    result = truncate(blurred).reshape(height * width, count, 3).swapaxes(0, 1)
    return np.ascontiguousarray(result).reshape(images.shape)
