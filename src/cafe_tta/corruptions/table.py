"""One row for each corruption. To add one: write its function, and add its row here.

The parameters are the published ones (hendrycks/robustness, Apache-2.0), one tuple for each severity from 1 to 5: the
arguments of the function, after the images and their random streams. Three lengths that the published scripts write
into their code (side of the fog map, shrinking of the frost textures, scale of the elastic displacements) are
arguments here too, so that a preset consists of parameters alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import ceil
from typing import Any, Final, Literal, get_args

Row = tuple[float, ...]
Rows = tuple[Row, Row, Row, Row, Row]

Preset = Literal["cifar", "imagenet", "tinyimagenet"]
PRESETS: Final[tuple[str, ...]] = get_args(Preset)


@dataclass(frozen=True)
class Corruption:
    """What it takes to make a corruption."""

    id: int  # part of every random key: one above the largest; never reused or changed, to reproduce old results
    group: str  # as published: noise, blur, weather, digital, or extra (the held-out ones); "own" for a new one
    function: str | Callable[..., Any]  # or "module.name" in this package, imported when it is first used
    cifar: Rows
    imagenet: Rows
    tinyimagenet: Rows
    smallest_side: Callable[..., int] = lambda *parameters: 1  # pixels that it needs to mean anything
    # Values that are corrupted at a time: few enough to stay in the cache, and enough to spread the cost of calls over
    # many small images.
    block: int = 100_000

    def parameters(self, preset: str, severity: int) -> Row:
        rows: Rows = getattr(self, preset)
        return rows[severity - 1]

    def load(self) -> Callable[..., Any]:
        """The function that makes it."""
        if callable(self.function):
            return self.function
        module, name = self.function.split(".")
        try:
            loaded: Callable[..., Any] = getattr(import_module(f".{module}", __package__), name)
        except ModuleNotFoundError as error:
            from cafe_tta._install import missing  # here, not above: importing this package must not load PyTorch

            raise missing(f"the corruption {name}", error, "corruptions") from error
        return loaded


def each(a: float, b: float, c: float, d: float, e: float) -> Rows:
    """A single parameter at five severities."""
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

# fmt: off
CORRUPTIONS: Final[dict[str, Corruption]] = {  # in the paper's order
    "gaussian_noise": Corruption(
        1, "noise", "noise.gaussian_noise",
        cifar=each(0.04, 0.06, 0.08, 0.09, 0.10),
        imagenet=each(0.08, 0.12, 0.18, 0.26, 0.38),
        tinyimagenet=each(0.04, 0.08, 0.12, 0.15, 0.18),
    ),
    "shot_noise": Corruption(
        2, "noise", "noise.shot_noise",
        cifar=each(500, 250, 100, 75, 50),
        imagenet=each(60, 25, 12, 5, 3),
        tinyimagenet=each(250, 100, 50, 30, 15),
    ),
    "impulse_noise": Corruption(
        3, "noise", "noise.impulse_noise",
        cifar=each(0.01, 0.02, 0.03, 0.05, 0.07),
        imagenet=each(0.03, 0.06, 0.09, 0.17, 0.27),
        tinyimagenet=each(0.01, 0.02, 0.05, 0.08, 0.14),
    ),
    "defocus_blur": Corruption(
        4, "blur", "blur.defocus_blur",
        cifar=((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        imagenet=((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        tinyimagenet=((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
    ),
    "glass_blur": Corruption(
        5, "blur", "blur.glass_blur",
        smallest_side=lambda sigma, reach, passes: 2 * int(reach) + 1,  # else no pixel has room to look around
        cifar=((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        imagenet=((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        tinyimagenet=((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
    ),
    "motion_blur": Corruption(
        6, "blur", "blur.motion_blur",
        cifar=((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        imagenet=((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        tinyimagenet=((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
    ),
    "zoom_blur": Corruption(
        7, "blur", "blur.zoom_blur",
        block=2_500_000,  # it reads a large matrix per block and wants several large images at once
        cifar=_SMALL_ZOOMS,
        imagenet=((1, 1.11, 0.01), (1, 1.16, 0.01), (1, 1.21, 0.02), (1, 1.26, 0.02), (1, 1.31, 0.03)),
        tinyimagenet=_SMALL_ZOOMS,
    ),
    "snow": Corruption(
        8, "weather", "weather.snow",
        cifar=(
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        imagenet=(
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        tinyimagenet=(
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
    ),
    "frost": Corruption(
        9, "weather", "weather.frost",
        cifar=extended(((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)), 0.2),
        imagenet=extended(((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)), 1),
        tinyimagenet=extended(((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)), 0.3),
    ),
    "fog": Corruption(
        10, "weather", "weather.fog",
        cifar=extended(((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)), 32),
        imagenet=extended(((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)), 256),
        tinyimagenet=extended(((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)), 64),
    ),
    "brightness": Corruption(
        11, "weather", "weather.brightness",
        cifar=each(0.05, 0.1, 0.15, 0.2, 0.3),
        imagenet=each(0.1, 0.2, 0.3, 0.4, 0.5),
        tinyimagenet=each(0.1, 0.2, 0.3, 0.4, 0.5),
    ),
    "contrast": Corruption(
        12, "digital", "digital.contrast",
        cifar=each(0.75, 0.5, 0.4, 0.3, 0.15),
        imagenet=each(0.4, 0.3, 0.2, 0.1, 0.05),
        tinyimagenet=each(0.4, 0.3, 0.2, 0.1, 0.05),
    ),
    "elastic_transform": Corruption(
        13, "digital", "digital.elastic_transform",
        smallest_side=lambda *_: 3,  # else the three anchors coincide
        cifar=scaled(((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)), 32),
        imagenet=scaled(  # 244, sic: the authors meant 224 and kept what made the published data
            ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)), 244
        ),
        tinyimagenet=scaled(
            ((0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)), 64
        ),
    ),
    "pixelate": Corruption(
        14, "digital", "digital.pixelate",
        smallest_side=lambda scale: ceil(1 / scale),  # else nothing is left after shrinking
        cifar=each(0.95, 0.9, 0.85, 0.75, 0.65),
        imagenet=each(0.6, 0.5, 0.4, 0.3, 0.25),
        tinyimagenet=each(0.9, 0.8, 0.7, 0.6, 0.5),
    ),
    "jpeg_compression": Corruption(
        15, "digital", "digital.jpeg_compression",
        cifar=each(80, 65, 58, 50, 40),
        imagenet=each(25, 18, 15, 10, 7),
        tinyimagenet=each(65, 58, 50, 40, 25),
    ),
    "speckle_noise": Corruption(
        16, "extra", "noise.speckle_noise",
        cifar=each(0.06, 0.1, 0.12, 0.16, 0.2),
        imagenet=each(0.15, 0.2, 0.35, 0.45, 0.6),
        tinyimagenet=each(0.15, 0.2, 0.25, 0.3, 0.35),
    ),
    "gaussian_blur": Corruption(
        17, "extra", "blur.gaussian_blur",
        cifar=each(0.4, 0.6, 0.7, 0.8, 1),
        imagenet=each(1, 2, 3, 4, 6),
        tinyimagenet=each(0.5, 0.75, 1, 1.25, 1.5),
    ),
    "spatter": Corruption(
        19, "extra", "weather.spatter",
        cifar=(
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
        imagenet=(
            (0.65, 0.3, 4, 0.69, 0.6, 0),
            (0.65, 0.3, 3, 0.68, 0.6, 0),
            (0.65, 0.3, 2, 0.68, 0.5, 0),
            (0.65, 0.3, 1, 0.65, 1.5, 1),
            (0.67, 0.4, 1, 0.65, 1.5, 1),
        ),
        tinyimagenet=(
            (0.62, 0.1, 0.7, 0.7, 0.6, 0),
            (0.65, 0.1, 0.8, 0.7, 0.6, 0),
            (0.65, 0.3, 1, 0.69, 0.6, 0),
            (0.65, 0.1, 0.7, 0.68, 0.6, 1),
            (0.65, 0.1, 0.5, 0.67, 0.6, 1),
        ),
    ),
    "saturate": Corruption(
        18, "extra", "digital.saturate",
        cifar=((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
        imagenet=((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
        tinyimagenet=((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
    ),
}
# fmt: on
