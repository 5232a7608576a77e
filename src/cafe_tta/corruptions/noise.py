"""The noises: each value of the image is replaced at random, whatever its neighbours.

Result and input are both one of 256 grey levels, so a noise is a 256 x 256 table of probabilities P[v, k]
that level v becomes level k. The tables are computed exactly (clipping and truncation included) and sampled
with Walker's alias method: one 32-bit random word and one table look-up per value, faster than drawing the
noise itself.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from .pixels import Images
from .randomness import random_words

Probabilities = npt.NDArray[np.float64]  # (256, 256), rows sum to 1
LEVELS = np.arange(256)


@lru_cache(maxsize=32)
def gaussian_table(std: float, multiplicative: bool) -> Probabilities:
    """v -> int(clip(v + n, 0, 255)) with n of standard deviation 255 std, or v std if multiplicative."""
    scale = std * (LEVELS if multiplicative else np.full(256, 255))
    edges = np.concatenate(([-np.inf], LEVELS[1:], [np.inf]))  # level k holds the values in [k, k + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        below = special.ndtr((edges - LEVELS[:, None]) / scale[:, None])  # (256, 257)
    if multiplicative:
        below[0] = edges > 0  # black has no noise to multiply
    return np.diff(below, axis=1)


@lru_cache(maxsize=32)
def poisson_table(photons: float) -> Probabilities:
    """v -> int(min(n / photons, 1) * 255) with n ~ Poisson(v / 255 * photons)."""
    counts = np.arange(int(photons))  # the last level takes all that is left: counts above `photons` saturate
    mean = LEVELS[:, None] / 255 * photons
    chance = np.exp(special.xlogy(counts, mean) - special.gammaln(counts + 1) - mean)  # (256, photons)
    table = np.zeros((256, 256))
    np.add.at(table.T, (counts / photons * 255).astype(np.uint8), chance.T)
    table[:, 255] = np.maximum(1 - table.sum(1), 0)
    return table


@lru_cache(maxsize=32)
def impulse_table(fraction: float) -> Probabilities:
    """v -> 0 or 255, each with probability fraction / 2, else v."""
    table = np.eye(256) * (1 - fraction)
    table[:, [0, 255]] += fraction / 2
    return table


def alias_table(probabilities: Probabilities) -> npt.NDArray[np.uint32]:
    """Walker's table of 256 columns per row: an entry is (24-bit threshold, 8-bit alias).

    Every column holds 1/256 of the probability: its own level up to the threshold, one other level (the
    alias) above. The poorest column is filled up by the richest until all are level.
    """
    rows = np.arange(256)
    mass = probabilities * 256
    threshold = np.ones((256, 256))
    alias = np.tile(LEVELS, (256, 1))
    while True:
        poor, rich = mass.argmin(1), mass.argmax(1)
        open_rows = rows[mass[rows, poor] < 1 - 1e-9]  # what is left after that is rounding
        if not len(open_rows):
            break
        poor, rich = poor[open_rows], rich[open_rows]
        own = mass[open_rows, poor]
        threshold[open_rows, poor] = own
        alias[open_rows, poor] = rich
        mass[open_rows, rich] -= 1 - own
        mass[open_rows, poor] = 1
    steps = np.minimum(np.rint(threshold * 2**24), 2**24 - 1).astype(np.uint32)
    return (steps << np.uint32(8) | alias.astype(np.uint32)).ravel()


def resample(images: Images, streams: Iterable[np.random.Generator], entries: npt.NDArray[np.uint32]) -> Images:
    """Replace each value by a draw from its row of the alias table."""
    size = images[0].size
    words = np.empty((len(images), size), np.uint32)
    for row, stream in zip(words, streams, strict=True):
        row[:] = random_words(stream, size)
    words = words.ravel()
    # The low byte of a word chooses the column, the other three are compared with its threshold.
    columns = words.astype(np.uint8)
    rows = np.left_shift(images.ravel(), 8, dtype=np.intp)
    rows |= columns
    drawn = entries.take(rows)
    return np.where(words < drawn, columns, drawn.astype(np.uint8)).reshape(images.shape)


@lru_cache(maxsize=32)
def gaussian_entries(std: float, multiplicative: bool) -> npt.NDArray[np.uint32]:
    return alias_table(gaussian_table(std, multiplicative))


@lru_cache(maxsize=32)
def poisson_entries(photons: float) -> npt.NDArray[np.uint32]:
    return alias_table(poisson_table(photons))


@lru_cache(maxsize=32)
def impulse_entries(fraction: float) -> npt.NDArray[np.uint32]:
    return alias_table(impulse_table(fraction))


def gaussian_noise(images: Images, streams: Iterable[np.random.Generator], std: float) -> Images:
    """Add N(0, std) to each value on the scale 0..1."""
    return resample(images, streams, gaussian_entries(std, multiplicative=False))


def shot_noise(images: Images, streams: Iterable[np.random.Generator], photons: float) -> Images:
    """Count photons: each value is Poisson with `photons` expected at full scale."""
    return resample(images, streams, poisson_entries(photons))


def impulse_noise(images: Images, streams: Iterable[np.random.Generator], fraction: float) -> Images:
    """Turn a fraction of the values, channels apart, to black or white."""
    return resample(images, streams, impulse_entries(fraction))


def speckle_noise(images: Images, streams: Iterable[np.random.Generator], std: float) -> Images:
    """Add to each value N(0, std) times itself."""
    return resample(images, streams, gaussian_entries(std, multiplicative=True))
