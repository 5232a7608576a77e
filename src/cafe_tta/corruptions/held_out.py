"""Saturate and spatter, two of the four corruptions kept for validation (the others: `noise`, `blur`)."""

from collections.abc import Iterable

import cv2
import numpy as np

from .pixels import Floats, Images, Reals, gaussian_smooth, spread, truncate

WATER = np.array([175, 238, 238], np.float32)  # pale turquoise
MUD = np.array([63, 42, 20], np.float32)
EMBOSS = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], np.float32)


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


def water_mask(liquid: Reals) -> Floats:
    """How much water each pixel of a liquid layer gets, at most 1: drops with an embossed rim."""
    drops = (liquid * np.float32(255)).astype(np.uint8)
    distance = cv2.distanceTransform(255 - cv2.Canny(drops, 50, 150), cv2.DIST_L2, 5)
    depth = cv2.blur(np.minimum(distance, np.float32(20)), (3, 3)).astype(np.uint8)
    relief = cv2.filter2D(cv2.equalizeHist(depth), cv2.CV_8U, EMBOSS)
    mask = drops.astype(np.float32) * np.asarray(cv2.blur(relief, (3, 3)), np.float32)
    highest = mask.max()
    if highest > 0:  # no drop at all leaves the image as it is
        mask /= highest
    return mask


def mud_mask(liquid: Reals, threshold: float, sigma: float) -> Reals:
    """How much mud covers each pixel: the smoothed spots, where nearly full."""
    mask = gaussian_smooth((liquid > threshold).astype(np.float32), sigma)
    mask[mask < 0.8] = 0
    return mask


def spatter(
    images: Images,
    streams: Iterable[np.random.Generator],
    mean: float,
    std: float,
    sigma: float,
    threshold: float,
    strength: float,
    mud: float,
) -> Images:
    """Splash with water (added, times `strength`) or mud (covering, its spots smoothed by `strength`)."""
    masks = np.empty(images.shape[:3], np.float32)
    for mask, stream in zip(masks, streams, strict=True):
        noise = stream.standard_normal(mask.shape, np.float32) * np.float32(std) + np.float32(mean)
        liquid = gaussian_smooth(noise, sigma)
        liquid[liquid < threshold] = 0
        mask[:] = mud_mask(liquid, threshold, strength) if mud else water_mask(liquid) * np.float32(strength)
    cover = spread(masks)
    values = images.astype(np.float32)
    if mud:
        values *= 1 - cover
        return truncate(values + cover * MUD)
    return truncate(values + cover * WATER)
