"""Contrast, elastic transform, pixelate, JPEG, saturate."""

from collections.abc import Iterable
from functools import lru_cache

import cv2
import numpy as np
from PIL import Image
from scipy import fft

from .pixels import NO_MAP, Floats, Images, gaussian_kernel, truncate
from .randomness import random_signed


def contrast(images: Images, _streams: object, factor: float) -> Images:
    """(x - mean) * factor + mean, with the mean of each channel over the image."""
    means = np.array([cv2.mean(image)[:3] for image in images])  # (N, 3)
    tables = means[:, None] + (np.arange(256)[:, None] - means[:, None]) * factor  # (N, 256, 3)
    tables = np.clip(tables + 1e-9, 0, 255).astype(np.uint8)
    changed = np.empty_like(images)
    for n, image in enumerate(images):
        cv2.LUT(image, tables[n][None], dst=changed[n])
    return changed


@lru_cache(maxsize=8)
def mirror_response(side: int, sigma: float) -> Floats:
    """What a Gaussian kernel (cut at 3 sigma) does to each cosine of a mirrored axis."""
    kernel = gaussian_kernel(sigma, 3.0)
    offsets = np.arange(len(kernel)) - len(kernel) // 2
    waves = np.cos(np.pi / side * np.outer(np.arange(side), offsets))
    return np.asarray((waves * kernel).sum(1), np.float32)  # not `@`: BLAS rounds as its threads divide the work


def smooth_mirrored(fields: Floats, sigma: float) -> Floats:
    """Gaussian smoothing (cut at 3 sigma, half-sample mirror border) of fields (H, W, 2)."""
    kernel = gaussian_kernel(sigma, 3.0)
    height, width, _ = fields.shape
    if len(kernel) // 2 < min(height, width):
        smoothed = cv2.sepFilter2D(fields, -1, kernel, kernel, borderType=cv2.BORDER_REFLECT)
        return np.asarray(smoothed, np.float32)
    # A kernel wider than the image (ImageNet severity 1: 1025 taps) is one product per cosine instead.
    cosines = fft.dctn(fields, axes=(0, 1))
    cosines *= np.outer(mirror_response(height, sigma), mirror_response(width, sigma))[..., None]
    return np.ascontiguousarray(fft.idctn(cosines, axes=(0, 1)))


@lru_cache(maxsize=8)
def pixel_grid(height: int, width: int) -> Floats:
    """(H, W, 2): the position (x, y) of each pixel."""
    return np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1).astype(np.float32)


def elastic_transform(
    images: Images, streams: Iterable[np.random.Generator], alpha: float, sigma: float, jitter: float
) -> Images:
    """Random affine map of three anchor points, then random smooth displacements of size alpha."""
    _, height, width, _ = images.shape
    centre = np.array([width // 2, height // 2])
    reach = min(height, width) // 3
    anchors = (centre + reach * np.array([[1, 1], [1, -1], [-1, -1]])).astype(np.float32)
    values = images.astype(np.float32)
    for image, stream in zip(values, streams, strict=True):
        moved = anchors + stream.uniform(-jitter, jitter, (3, 2)).astype(np.float32)
        matrix = cv2.getAffineTransform(anchors, moved)
        cv2.warpAffine(
            image,
            matrix,
            (width, height),
            dst=image,
            flags=cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_REFLECT_101,
        )
        if alpha == 0:
            continue  # CIFAR and Tiny ImageNet severity 1: the affine map alone
        fields = random_signed(stream, height * width * 2).reshape(height, width, 2)
        positions = smooth_mirrored(fields, sigma) * np.float32(alpha) + pixel_grid(height, width)
        cv2.remap(image, positions, NO_MAP, cv2.INTER_LINEAR, dst=image, borderMode=cv2.BORDER_REFLECT)
    return truncate(values)


def pixelate(images: Images, _streams: object, scale: float) -> Images:
    """Shrink with a box filter and enlarge again with a box filter."""
    _, height, width, _ = images.shape
    small = int(width * scale), int(height * scale)
    changed = np.empty_like(images)
    for before, after in zip(images, changed, strict=True):
        shrunk = Image.fromarray(before).resize(small, Image.Resampling.BOX)
        after[:] = np.asarray(shrunk.resize((width, height), Image.Resampling.BOX))
    return changed


def jpeg_compression(images: Images, _streams: object, quality: float) -> Images:
    """Encode as JPEG (4:2:0) and decode.

    OpenCV gives the same pixels as the published Pillow and is four times faster on small images.
    """
    options = [cv2.IMWRITE_JPEG_QUALITY, int(quality)]
    changed = np.empty_like(images)
    for before, after in zip(images, changed, strict=True):
        _, encoded = cv2.imencode(".jpg", cv2.cvtColor(before, cv2.COLOR_RGB2BGR), options)
        after[:] = np.asarray(cv2.imdecode(encoded, cv2.IMREAD_COLOR))[..., ::-1]
    return changed


def saturate(images: Images, _streams: object, factor: float, offset: float) -> Images:
    """S of HSV becomes clip(S * factor + offset, 0, 1).

    With V and m the largest and smallest value of a pixel, S = (V - m) / V and the pixel is V - S' V (V - x)
    / (V - m).
    """
    values = images.astype(np.float32)
    channels = values[..., 0], values[..., 1], values[..., 2]
    largest = np.maximum(np.maximum(channels[0], channels[1]), channels[2])
    spans = largest - np.minimum(np.minimum(channels[0], channels[1]), channels[2])
    grey = spans == 0
    saturation = np.clip(spans / np.maximum(largest, 1) * np.float32(factor) + np.float32(offset), 0, 1)
    cut = saturation * largest
    spans[grey] = 1
    # The hue of a grey pixel is 0, red, so its green and blue give way in full.
    for channel, grey_share in zip(channels, (0, 1, 1), strict=True):
        share = (largest - channel) / spans
        share[grey] = grey_share
        channel[:] = largest - cut * share
    return truncate(values)
