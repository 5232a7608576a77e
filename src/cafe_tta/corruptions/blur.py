"""Blurs: defocus, Gaussian, zoom, motion, glass."""

from collections.abc import Iterable
from functools import lru_cache
from math import ceil, cos, radians, sin

import cv2
import numpy as np
import numpy.typing as npt
from scipy import sparse

from .pixels import Doubles, Floats, Images, gaussian_smooth_all, truncate
from .randomness import random_below

# Pixels of an image whose zoom blur is one cached matrix; by the image's size alone, so that batches do not matter.
LARGEST_ZOOM_MATRIX = 256 * 256


@lru_cache(maxsize=32)
def disk_kernel(radius: float, alias_sigma: float) -> Doubles:
    """0/1 disk of the given radius, sum 1, smoothed by a small Gaussian."""
    reach = 8 if radius <= 8 else int(radius)
    squares = np.arange(-reach, reach + 1) ** 2
    disk = (squares[:, None] + squares <= radius**2).astype(np.float64)
    window = 3 if radius <= 8 else 5
    # OpenCV mirrors the kernel at its own border, so disks that touch it (radius 8, 10) do not quite
    # keep sum 1.
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
    # Pixels by (image, channel): scipy adds up whole rows, each column by itself, so a batch equals its images.
    columns = images.reshape(count, height * width, 3).swapaxes(0, 1).astype(np.float32, order="C")
    blurred = zoom_matrix(height, width, start, stop, step) @ columns.reshape(height * width, 3 * count)
    result = truncate(blurred).reshape(height * width, count, 3).swapaxes(0, 1)
    return np.ascontiguousarray(result).reshape(images.shape)


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
    """Smear each image one-sidedly, in a direction of -45 to 45 degrees, as ImageMagick does."""
    blurred = np.empty(images.shape, np.float32)
    for n, stream in enumerate(streams):
        blurred[n] = smear(images[n], radius, sigma, stream.uniform(-45, 45))
    return truncate(blurred)


def copy_sources(choices: npt.NDArray[np.intp], height: int, width: int, reach: int) -> npt.NDArray[np.intp]:
    """Which pixel each pixel holds after one pass of copying the chosen neighbours, (N * height * width,).

    The published loop runs over rows height - reach down to reach + 1 and columns likewise. It means to swap
    with the neighbour, but on numpy views the pixel is overwritten and the neighbour stays. A neighbour that
    lies further on in the image has itself been overwritten before, so the copy is followed from there.
    """
    count, rows, columns = choices.shape
    pixels = np.arange(count * height * width).reshape(count, height, width)
    inside = np.s_[:, reach + 1 : reach + 1 + rows, reach + 1 : reach + 1 + columns]
    down, right = np.divmod(np.arange(4 * reach * reach), 2 * reach)
    jumps = (down - reach) * width + (right - reach)  # offsets -reach .. reach - 1, the upper end left out
    target = jumps.take(choices)
    goes_on = target > 0
    target += pixels[inside]
    link = ~pixels  # ~p: the chain ends at pixel p; p: it goes on from there
    link[inside] = np.where(goes_on, target, ~target)
    flat = link.ravel()
    pending = np.flatnonzero(flat >= 0)
    while len(pending):  # each round doubles the stride, so 3 to 5 rounds do
        onward = flat.take(flat.take(pending))
        flat[pending] = onward
        pending = pending[onward >= 0]
    return ~flat


def glass_blur(
    images: Images, streams: Iterable[np.random.Generator], sigma: float, reach: float, passes: float
) -> Images:
    """Gaussian blur, `passes` rounds of copying a neighbour at most `reach` away, Gaussian blur."""
    count, height, width, _ = images.shape
    reach, passes = int(reach), int(passes)
    shape = (passes, height - 2 * reach, width - 2 * reach)
    choices = np.empty((count, *shape), np.intp)
    for row, stream in zip(choices, streams, strict=True):
        row[:] = random_below(stream, 4 * reach * reach, row.size).reshape(shape)
    source = copy_sources(choices[:, 0], height, width, reach)
    for k in range(1, passes):
        source = source.take(copy_sources(choices[:, k], height, width, reach))
    blurred = truncate(gaussian_smooth_all(images, sigma))
    shuffled = blurred.reshape(-1, 3).take(source, axis=0).reshape(images.shape)
    return truncate(gaussian_smooth_all(shuffled, sigma))
