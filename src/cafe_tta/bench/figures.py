"""Figures: readable in print and on a screen, in colours that colour-blind readers can tell apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cafe_tta import corruptions

if TYPE_CHECKING:
    from cafe_tta.bench.demo import MethodResult
    from cafe_tta.data import ImageSet

# Okabe and Ito's palette.
BLUE, ORANGE, GREY, GREEN = "#0072B2", "#D55E00", "#7F7F7F", "#009E73"


def draw_demo(images: "ImageSet", results: "Sequence[MethodResult]", output: Path) -> list[Path]:
    """Accuracy and Fréchet distance of every method, and the corrupted digits, as PNG and SVG."""
    pyplot = _pyplot()
    figure = pyplot.figure(figsize=(10, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 3.2])
    _draw_samples(figure.add_subplot(grid[0, :]), images)
    names = [result.name for result in results]
    rows = np.arange(len(results))[::-1]
    colours = [_colour(name) for name in names]
    accuracy = figure.add_subplot(grid[1, 0])
    means, spreads = [result.mean for result in results], [result.spread for result in results]
    for row, mean, spread, colour in zip(rows, means, spreads, colours, strict=True):
        accuracy.errorbar(mean, row, xerr=spread, fmt="o", color=colour, capsize=3, markersize=6)
        accuracy.text(mean, row + 0.24, f"{mean:.1f}", ha="center", fontsize=8)
    accuracy.set_yticks(rows, names)
    accuracy.set_ylim(-0.6, len(results) - 0.3)
    accuracy.grid(axis="x", color="0.9")
    accuracy.set_axisbelow(True)
    accuracy.set_xlabel(f"accuracy on mixed corruptions, % (mean ± std of {len(results[0].records)} seeds)")
    distance = figure.add_subplot(grid[1, 1], sharey=accuracy)
    frechet = [result.frechet for result in results]
    distance.barh(rows, frechet, color=colours, height=0.7)
    for row, value in zip(rows, frechet, strict=True):
        distance.text(value + 0.01 * max(frechet), row, f"{value:.2f}", va="center", fontsize=8)
    distance.tick_params(labelleft=False)
    distance.set_xlim(0, 1.12 * max(frechet))
    distance.set_xlabel("Fréchet distance of the features to the source")
    meanings = {"not adapted": GREY, "earlier methods": BLUE, "CAFe": ORANGE, "needs source data": GREEN}
    handles = [pyplot.Line2D([], [], marker="o", linestyle="", color=colour) for colour in meanings.values()]
    figure.legend(handles, list(meanings), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    for axes in (accuracy, distance):
        axes.spines[["top", "right"]].set_visible(False)
    paths = [output / "demo.png", output / "demo.svg"]
    for path in paths:
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return paths


def _draw_samples(axes: Any, images: "ImageSet") -> None:
    clean = images.images([3])
    tiles = [clean[0], *(corruptions.corrupt(clean, name, severity=5, seed=0)[0] for name in corruptions.NAMES)]
    gap = np.full((32, 2, 3), 255, dtype=np.uint8)
    axes.imshow(np.concatenate([part for tile in tiles for part in (tile, gap)][:-1], axis=1), interpolation="nearest")
    places, names = (
        [16 + 34 * i for i in range(len(tiles))],
        ["clean", *(name.replace("_", " ") for name in corruptions.NAMES)],
    )
    axes.set_xticks(places, names, rotation=35, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _colour(name: str) -> str:
    if name == "source":
        return GREY
    if name == "dann":
        return GREEN  # needs source data: not a rival, a reference
    return ORANGE if name.startswith("cafe") else BLUE


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # no window: the figures are files
    from matplotlib import pyplot

    return pyplot
