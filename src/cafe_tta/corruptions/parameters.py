"""The published parameters of every corruption, for severities 1 to 5 (hendrycks/robustness, Apache-2.0).

Each row is the argument list of the function of the same name. Three lengths that the scripts write into
their code (side of the fog map, shrinking of the frost textures, scale of the elastic displacements) are
arguments here too, so that a preset is nothing but its rows.
"""

from collections.abc import Mapping
from typing import Final

Row = tuple[float, ...]
Rows = tuple[Row, Row, Row, Row, Row]

# Part of every random key: an id is never reused or changed, else old results cannot be made again.
IDS: Final[Mapping[str, int]] = {
    "gaussian_noise": 1,
    "shot_noise": 2,
    "impulse_noise": 3,
    "defocus_blur": 4,
    "glass_blur": 5,
    "motion_blur": 6,
    "zoom_blur": 7,
    "snow": 8,
    "frost": 9,
    "fog": 10,
    "brightness": 11,
    "contrast": 12,
    "elastic_transform": 13,
    "pixelate": 14,
    "jpeg_compression": 15,
    "speckle_noise": 16,
    "gaussian_blur": 17,
    "saturate": 18,
    "spatter": 19,
}


def each(a: float, b: float, c: float, d: float, e: float) -> Rows:
    """One single parameter at five severities."""
    return ((a,), (b,), (c,), (d,), (e,))


def extended(rows: Rows, *more: float) -> Rows:
    """The same further parameters at the end of every row."""
    a, b, c, d, e = rows
    return ((*a, *more), (*b, *more), (*c, *more), (*d, *more), (*e, *more))


def scaled(rows: Rows, side: float) -> Rows:
    """Every parameter times `side`: the elastic parameters are published as fractions of the image."""
    a, b, c, d, e = (tuple(side * value for value in row) for row in rows)
    return (a, b, c, d, e)


_SMALL_ZOOMS: Rows = ((1, 1.06, 0.01), (1, 1.11, 0.01), (1, 1.16, 0.01), (1, 1.21, 0.01), (1, 1.26, 0.01))

_CIFAR: Mapping[str, Rows] = {
    "gaussian_noise": each(0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": each(500, 250, 100, 75, 50),
    "impulse_noise": each(0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": _SMALL_ZOOMS,
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": extended(((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)), 0.2),
    "fog": extended(((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)), 32),
    "brightness": each(0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": each(0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": scaled(
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)), 32
    ),
    "pixelate": each(0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": each(80, 65, 58, 50, 40),
    "speckle_noise": each(0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": each(0.4, 0.6, 0.7, 0.8, 1),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
}

_IMAGENET: Mapping[str, Rows] = {
    "gaussian_noise": each(0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": each(60, 25, 12, 5, 3),
    "impulse_noise": each(0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": ((1, 1.11, 0.01), (1, 1.16, 0.01), (1, 1.21, 0.02), (1, 1.26, 0.02), (1, 1.31, 0.03)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": extended(((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)), 1),
    "fog": extended(((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)), 256),
    "brightness": each(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": each(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": scaled(  # 244, sic: the authors meant 224 and kept what made the published data
        ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)), 244
    ),
    "pixelate": each(0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": each(25, 18, 15, 10, 7),
    "speckle_noise": each(0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": each(1, 2, 3, 4, 6),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    "spatter": (
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ),
}

_TINYIMAGENET: Mapping[str, Rows] = {
    "gaussian_noise": each(0.04, 0.08, 0.12, 0.15, 0.18),
    "shot_noise": each(250, 100, 50, 30, 15),
    "impulse_noise": each(0.01, 0.02, 0.05, 0.08, 0.14),
    "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
    "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
    "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
    "zoom_blur": _SMALL_ZOOMS,
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
    ),
    "frost": extended(((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)), 0.3),
    "fog": extended(((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)), 64),
    "brightness": each(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": each(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": scaled(
        ((0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)), 64
    ),
    "pixelate": each(0.9, 0.8, 0.7, 0.6, 0.5),
    "jpeg_compression": each(65, 58, 50, 40, 25),
    "speckle_noise": each(0.15, 0.2, 0.25, 0.3, 0.35),
    "gaussian_blur": each(0.5, 0.75, 1, 1.25, 1.5),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.6, 0),
        (0.65, 0.1, 0.8, 0.7, 0.6, 0),
        (0.65, 0.3, 1, 0.69, 0.6, 0),
        (0.65, 0.1, 0.7, 0.68, 0.6, 1),
        (0.65, 0.1, 0.5, 0.67, 0.6, 1),
    ),
}

PARAMETERS: Final[Mapping[str, Mapping[str, Rows]]] = {
    "cifar": _CIFAR,
    "imagenet": _IMAGENET,
    "tinyimagenet": _TINYIMAGENET,
}
