"""Snow, frost, fog, brightness, spatter."""

from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from math import ceil

import cv2
import numpy as np
import numpy.typing as npt

from .blur import smear, zoom_positions
from .pixels import NO_MAP, Floats, Images, Reals, gaussian_smooth, spread, truncate
from .randomness import random_signed
from .textures import textures

WATER = np.array([175, 238, 238], np.float32)  # pale turquoise
MUD = np.array([63, 42, 20], np.float32)
EMBOSS = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], np.float32)


@lru_cache(maxsize=16)
def zoom_map(height: int, width: int, factor: float) -> Floats:
    """(height, width, 2) positions (x, y) inside the central crop that an enlargement by `factor` reads."""
    rows, columns = (zoom_positions(side, factor) - (side - ceil(side / factor)) // 2 for side in (height, width))
    return np.stack(np.meshgrid(columns, rows), axis=-1).astype(np.float32)


def snow(
    images: Images,
    streams: Iterable[np.random.Generator],
    mean: float,
    std: float,
    zoom: float,
    threshold: float,
    radius: float,
    sigma: float,
    mix: float,
) -> Images:
    """Whiten the image and let flakes fall.

    The flakes are thresholded noise, enlarged and smeared, once as they are and once turned by 180 degrees.
    """
    count, height, width, _ = images.shape
    crop = (ceil(height / zoom), ceil(width / zoom))  # only the centre of the noise is seen, so only it is drawn
    flakes = np.empty((count, height, width), np.uint8)
    for layer, stream in zip(flakes, streams, strict=True):
        noise = stream.standard_normal(crop, np.float32) * np.float32(std) + np.float32(mean)
        angle = stream.uniform(-135, -45)
        if zoom != 1:
            enlarged = cv2.remap(noise, zoom_map(height, width, zoom), NO_MAP, cv2.INTER_LINEAR)
            noise = np.asarray(enlarged, np.float32)
        noise[noise < threshold] = 0
        flake = (np.clip(noise, 0, 1) * np.float32(255)).astype(np.uint8)
        layer[:] = truncate(smear(flake, radius, sigma, angle))
    fall = flakes.astype(np.float32) + flakes[:, ::-1, ::-1]

    values = images.astype(np.float32)
    grey = cv2.cvtColor(values.reshape(count * height, width, 3), cv2.COLOR_RGB2GRAY).reshape(fall.shape)
    whitened = np.maximum(values, spread(grey * np.float32(1.5) + np.float32(127.5)))
    whitened *= np.float32(1 - mix)
    whitened += spread(fall)
    values *= np.float32(mix)
    values += whitened
    return truncate(values)


def frost(
    images: Images,
    streams: Iterable[np.random.Generator],
    image_weight: float,
    frost_weight: float,
    rescale: float,
) -> Images:
    """Mix the image with a random piece of a random texture."""
    _, height, width, _ = images.shape
    choice = textures(rescale, height, width)
    pieces = np.empty_like(images)
    for piece, stream in zip(pieces, streams, strict=True):
        texture = choice[stream.integers(len(choice))]
        top = stream.integers(texture.shape[0] - height)  # the last position is left out, as published
        left = stream.integers(texture.shape[1] - width)
        piece[:] = texture[top : top + height, left : left + width]
    # All published weights are multiples of 1/20, so whole numbers give the exact truncated result.
    total = images * np.uint16(round(20 * image_weight)) + pieces * np.uint16(round(20 * frost_weight))
    return np.minimum(total // np.uint16(20), 255).astype(np.uint8)


def wrapped(grids: Floats, after: bool) -> Floats:
    """Square grids with their first row and column once more at the end, or the last ones at the beginning."""
    count, points, _ = grids.shape
    larger = np.empty((count, points + 1, points + 1), np.float32)
    inside, edge, source = (slice(0, points), points, 0) if after else (slice(1, points + 1), 0, points)
    larger[:, inside, inside] = grids
    larger[:, edge, :] = larger[:, source, :]
    larger[:, :, edge] = larger[:, :, source]
    return larger


def plasma_maps(signed: Floats, side: int, decay: float) -> Floats:
    """Diamond-square plasma: (N, side, side) maps in 0..1 on a torus, from `signed` (N, side^2 - 1), uniform on -1..1.

    Starting from one point of height 0, each level puts a point in the centre of every square and then on the
    two kinds of edge midpoints: the mean of its four neighbours plus w * U(-w, w). Then w, at first 100, is
    divided by `decay`.
    """
    count = len(signed)
    corners = np.zeros((count, 1, 1), np.float32)
    wibble, used, quarter = 100.0, 0, np.float32(0.25)
    while (points := corners.shape[1]) < side:
        block = signed[:, used : used + 3 * points * points].reshape(count, 3, points, points)
        used += 3 * points * points
        noise = block * np.float32(wibble * wibble)
        ahead = wrapped(corners, after=True)
        here, below, beside = ahead[:, :-1, :-1], ahead[:, 1:, :-1], ahead[:, :-1, 1:]
        centres = quarter * (here + below + beside + ahead[:, 1:, 1:]) + noise[:, 0]
        behind = wrapped(centres, after=False)
        finer = np.empty((count, 2 * points, 2 * points), np.float32)
        finer[:, ::2, ::2] = corners
        finer[:, 1::2, 1::2] = centres
        finer[:, ::2, 1::2] = quarter * (here + beside + centres + behind[:, :-1, 1:]) + noise[:, 1]
        finer[:, 1::2, ::2] = quarter * (here + below + centres + behind[:, 1:, :-1]) + noise[:, 2]
        corners = finer
        wibble /= decay
    corners -= corners.min((1, 2), keepdims=True)
    corners /= corners.max((1, 2), keepdims=True)
    return corners


def fog(images: Images, streams: Iterable[np.random.Generator], strength: float, decay: float, side: float) -> Images:
    """Add strength * cloud map, then scale so that the brightest value stays: max / (max + strength).

    The map has the published side, or the next power of two that covers a larger image.
    """
    count, height, width, _ = images.shape
    map_side = max(int(side), 1 << (max(height, width) - 1).bit_length())
    points = map_side * map_side - 1
    clouds = np.empty(images.shape[:3], np.float32)
    group = max(1, 2**16 // points)  # maps made at a time: few enough for the cache, many enough to share calls
    sources = iter(streams)
    for start in range(0, count, group):
        part = clouds[start : start + group]
        signed = np.stack([random_signed(stream, points) for stream in islice(sources, len(part))])
        part[:] = plasma_maps(signed, map_side, decay)[:, :height, :width]
    clouds *= np.float32(255 * strength)
    values = images.astype(np.float32)
    values += spread(clouds)
    brightest = images.reshape(count, -1).max(1) / 255
    values *= (brightest / (brightest + strength)).astype(np.float32)[:, None, None, None]
    return truncate(values)


@lru_cache(maxsize=16)
def brightness_table(offset: float) -> npt.NDArray[np.uint8]:
    """(256 * 256,): what value x becomes in a pixel whose largest value is v, at 256 v + x."""
    largest = np.arange(256)[:, None]
    raised = np.minimum(largest + 255 * offset, 255)
    values = np.arange(256) * raised / np.maximum(largest, 1)
    values[0] = raised[0]  # black turns grey
    table: Images = np.clip(values + 1e-9, 0, 255).astype(np.uint8)
    return table.ravel()


def brightness(images: Images, _streams: object, offset: float) -> Images:
    """Add `offset` to the V of HSV, that is multiply each pixel by min(V + offset, 1) / V."""
    red, green, blue = cv2.split(images.reshape(-1, images.shape[2], 3))
    largest = np.asarray(cv2.max(cv2.max(red, green), blue), np.uint8).reshape(images.shape[:3])
    entries = np.left_shift(spread(largest), 8, dtype=np.intp)
    entries |= images
    return brightness_table(offset).take(entries)


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
