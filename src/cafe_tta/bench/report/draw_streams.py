"""Figures of what happens while adapting: accuracy along the stream, and the distance that is left at its end."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from cafe_tta.bench.report.columns import MODES, PROTOCOLS, Column, columns, rows
from cafe_tta.bench.report.distances import distance_columns, distances
from cafe_tta.bench.report.drawing import BLUE, COLOURS, VERMILION, Drawing, Style, add_legend, draw, grid, layout
from cafe_tta.bench.report.records import MAIN, Record

_PROTOCOL_COLOURS = dict(zip(PROTOCOLS, (BLUE, "#56B4E9", VERMILION, "#E69F00", "#009E73", "#CC79A7"), strict=True))


def draw_streams(records: Sequence[Record], styled: dict[str, Style]) -> list[Drawing]:
    """Accuracy of the answers given on the way, for each data set: one panel a protocol."""
    streamed = [record for record in records if record.scope == MAIN and len(record.stream) > 1]
    drawings = []
    by_dataset: dict[str, list[Column]] = defaultdict(list)
    for column in columns(streamed):
        by_dataset[column.dataset].append(column)
    for dataset, made in by_dataset.items():
        mode = next(mode for mode in (*reversed(MODES), made[0].mode) if any(column.mode == mode for column in made))
        drawings.append(_streams(dataset, mode, [column for column in made if column.mode == mode], styled))
    return drawings


def _streams(dataset: str, mode: str, made: list[Column], styled: dict[str, Style]) -> Drawing:
    lines = rows(record for column in made for record in column.records)

    def paint(figure: Any) -> None:
        for axes, column in zip(grid(figure, len(made), 3), made, strict=True):
            for row in rows(column.records):
                blocks = along_the_stream(column.of(row.label))
                places = [100 * (i + 0.5) / len(blocks) for i in range(len(blocks))]
                style = styled[row.label]
                look = {**style.point(), "markersize": 0.6 * style.size}
                axes.plot(places, blocks, ls=style.line, lw=1.2, markevery=max(1, len(blocks) // 7), **look)
            axes.set_title(column.name)
            axes.set_xlim(0, 100)
            axes.set_xlabel("share of the stream seen [%]")
            axes.set_ylabel("accuracy [%]")
        add_legend(figure, lines, styled, lines=True)

    across, down = layout(len(made), 3)
    caption = (
        f"Answers given while adapting ({mode} runs), in equal blocks; mean over episodes and seeds. "
        "The axes do not begin at 0."
    )
    size = (1.9 + 2.9 * across + (0.8 if across < 3 else 0), 3.0 * down)
    return draw(f"stream-{dataset}", f"Accuracy along the stream: {dataset}", caption, size, paint)


def along_the_stream(records: Sequence[Record]) -> list[float]:
    """Accuracy in per cent of each block, over all runs that have as many blocks as the first."""
    length = len(records[0].stream)
    streams = [record.stream for record in records if len(record.stream) == length]
    return [100 * statistics.fmean(values) for values in zip(*streams, strict=True)]


def draw_frechet(records: Sequence[Record]) -> list[Drawing]:
    """The paper's Fig. 2: the distance that is left after adapting, for each method and protocol."""
    by_dataset: dict[str, list[Column]] = defaultdict(list)
    for column in distance_columns(records, "frechet"):
        by_dataset[column.dataset].append(column)
    if not by_dataset:
        return []
    panels = list(by_dataset.items())
    most = max(len(made) for made in by_dataset.values())
    tallest = max(len(rows(r for column in made for r in column.records)) for made in by_dataset.values())
    across, down = layout(len(panels), 3)

    def paint(figure: Any) -> None:
        for axes, (dataset, made) in zip(grid(figure, len(panels), 3), panels, strict=True):
            _paint_distances(axes, dataset, made)
        found = {column.protocol for _, made in panels for column in made}
        _protocol_legend(figure, [*(name for name in PROTOCOLS if name in found), *sorted(found.difference(PROTOCOLS))])

    caption = "Bars: after adapting, mean and standard deviation over seeds. Dotted: before adapting."
    size = (0.5 + 3.1 * across, down * (tallest * (0.1 + 0.1 * most) + 0.7) + 0.4)
    return [draw("frechet", "Fréchet distance of the features to the source's", caption, size, paint)]


def _paint_distances(axes: Any, dataset: str, made: list[Column]) -> None:
    lines = rows(record for column in made for record in column.records)
    height = 0.8 / len(made)
    for number, column in enumerate(made):
        colour = _colour(column.protocol, number)
        after, before = distances(column, "frechet", "after"), distances(column, "frechet", "before")
        for place, row in enumerate(reversed(lines)):
            value = after.get(row.label)
            if value:
                y = place + 0.4 - height * (number + 0.5)
                axes.barh(y, value.mean, 0.88 * height, color=colour, lw=0)
                axes.errorbar(value.mean, y, xerr=value.std, color="0.15", lw=0.9, capsize=1.5)
        if before:
            start = statistics.fmean(value.mean for value in before.values())
            axes.axvline(start, color=colour, ls=":", lw=1.3)
    axes.set_yticks(range(len(lines)), [row.label for row in reversed(lines)])
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(dataset)
    axes.set_xlabel("Fréchet distance")


def _protocol_legend(figure: Any, protocols: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_colour(protocol, i), label=protocol) for i, protocol in enumerate(protocols)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.2)


def _colour(protocol: str, number: int) -> str:
    return _PROTOCOL_COLOURS.get(protocol, COLOURS[number % len(COLOURS)])
