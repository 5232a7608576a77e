"""All figures. Readable in print and by colour-blind readers: colour is never the only difference."""

import io
import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cafe_tta.bench.experiments import EXPERIMENTS, MODES, Row
from cafe_tta.bench.paper import NOT_AVAILABLE, Accuracy, Published
from cafe_tta.bench.protocols import PROTOCOLS
from cafe_tta.bench.records import Record
from cafe_tta.bench.report.columns import (
    Column,
    accuracy,
    by_corruption,
    corruptions_of,
    estimates,
    main_columns,
    natural,
    rank,
    rows,
    rows_of,
)
from cafe_tta.bench.report.tables import cost, distance, distance_columns, printed, sweeps
from cafe_tta.methods import METHODS

LONGEST = 34  # characters of a label in one line
BLUE, VERMILION, GREY, BLACK = "#0072B2", "#D55E00", "#8A8A8A", "#000000"
# Okabe and Ito's palette; its yellow is darker, for white paper.
COLOURS = ("#56B4E9", "#009E73", "#CC79A7", BLUE, "#C9B400", "#E69F00", VERMILION, "#8C564B")
_FAMILY_MARKERS = "osD^vh*<"  # of the first member of each family, so that colour is never the only difference
_MEMBER_MARKERS = "PXpdhH8*"
_TICK: Any = {"marker": "|", "markersize": 13, "markeredgewidth": 2, "color": "0.45"}
_RC: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "path",
    "svg.hashsalt": "cafe-tta",  # the same records give the same file
}


@dataclass(frozen=True)
class Drawing:
    """A finished figure in three formats."""

    name: str
    title: str
    caption: str
    width: float  # inches
    png: bytes
    pdf: bytes
    svg: bytes


@dataclass(frozen=True)
class Style:
    """How a method looks, in every figure of a report."""

    colour: str
    marker: str
    size: float
    line: Any
    filled: bool

    def point(self) -> dict[str, Any]:
        """Options for a marker."""
        face = self.colour if self.filled else "white"
        edge = "0.15" if self.filled else self.colour
        width = 0.5 if self.filled else 1.3
        return {
            "marker": self.marker,
            "markersize": self.size,
            "markerfacecolor": face,
            "markeredgecolor": edge,
            "markeredgewidth": width,
            "color": self.colour,
        }


Styles = dict[str, Style]


def styles(rows: Sequence[Row]) -> Styles:
    """A style for each label. Variants of a method (`name`, `name-variant`) share its colour.

    Methods that do not adapt are grey; methods that need source data while they adapt are black and hollow.
    """
    baselines = [name for name, method in METHODS.items() if not method.adapts]
    ranked = [row for row in rows if row.method not in baselines and not row.is_reference]
    families: dict[str, list[Row]] = {}
    for row in ranked:
        families.setdefault(row.method.partition("-")[0], []).append(row)
    made: Styles = {}
    for number, (family, members) in enumerate(families.items()):
        colour = _shade(COLOURS[number % len(COLOURS)], number // len(COLOURS))
        variants = [row for row in members if row.label != family]
        for row in members:
            if row.label == family:
                marker = _FAMILY_MARKERS[(number + number // len(COLOURS)) % len(_FAMILY_MARKERS)]
                made[row.label] = Style(colour, marker, 10.0 if marker == "*" else 6.0, "-", True)
            else:
                index = variants.index(row)
                marker = _MEMBER_MARKERS[index % len(_MEMBER_MARKERS)]
                made[row.label] = Style(colour, marker, 6.5, ("--", ":", "-.")[index % 3], False)
    for row in rows:
        if row.method in baselines:
            made[row.label] = Style(GREY, "o", 6.0, "-", True)
        elif row.is_reference:
            made[row.label] = Style(BLACK, "s", 5.5, "--", False)
    return {row.label: made[row.label] for row in rows}


def _shade(colour: str, times: int) -> str:
    """A colour that was used before: darker the first time, lighter the second, and so on.

    >>> _shade("#56B4E9", 0), _shade("#56B4E9", 1), _shade("#56B4E9", 2)
    ('#56B4E9', '#2f6380', '#aadaf4')
    """
    if not times:
        return colour
    share, towards = (0.45, 0) if times % 2 else (0.5, 255)
    share = 1 - (1 - share) ** ((times + 1) // 2)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (towards - part)):02x}" for part in parts)


def draw(
    name: str, title: str, caption: str, size: tuple[float, float], paint: Callable[[Any], None], dpi: int = 180
) -> Drawing:
    """Lets `paint` fill a figure of `size` inches, and keeps it as PNG, PDF and SVG."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window, no state that outlives the figure

    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # computed once, not again for every format
        return Drawing(
            name,
            title,
            caption,
            size[0],
            _saved(figure, "png", dpi, {"Software": None}),
            _saved(figure, "pdf", dpi, {"CreationDate": None, "Creator": None, "Producer": None}),
            _saved(figure, "svg", dpi, {"Date": None, "Creator": None}),
        )


def folded(label: str) -> str:
    """A label with many options, in several lines.

    >>> folded("cafe"), folded("cafe(normalisation=blend,blend=0.25,lr=0.002)")
    ('cafe', 'cafe(normalisation=blend,\\nblend=0.25,lr=0.002)')
    """
    return textwrap.fill(label.replace(",", ", "), LONGEST).replace(", ", ",")


def add_legend(figure: Any, rows: Sequence[Row], styled: Styles, lines: bool = False, extra: Any = ()) -> None:
    """One legend for all the panels, beside them."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            linestyle=styled[row.label].line if lines else "none",
            label=folded(row.label),
            **styled[row.label].point(),
        )
        for row in rows
    ]
    figure.legend(handles=[*handles, *extra], loc="outside right upper", handlelength=2.6 if lines else 1.2)


def layout(panels: int, most: int) -> tuple[int, int]:
    """Panels in a row, at most `most`, and rows: with as few empty panels as possible.

    >>> layout(9, 4), layout(4, 3), layout(7, 4), layout(2, 4)
    ((3, 3), (2, 2), (4, 2), (2, 1))
    """
    across = min(range(1, most + 1), key=lambda width: (-panels % width + (width == 1) * (panels > 1), -width))
    across = min(across, panels)
    return across, -(-panels // across)


def grid(figure: Any, panels: int, most: int, *, sharey: bool = False) -> list[Any]:
    """Axes for the panels, at most `most` in a row."""
    across, down = layout(panels, most)
    axes = figure.subplots(down, across, squeeze=False, sharey=sharey).flatten()
    for spare in axes[panels:]:
        spare.set_visible(False)
    return list(axes[:panels])


def _saved(figure: Any, kind: str, dpi: int, metadata: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()


# Accuracy of every method, on every corruption, and against what it costs


def draw_accuracy(records: Sequence[Record], styled: Styles, with_paper: bool) -> list[Drawing]:
    """One figure per mode with a panel for each column: a dot per method, and a grey tick for the paper's number."""
    drawings = []
    for mode in MODES:
        if made := main_columns(records, mode):
            drawings.append(_overview(mode, made, rows_of(made), styled, with_paper))
    return drawings


def _overview(mode: str, made: list[Column], lines: list[Row], styled: Styles, with_paper: bool) -> Drawing:
    across, down = layout(len(made), 4)
    heights = {row.label: len(lines) - 1 - i for i, row in enumerate(lines)}
    any_paper = with_paper and any(printed(column, row) for column in made for row in lines)

    def paint(figure: Any) -> None:
        from matplotlib.lines import Line2D

        for number, (axes, column) in enumerate(zip(grid(figure, len(made), 4, sharey=True), made, strict=True)):
            ours, _ = estimates(column, lines, accuracy)
            for row in lines:
                value, theirs = ours.get(row.label), printed(column, row) if with_paper else None
                if isinstance(theirs, Accuracy):
                    axes.plot(theirs.mean, heights[row.label], **_TICK)
                if value:
                    style = styled[row.label]
                    axes.errorbar(value.mean, heights[row.label], xerr=value.std, capsize=2.5, lw=1, **style.point())
            axes.set_title(column.name)
            axes.set_yticks(list(heights.values()), list(map(folded, heights)))
            axes.set_ylim(-0.6, len(lines) - 0.4)
            axes.margins(x=0.08)
            if number + across >= len(made):
                axes.set_xlabel("accuracy [%]")
        if any_paper:
            dot = Line2D([], [], linestyle="none", marker="o", mfc="0.3", mec="0.15", label="ours, ± std over seeds")
            tick = Line2D([], [], linestyle="none", label="the paper's", **_TICK)
            figure.legend(handles=[dot, tick], loc="outside lower right", ncols=2)

    size = (1.3 + 2.1 * across + (0.6 if across == 1 else 0), down * (0.23 * len(lines) + 0.65) + 0.35)
    caption = "Mean and standard deviation over seeds. The axes do not begin at 0."
    return draw(f"accuracy-{mode}", f"Accuracy of every method, {mode}", caption, size, paint)


def draw_corruptions(records: Sequence[Record], styled: Styles) -> list[Drawing]:
    """The appendix's figures: accuracy on each corruption, averaged over its severities."""
    drawings = []
    for column in main_columns(records):
        names = corruptions_of(column)
        if len(names) > 1:
            drawings.append(_per_corruption(column, names, styled))
    return drawings


def _per_corruption(column: Column, names: list[str], styled: Styles) -> Drawing:
    lines = rows(column.records)

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        for x in range(0, len(names), 2):
            axes.axvspan(x - 0.5, x + 0.5, color="0.955", lw=0, zorder=0)
        for i, row in enumerate(lines):
            shift = 0.78 * ((i + 0.5) / len(lines) - 0.5)  # side by side: no dot hides another
            values = by_corruption(column.of(row.label))
            means = [values[name].mean if name in values else math.nan for name in names]
            spreads = [values[name].std or 0.0 if name in values else 0.0 for name in names]
            xs = [x + shift for x in range(len(names))]
            axes.errorbar(xs, means, spreads, ls="none", elinewidth=0.8, **_small(styled[row.label]))
        _name_along(axes, range(len(names)), names, rotation=30)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.grid(axis="x", visible=False)
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel("accuracy [%]")
        add_legend(figure, lines, styled)

    name = f"corruptions-{column.dataset}-{column.protocol}-{column.mode}"
    title = f"Accuracy on each corruption: {column.name}, {column.mode}"
    caption = "Averaged over severities; mean and standard deviation over seeds. The axis does not begin at 0."
    return draw(name, title, caption, (min(10.5, 2.6 + 0.55 * len(names)), 3.6), paint)


def _name_along(axes: Any, positions: Sequence[float], names: Sequence[str], **look: Any) -> None:
    labels = [name.replace("_", " ") for name in names]
    axes.set_xticks(positions, labels, ha="right", rotation_mode="anchor", **look)


def draw_cost(records: Sequence[Record], styled: Styles) -> list[Drawing]:
    """Accuracy against milliseconds per image, for each data set and mode."""
    timed = [column for column in main_columns(records) if all(record.seconds > 0 for record in column.records)]
    modes = dict.fromkeys(column.mode for column in timed)
    dealt = {mode: _by_dataset(column for column in timed if column.mode == mode) for mode in modes}
    return [_cost(dataset, mode, made, styled) for mode in modes for dataset, made in dealt[mode].items()]


def _by_dataset(made: Iterable[Column]) -> dict[str, list[Column]]:
    dealt: dict[str, list[Column]] = defaultdict(list)
    for column in made:
        dealt[column.dataset].append(column)
    return dealt


def _cost(dataset: str, mode: str, made: list[Column], styled: Styles) -> Drawing:
    lines = rows_of(made)

    def paint(figure: Any) -> None:
        for axes, column in zip(grid(figure, len(made), 3), made, strict=True):
            for label, value in estimates(column, lines, accuracy)[0].items():
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


# Feature groups: accuracy against k, and the sizes of the groups beside the size of a batch


def draw_sweep(records: Sequence[Record], with_paper: bool) -> list[Drawing]:
    """Accuracy against the number of groups."""
    made = sweeps(records)
    if not made:
        return []

    def paint(figure: Any) -> None:
        for axes, (column, points) in zip(grid(figure, len(made), 3), made, strict=True):
            ks = sorted({point.num_groups for point in points})
            for number, method in enumerate(dict.fromkeys(point.row.method for point in points)):
                own = [point for point in points if point.row.method == method]
                means = [point.accuracy.mean for point in own]
                spreads = [point.accuracy.std or 0 for point in own]
                colour = (VERMILION, BLUE)[number % 2]
                numbers = [point.num_groups for point in own]
                axes.errorbar(numbers, means, spreads, fmt="o-", color=colour, capsize=3, ms=5, label=f"{method}, ours")
                if with_paper:
                    _paint_published(axes, [(p.num_groups, p.published) for p in own])
            axes.set_xscale("log", base=2)
            axes.set_xticks(ks, [str(k) for k in ks])
            axes.set_xticks([], minor=True)
            axes.set_title(f"{column.name}, {column.mode}")
            axes.set_xlabel("number of groups k")
            axes.set_ylabel("accuracy [%]")
            axes.margins(y=0.15)
            bottom, top = axes.get_ylim()
            axes.set_ylim(bottom=max(-0.04 * top, bottom))  # little below 0, where no accuracy is
            axes.legend(loc="best")

    across, down = layout(len(made), 3)
    caption = "Mean and standard deviation over seeds."
    if with_paper and any(point.published for _, points in made for point in points):
        caption += " N/A: the paper's CAFe did not work."
    return [draw("groups", "Accuracy against the number of groups", caption, (0.4 + 3.4 * across, 2.9 * down), paint)]


def _paint_published(axes: Any, values: list[tuple[int, Published]]) -> None:
    known = [(k, value) for k, value in values if isinstance(value, Accuracy)]
    if known:
        ks, means, spreads = [k for k, _ in known], [v.mean for _, v in known], [v.std or 0 for _, v in known]
        look = {"color": "0.45", "mfc": "white", "capsize": 3, "ms": 5}
        axes.errorbar(ks, means, spreads, fmt="D--", label="the paper's", zorder=1, **look)
    failed = [k for k, value in values if value == NOT_AVAILABLE]
    if failed:
        look = {"color": "0.45", "ms": 6, "clip_on": False, "label": "the paper's N/A"}
        # k along the axis, height in shares of the panel
        axes.plot(failed, [0.03] * len(failed), "x", transform=axes.get_xaxis_transform(), **look)


def draw_group_sizes(records: Sequence[Record]) -> list[Drawing]:
    """For each data set: the sizes of the groups, sorted, for each k; a dashed line at the size of a batch."""
    by_dataset: dict[str, dict[tuple[int, int | None], list[int]]] = {}
    batches: dict[str, set[int]] = {}
    sweeping = [name for name, experiment in EXPERIMENTS.items() if experiment.sweep]
    swept = {record.dataset for record in records if record.scope in sweeping}
    for record in records:
        sizes, k = record.source.get("group_sizes"), record.num_groups
        wanted = record.scope in sweeping or record.dataset not in swept
        if sizes and k is not None and wanted:
            key = (k, record.source.get("max_group_size"))
            by_dataset.setdefault(record.dataset, {})[key] = sorted(sizes, reverse=True)
            if record.needs == "stats" and isinstance(record.config.get("batch_size"), int):
                batches.setdefault(record.dataset, set()).add(record.config["batch_size"])
    names = sorted(by_dataset, key=natural)
    return [_sizes(name, by_dataset[name], sorted(batches.get(name, ()))) for name in names]


def _sizes(dataset: str, by_k: dict[tuple[int, int | None], list[int]], batches: list[int]) -> Drawing:
    keys = sorted(by_k, key=lambda key: (key[0], key[1] or 0))
    across, down = layout(len(keys), 4)
    tallest = max(max(sizes) for sizes in by_k.values())

    def paint(figure: Any) -> None:
        for number, (axes, key) in enumerate(zip(grid(figure, len(keys), 4, sharey=True), keys, strict=True)):
            sizes = by_k[key]
            wide = sum(size >= min(batches, default=math.inf) for size in sizes)
            for part, start, colour in ((sizes[:wide], 0, VERMILION), (sizes[wide:], wide, BLUE)):
                edges = [start + index + 0.5 for index in range(len(part) + 1)]
                if part:
                    axes.stairs(part, edges, baseline=None, color=colour, lw=2)
            for batch in batches:
                axes.axhline(batch, color="black", ls="--", lw=1)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_ylim(0.8, 1.6 * max([tallest, *batches]))
            axes.set_xlim(0.5, len(sizes) + 0.5)
            limit = "" if key[1] is None else f" (limit {key[1]})"
            axes.set_title(f"k = {key[0]}: largest {sizes[0]}{limit}")
            axes.grid(axis="x", visible=False)
            axes.xaxis.get_major_locator().set_params(integer=True)
            if number % across == 0:
                axes.set_ylabel("dimensions")
            if number + across >= len(keys):
                axes.set_xlabel("group, largest first")

    batch = f" Dashed: the batch, {' or '.join(map(str, batches))} images." if batches else ""
    caption = f"Groups as wide as the batch or wider, whose covariance in a batch is singular, are orange.{batch}"
    size = (0.6 + 2.2 * across + (1.2 if across == 1 else 0), 1.75 * down + 0.5)
    return draw(f"group-sizes-{dataset}", f"Sizes of the feature groups: {dataset}", caption, size, paint)


# While adapting: accuracy along the stream, and the distance that is left at its end


def draw_streams(records: Sequence[Record], styled: Styles) -> list[Drawing]:
    """Accuracy of the answers given on the way, for each data set: one panel per protocol."""
    streamed = [record for record in records if len(record.stream) > 1]
    drawings = []
    for dataset, made in _by_dataset(main_columns(streamed)).items():
        mode = max((column.mode for column in made), key=lambda mode: rank(MODES, mode))  # online, where there is any
        drawings.append(_streams(dataset, mode, [column for column in made if column.mode == mode], styled))
    return drawings


def _streams(dataset: str, mode: str, made: list[Column], styled: Styles) -> Drawing:
    lines = rows_of(made)

    def paint(figure: Any) -> None:
        for axes, column in zip(grid(figure, len(made), 3), made, strict=True):
            for row in rows(column.records):
                blocks = along_the_stream(column.of(row.label))
                shares = [100 * (i + 0.5) / len(blocks) for i in range(len(blocks))]
                style = styled[row.label]
                look = {**style.point(), "markersize": 0.6 * style.size}
                axes.plot(shares, blocks, ls=style.line, lw=1.2, markevery=max(1, len(blocks) // 7), **look)
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
    by_dataset = _by_dataset(distance_columns(records, "frechet"))
    if not by_dataset:
        return []
    panels = list(by_dataset.items())
    most = max(len(made) for made in by_dataset.values())
    tallest = max(len(rows_of(made)) for made in by_dataset.values())
    across, down = layout(len(panels), 3)

    def paint(figure: Any) -> None:
        for axes, (dataset, made) in zip(grid(figure, len(panels), 3), panels, strict=True):
            _paint_distances(axes, dataset, made)
        shown = {column.protocol for _, made in panels for column in made}
        _protocol_legend(figure, sorted(shown, key=lambda name: rank(PROTOCOLS, name)))

    caption = "Bars: after adapting, mean and standard deviation over seeds. Dotted: before adapting."
    size = (0.5 + 3.1 * across, down * (tallest * (0.1 + 0.1 * most) + 0.7) + 0.4)
    return [draw("frechet", "Fréchet distance of the features to the source's", caption, size, paint)]


def _paint_distances(axes: Any, dataset: str, made: list[Column]) -> None:
    lines = rows_of(made)
    height = 0.8 / len(made)
    for number, column in enumerate(made):
        colour = _colour(column.protocol)
        own = rows(column.records)
        after, before = (estimates(column, own, distance("frechet", moment))[0] for moment in ("after", "before"))
        for index, row in enumerate(reversed(lines)):
            value = after.get(row.label)
            if value:
                y = index + 0.4 - height * (number + 0.5)
                axes.barh(y, value.mean, 0.88 * height, color=colour, lw=0)
                axes.errorbar(value.mean, y, xerr=value.std, color="0.15", lw=0.9, capsize=1.5)
        if before:
            start = statistics.fmean(value.mean for value in before.values())
            axes.axvline(start, color=colour, ls=":", lw=1.3)
    axes.set_yticks(range(len(lines)), [folded(row.label) for row in reversed(lines)])
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(dataset)
    axes.set_xlabel("Fréchet distance")


def _protocol_legend(figure: Any, protocols: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_colour(protocol), label=protocol) for protocol in protocols]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.2)


def _colour(protocol: str) -> str:
    """The colour of a protocol; without one of its own, or unknown: by its position, so that it stays the same."""
    known = PROTOCOLS.get(protocol)
    if known is not None and known.colour:
        return known.colour
    return COLOURS[rank(PROTOCOLS, protocol)[0] % len(COLOURS)]


# A single column in short


def draw_summary(column: Column, samples: Sequence[tuple[str, Any]] = ()) -> Drawing:
    """Accuracy and distance from the source of every method; above them, images (H, W, 3) with their names."""
    lines = rows(column.records)
    styled, heights = styles(lines), range(len(lines) - 1, -1, -1)
    shares, _ = estimates(column, lines, accuracy)
    left, _ = estimates(column, lines, distance("frechet", "after"))

    def paint(figure: Any) -> None:
        cells = figure.add_gridspec(2, 2, height_ratios=[1, 3.2]) if samples else figure.add_gridspec(1, 2)
        if samples:
            _paint_samples(figure.add_subplot(cells[0, :]), samples)
        right, near = figure.add_subplot(cells[-1, 0]), figure.add_subplot(cells[-1, 1])
        for y, row in zip(heights, lines, strict=True):
            if value := shares.get(row.label):
                right.errorbar(value.mean, y, xerr=value.std, capsize=3, lw=1, **styled[row.label].point())
                right.text(value.mean, y + 0.26, f"{value.mean:.1f}", ha="center", fontsize=8)
            if value := left.get(row.label):
                colour = styled[row.label].colour
                near.barh(y, value.mean, 0.7, facecolor="white" if row.is_reference else colour, edgecolor=colour)
                label: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8}
                near.annotate(f"{value.mean:.2f}", (value.mean, y), (3, 0), **label)
        seeds = f" (mean ± std of {len(column.seeds)} seeds)" if len(column.seeds) > 1 else ""
        right.set_xlabel(f"accuracy on {column.name}, {column.mode} [%]{seeds}")
        near.set_xlabel("Fréchet distance of the features to the source's")
        near.margins(x=0.12)
        for axes, labels in ((right, [row.label for row in lines]), (near, [])):
            axes.set_yticks(list(heights), labels or [""] * len(lines))
            axes.set_ylim(-0.6, len(lines) - 0.3)
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="y", visible=False)

    caption = (
        "Mean and standard deviation over seeds; distance after adapting. The axis of accuracy does not begin at 0."
    )
    return draw("summary", f"Every method on {column.name}", caption, (10, 6.4 if samples else 4.8), paint, dpi=150)


def _paint_samples(axes: Any, samples: Sequence[tuple[str, Any]]) -> None:
    import numpy as np

    gap = np.full_like(samples[0][1][:, :2], 255)
    tiles = [part for _, image in samples for part in (image, gap)]
    axes.imshow(np.concatenate(tiles[:-1], axis=1), interpolation="nearest")
    width = samples[0][1].shape[1]
    middles = [width / 2 + (width + 2) * i for i in range(len(samples))]
    _name_along(axes, middles, [name for name, _ in samples], rotation=35, fontsize=7)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(visible=False)
