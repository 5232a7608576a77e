"""Figures of accuracy: of every method, on every corruption, and against what it costs."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from cafe_tta import corruptions
from cafe_tta.bench import paper
from cafe_tta.bench.report.accuracy import estimates, printed
from cafe_tta.bench.report.columns import MODES, Column, Row, columns, natural, rows
from cafe_tta.bench.report.cost import cost
from cafe_tta.bench.report.drawing import Drawing, Style, add_legend, draw, grid, layout
from cafe_tta.bench.report.estimates import Estimate, over_seeds
from cafe_tta.bench.report.records import MAIN, Record

Styles = dict[str, Style]
_TICK: Any = {"marker": "|", "markersize": 13, "markeredgewidth": 2, "color": "0.45"}


def draw_accuracy(records: Sequence[Record], styled: Styles, with_paper: bool) -> list[Drawing]:
    """Every method a dot, for every column of a mode; the paper's number a grey tick."""
    drawings = []
    for mode in MODES:
        made = columns([record for record in records if record.scope == MAIN], mode)
        if made:
            lines = rows(record for column in made for record in column.records)
            drawings.append(_overview(mode, made, lines, styled, with_paper))
    return drawings


def _overview(mode: str, made: list[Column], lines: list[Row], styled: Styles, with_paper: bool) -> Drawing:
    across, down = layout(len(made), 4)
    places = {row.label: len(lines) - 1 - i for i, row in enumerate(lines)}
    any_paper = with_paper and any(printed(column, row) for column in made for row in lines)

    def paint(figure: Any) -> None:
        from matplotlib.lines import Line2D

        for number, (axes, column) in enumerate(zip(grid(figure, len(made), 4, sharey=True), made, strict=True)):
            found, _ = estimates(column, lines)
            for row in lines:
                value, theirs = found.get(row.label), printed(column, row) if with_paper else None
                if isinstance(theirs, paper.Accuracy):
                    axes.plot(theirs.mean, places[row.label], **_TICK)
                if value:
                    style = styled[row.label]
                    axes.errorbar(value.mean, places[row.label], xerr=value.std, capsize=2.5, lw=1, **style.point())
            axes.set_title(column.name)
            axes.set_yticks(list(places.values()), list(places))
            axes.set_ylim(-0.6, len(lines) - 0.4)
            axes.margins(x=0.08)
            if number + across >= len(made):
                axes.set_xlabel("accuracy [%]")
        if any_paper:
            dot = Line2D([], [], linestyle="none", marker="o", mfc="0.3", mec="0.15", label="ours, ± std over seeds")
            tick = Line2D([], [], linestyle="none", label="the paper's", **_TICK)
            figure.legend(handles=[dot, tick], loc="outside lower right", ncols=2)

    size = (1.3 + 2.1 * across + (0.6 if across == 1 else 0), down * (0.23 * len(lines) + 0.65) + 0.35)
    title = f"Accuracy of every method, {mode}"
    return draw(
        f"accuracy-{mode}", title, "Mean and standard deviation over seeds. The axes do not begin at 0.", size, paint
    )


def draw_corruptions(records: Sequence[Record], styled: Styles) -> list[Drawing]:
    """The appendix's figures: accuracy on each corruption, averaged over its severities."""
    drawings = []
    for column in columns([record for record in records if record.scope == MAIN]):
        names = _corruptions(column)
        if len(names) > 1:
            drawings.append(_per_corruption(column, names, styled))
    return drawings


def _per_corruption(column: Column, names: list[str], styled: Styles) -> Drawing:
    lines = rows(column.records)

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        for place in range(0, len(names), 2):
            axes.axvspan(place - 0.5, place + 0.5, color="0.955", lw=0, zorder=0)
        for i, row in enumerate(lines):
            shift = 0.78 * ((i + 0.5) / len(lines) - 0.5)  # side by side: no dot hides another
            found = by_corruption(column.of(row.label))
            means = [found[name].mean if name in found else math.nan for name in names]
            spreads = [found[name].std or 0.0 if name in found else 0.0 for name in names]
            places = [place + shift for place in range(len(names))]
            axes.errorbar(places, means, spreads, ls="none", elinewidth=0.8, **_small(styled[row.label]))
        axes.set_xticks(
            range(len(names)),
            [name.replace("_", " ") for name in names],
            rotation=30,
            ha="right",
            rotation_mode="anchor",
        )
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.grid(axis="x", visible=False)
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel("accuracy [%]")
        add_legend(figure, lines, styled)

    name = f"corruptions-{column.dataset}-{column.protocol}-{column.mode}"
    title = f"Accuracy on each corruption: {column.name}, {column.mode}"
    caption = "Averaged over severities; mean and standard deviation over seeds. The axis does not begin at 0."
    return draw(name, title, caption, (min(10.5, 2.6 + 0.55 * len(names)), 3.6), paint)


def by_corruption(records: Sequence[Record]) -> dict[str, Estimate]:
    """Accuracy in per cent on each corruption: the mean over its severities, then over seeds."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for domain, value in record.by_domain.items():
            found[_corruption(domain)][record.seed].append(100 * value)
    means = {
        name: over_seeds({seed: statistics.fmean(v) for seed, v in seeds.items()}) for name, seeds in found.items()
    }
    return {name: value for name, value in means.items() if value}


def draw_cost(records: Sequence[Record], styled: Styles) -> list[Drawing]:
    """Accuracy against milliseconds an image, for each data set and mode."""
    dealt: dict[tuple[str, str], list[Column]] = defaultdict(list)
    for column in columns([record for record in records if record.scope == MAIN]):
        if all(record.seconds > 0 for record in column.records):
            dealt[column.dataset, column.mode].append(column)
    return [_cost(dataset, mode, made, styled) for (dataset, mode), made in dealt.items()]


def _cost(dataset: str, mode: str, made: list[Column], styled: Styles) -> Drawing:
    lines = rows(record for column in made for record in column.records)

    def paint(figure: Any) -> None:
        for axes, column in zip(grid(figure, len(made), 3), made, strict=True):
            for label, value in estimates(column, lines)[0].items():
                spent = cost(column.of(label)).milliseconds_per_image
                axes.errorbar(spent, value.mean, yerr=value.std, lw=0.8, **styled[label].point())
            _readable_log(axes)
            axes.set_title(column.name)
            axes.set_xlabel("ms / image")
            axes.set_ylabel("accuracy [%]")
            axes.margins(0.1)
        add_legend(figure, lines, styled)

    across, down = layout(len(made), 3)
    caption = "Up and to the left is better. Time of adapting and answering. The axes do not begin at 0."
    title = f"Accuracy against cost: {dataset}, {mode}"
    return draw(f"cost-{dataset}-{mode}", title, caption, (1.6 + 2.9 * across, 2.9 * down), paint)


def _readable_log(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _small(style: Style) -> dict[str, Any]:
    return {**style.point(), "markersize": 0.68 * style.size, "markeredgewidth": 0.4 if style.filled else 0.9}


def _corruption(domain: str) -> str:
    name, _, severity = domain.rpartition("-")
    return name if severity.isdigit() else domain


def _corruptions(column: Column) -> list[str]:
    found = {_corruption(domain) for record in column.records for domain in record.by_domain}
    known = [name for name in corruptions.NAMES if name in found]
    return known + sorted(found.difference(known), key=natural)
