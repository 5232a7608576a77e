"""Snow, frost, fog, brightness."""

from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from math import ceil

import cv2
import numpy as np
import numpy.typing as npt

from .blur import zoom_positions
from .motion import smear
from .pixels import NO_MAP, Floats, Images, spread, truncate
from .plasma import plasma_maps
from .randomness import random_signed
from .textures import textures


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
    crop = (
        ceil(height / zoom),
        ceil(width / zoom),
    )  # only the centre of the noise is seen, so only it is drawn
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
    places = np.left_shift(spread(largest), 8, dtype=np.intp)
    places |= images
    return brightness_table(offset).take(places)
