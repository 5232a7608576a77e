"""The tables: accuracy with the paper's numbers beside ours, the sweep over k, distances from the source, cost."""

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from cafe_tta import corruptions
from cafe_tta.bench import paper
from cafe_tta.bench.experiments import EXPERIMENTS, MODES, Row
from cafe_tta.bench.paper import Accuracy, Published
from cafe_tta.bench.protocols import PROTOCOLS
from cafe_tta.bench.records import MAIN, Record
from cafe_tta.bench.report.columns import (
    Column,
    Estimate,
    Incomplete,
    Value,
    accuracy,
    by_corruption,
    columns,
    estimates,
    main_columns,
    ranked,
    rows,
    rows_of,
)
from cafe_tta.display import Displayed
from cafe_tta.methods import METHODS

NOTHING = "–"
MOMENTS = ("before", "after")
Remark = tuple[str, str]  # the column, and what is to be said of it


@dataclass(frozen=True)
class Cell:
    """A value of a table, as text."""

    text: str = NOTHING
    rank: str = ""  # "best", "second" or nothing


@dataclass(frozen=True)
class Line:
    """A line of a table: its heading cells, then its values."""

    head: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Measurement:
    """One number with everything that it belongs to: a line of the CSV file."""

    table: str
    dataset: str
    protocol: str
    mode: str
    method: str
    label: str
    needs: str
    num_groups: int | None
    measure: str
    mean: float
    std: float | None
    seeds: int
    rank: str = ""
    paper_mean: float | str | None = None
    paper_std: float | None = None


@dataclass(frozen=True, repr=False)
class Table(Displayed):
    """A table before it is Markdown, LaTeX, HTML or CSV.

    Headings have levels, from wide to narrow: ("cifar10", "all-mixed", "ours"). All have equally many.
    """

    name: str
    title: str
    stub: tuple[str, ...]  # names of the heading cells of a line
    heads: tuple[tuple[str, ...], ...]
    lines: tuple[Line, ...]
    caption: str = ""
    about: tuple[str, ...] = ()  # what the columns are
    notes: tuple[str, ...] = ()  # what a reader must know before comparing
    measurements: tuple[Measurement, ...] = ()

    def facts(self) -> Mapping[str, Any]:
        return {"name": self.name, "title": self.title, "lines": len(self.lines), "columns": len(self.heads)}

    @property
    def depth(self) -> int:
        return len(self.heads[0])

    def spans(self, level: int) -> list[tuple[str, int]]:
        """Headings of a level with the number of columns each stands over."""
        return [(key[-1], len(list(group))) for key, group in groupby(self.heads, key=lambda head: head[: level + 1])]

    def boundaries(self) -> set[int]:
        """Columns (counted from 0) at which another data set begins."""
        return {i for i in range(1, len(self.heads)) if self.heads[i][0] != self.heads[i - 1][0]}


@dataclass
class Sheet:
    """A table that is filled column by column. Its lines have keys."""

    name: str
    heads: list[tuple[str, ...]] = field(default_factory=list)
    cells: dict[Any, list[Cell]] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)

    def put(self, key: Hashable, text: str | None, rank: str = "") -> None:
        """Adds a cell to a line; an empty one where there is no text."""
        self.cells.setdefault(key, []).append(Cell() if text is None else Cell(text, rank))

    def measured(
        self,
        column: Column,
        row: Row,
        measure: str,
        value: Estimate,
        num_groups: int | None = None,
        rank: str = "",
        published: Published = None,
    ) -> None:
        """Notes a number for the CSV file."""
        numbers: Any = published if isinstance(published, Accuracy) else (published, None)
        names = (self.name, column.dataset, column.protocol, column.mode, row.method, row.label, needs_text(row))
        seeds = len(value.seeds)
        self.measurements.append(Measurement(*names, num_groups, measure, value.mean, value.std, seeds, rank, *numbers))

    def table(self, title: str, stub: tuple[str, ...], heads: Mapping[Any, tuple[str, ...]], **texts: Any) -> Table:
        """The finished table, with a line for each of `heads`."""
        lines = tuple(Line(head, tuple(self.cells[key])) for key, head in heads.items())
        texts = {"notes": merged(self.remarks), **texts}
        return Table(self.name, title, stub, tuple(self.heads), lines, measurements=tuple(self.measurements), **texts)


def method_heads(lines: Sequence[Row]) -> dict[str, tuple[str, ...]]:
    return {row.label: (row.label, needs_text(row)) for row in lines}


def needs_text(row: Row) -> str:
    return row.needs or "nothing"


def published_text(value: Published) -> str:
    """As in the paper."""
    if isinstance(value, Accuracy):
        return f"{value.mean:.2f}" if value.std is None else f"{value.mean:.2f} ± {value.std:.2f}"
    return value or NOTHING


# Accuracy

_TITLES = {
    "offline": "Test accuracy [%], offline: every image is answered after all of them were seen",
    "online": "Test accuracy [%], online: every batch is answered when it comes",
}


def accuracy_tables(records: Sequence[Record], with_paper: bool) -> list[Table]:
    """One table for each mode of the main experiments, and of each protocol or experiment with a table of its own."""
    titles = {MAIN: ""}
    titles |= {name: protocol.table for name, protocol in PROTOCOLS.items() if protocol.table}
    titles |= {name: experiment.table for name, experiment in EXPERIMENTS.items() if experiment.table}
    tables = []
    for scope, own_title in titles.items():
        for mode in MODES:
            own = [record for record in records if record.scope == scope and record.mode == mode]
            title = own_title if mode == "offline" else f"{own_title}, {mode}"
            if own:
                name = f"{'accuracy' if scope == MAIN else scope}-{mode}"
                tables.append(_accuracy_table(name, title if own_title else _TITLES[mode], columns(own), with_paper))
    return tables


def _accuracy_table(name: str, title: str, made: list[Column], with_paper: bool) -> Table:
    sheet, lines = Sheet(name), rows_of(made)
    compared = [column for column in made if with_paper and any(printed(column, row) for row in lines)]
    for column in made:
        ours, incomplete = estimates(column, lines, accuracy)
        best = ranked(lines, ours)
        theirs = {row.label: printed(column, row) for row in lines} if column in compared else {}
        their_best = ranked(lines, {label: value for label, value in theirs.items() if isinstance(value, Accuracy)})
        names = ("ours", "paper") if column in compared else ("",)
        sheet.heads += [(column.dataset, column.protocol, *((part,) if compared else ())) for part in names]
        for row in lines:
            value, rank = ours.get(row.label), best.get(row.label, "")
            sheet.put(row.label, value.text() if value else None, rank)
            if column in compared:
                sheet.put(row.label, published_text(theirs[row.label]), their_best.get(row.label, ""))
            if value:
                published = theirs.get(row.label)
                sheet.measured(column, row, "accuracy_percent", value, rank=rank, published=published)
        sheet.remarks += gaps(column, lines, ours, incomplete) + warnings(column)
        sheet.remarks += unlike_the_paper(column) if column in compared else []
    about = tuple(map(describe_column, made))
    return sheet.table(title, ("method", "needs"), method_heads(lines), caption=_caption(made, lines), about=about)


def printed(column: Column, row: Row) -> Published:
    """The paper's number, for methods as they are: under another label, a method has other options.

    None for corruptions that the paper does not have.
    """
    if row.label != row.method or not has_usual_corruptions(column):
        return None
    return paper.published(column.dataset, column.protocol, column.mode, row.method)


def has_usual_corruptions(column: Column) -> bool:
    """Whether any of its corruptions are among the 15 that numbers are published for."""
    names = column.first.corruptions.get("names") or corruptions.NAMES
    return not set(names).isdisjoint(corruptions.NAMES)


def _caption(made: Sequence[Column], lines: Sequence[Row]) -> str:
    parts = ["Mean ± standard deviation over seeds."]
    if any(len(column.episodes) > 1 for column in made):
        parts.append("Where a protocol has several episodes, their mean is taken first.")
    parts.append("Best in bold, second-best underlined.")
    parts += dict.fromkeys(METHODS[row.method].remark for row in lines if row.method in METHODS)
    references = [row.label for row in lines if row.is_reference]
    if references:
        parts.append(f"Not ranked, because source data is needed while adapting: {', '.join(references)}.")
    return " ".join(filter(None, parts))


def summary_table(column: Column) -> Table:
    """One column in short: accuracy, distance from the source, time."""
    lines, sheet = rows(column.records), Sheet("summary")
    sheet.heads = [("accuracy %",), ("Fréchet distance",), ("ms / image",)]
    shares, _ = estimates(column, lines, accuracy)
    left, _ = estimates(column, lines, lambda record: record.frechet_after)
    best, nearest = ranked(lines, shares), ranked(lines, left, lowest=True)
    for row in lines:
        share, distance = shares.get(row.label), left.get(row.label)
        sheet.put(row.label, share.text() if share else None, best.get(row.label, ""))
        sheet.put(row.label, f"{distance.mean:.2f}" if distance else None, nearest.get(row.label, ""))
        sheet.put(row.label, f"{cost(column.of(row.label)).milliseconds_per_image:.2f}")
    images, domains, seeds = column.images[-1], count(len(column.domains), "domain"), count(len(column.seeds), "seed")
    title = f"{column.name}, {column.mode}: {images:,} images, {domains}, {seeds}"
    heads = method_heads(lines)
    return sheet.table(title, ("method", "needs from the source"), heads, caption=_caption([column], lines))


# Accuracy against the number of groups k, with the size of the largest group, which decides whether k works


@dataclass(frozen=True)
class Point:
    """One k in one column."""

    row: Row
    num_groups: int
    accuracy: Estimate
    largest_group: int | None
    published: Published

    @property
    def key(self) -> tuple[str, int]:
        return self.row.method, self.num_groups


def sweeps(records: Sequence[Record]) -> list[tuple[Column, list[Point]]]:
    """For every column of an experiment that sweeps over k: its points, from few groups to many."""
    swept = [name for name, experiment in EXPERIMENTS.items() if experiment.sweep]
    own = [record for record in records if record.scope in swept and record.num_groups is not None]
    return [(column, _points(column)) for column in columns(own)]


def _points(column: Column) -> list[Point]:
    points = []
    lines = rows(column.records)
    complete, _ = estimates(column, lines, accuracy)
    for row in lines:
        first = column.of(row.label)[0]
        k, sizes = first.num_groups, first.source.get("group_sizes")
        if row.label in complete and k is not None:
            theirs = paper.published(column.dataset, column.protocol, column.mode, row.method, num_groups=k)
            points.append(Point(row, k, complete[row.label], max(sizes) if sizes else None, theirs))
    return sorted(points, key=lambda point: (point.num_groups, lines.index(point.row)))


def sweep_table(records: Sequence[Record], with_paper: bool) -> Table | None:
    made = sweeps(records)
    if not made:
        return None
    sheet = Sheet("groups")
    keys = sorted({point.key for _, points in made for point in points}, key=lambda key: (key[1], key[0]))
    for column, points in made:
        by_key = {point.key: point for point in points}
        best = ranked([point.row for point in points], {point.row.label: point.accuracy for point in points})
        compared = with_paper and any(point.published for point in points)
        names = ("ours", *(("paper",) if compared else ()), "largest group")
        sheet.heads += [(column.dataset, f"{column.protocol}, {column.mode}", name) for name in names]
        for key in keys:
            point = by_key.get(key)
            rank = best.get(point.row.label, "") if point else ""
            sheet.put(key, point.accuracy.text() if point else None, rank)
            if compared:
                sheet.put(key, published_text(point.published) if point else None)
            sheet.put(key, str(point.largest_group) if point and point.largest_group else None)
            if point:
                published = point.published if compared else None
                measure, value, k = "accuracy_percent", point.accuracy, point.num_groups
                sheet.measured(column, point.row, measure, value, num_groups=k, rank=rank, published=published)
        sheet.remarks += warnings(column) + (unlike_the_paper(column) if compared else [])
    several = len({method for method, _ in keys}) > 1
    return sheet.table(
        "Test accuracy [%] for each number of groups k",
        ("method", "k") if several else ("k",),
        {key: (*((key[0],) if several else ()), str(key[1])) for key in keys},
        caption=(
            "Mean ± standard deviation over seeds. Best in bold, second-best underlined. N/A: the paper's CAFe did not "
            f"work, because a group was wider than the batch. {NOTHING}: not run."
        ),
        about=tuple(describe_column(column) for column, _ in made),
    )


# How far the features are from the source's, before and after adapting

DISTANCES = {
    "frechet": "Fréchet distance of the features to the source's, before and after adapting",
    "alignment": "Alignment loss of the features, before and after adapting",
}


def distance_columns(records: Sequence[Record], kind: str) -> list[Column]:
    """Of the experiments on distances for the data sets they have, else of the main ones; offline before online."""
    special = [name for name, experiment in EXPERIMENTS.items() if experiment.distances_only]
    measured = [record for record in records if distance(kind, "after")(record) is not None]
    own = [record for record in measured if record.scope in special]
    covered = {record.dataset for record in own}
    own += [record for record in measured if record.scope == MAIN and record.dataset not in covered]
    modes = {record.mode for record in own}
    # Both modes adapt alike and are measured after the last batch: one of them is enough.
    return columns(own, next((mode for mode in MODES if mode in modes), None))


def distance(kind: str, moment: str) -> Value:
    """A distance of a record: `frechet` or `alignment`, before or after adapting."""
    return attrgetter(f"{kind}_{moment}")


def distance_table(records: Sequence[Record], kind: str) -> Table | None:
    made = distance_columns(records, kind)
    if not made:
        return None
    sheet, lines = Sheet(kind), rows_of(made)
    for column in made:
        sheet.heads += [(column.dataset, column.protocol, moment) for moment in MOMENTS]
        values = {moment: estimates(column, lines, distance(kind, moment))[0] for moment in MOMENTS}
        best = {"before": {}, "after": ranked(lines, values["after"], lowest=True)}
        for row in lines:
            for moment in MOMENTS:
                value, rank = values[moment].get(row.label), best[moment].get(row.label, "")
                sheet.put(row.label, value.text() if value else None, rank)
                if value:
                    sheet.measured(column, row, f"{kind}_{moment}", value, rank=rank)
        sheet.remarks += gaps(column, lines, values["after"], {})
    caption = f"{made[0].mode.capitalize()}. Mean ± standard deviation over seeds. Smallest after adapting in bold."
    about = tuple(map(describe_column, made))
    return sheet.table(DISTANCES[kind], ("method", "needs"), method_heads(lines), caption=caption, about=about)


# What the methods cost


@dataclass(frozen=True)
class Cost:
    """Sums over runs; the memory is the largest of any run."""

    runs: int
    images: int
    seconds: float
    steps: int
    refused: int
    peak_memory_mb: float | None
    run_memory_mb: float | None
    forward: float | None  # passes of an image through the network, as counted
    backward: float | None
    missed: float | None  # share of the images that came while the method was busy; None where the stream waited

    @property
    def milliseconds_per_image(self) -> float:
        return 1000 * self.seconds / self.images

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0


def cost(records: Sequence[Record]) -> Cost:
    images = sum(record.episode.images for record in records)
    return Cost(
        runs=len(records),
        images=images,
        seconds=math.fsum(record.seconds for record in records),
        steps=sum(record.steps for record in records),
        refused=sum(record.refused for record in records),
        peak_memory_mb=_largest(record.peak_memory_mb for record in records),
        run_memory_mb=_largest(record.run_memory_mb for record in records),
        forward=_each(images, [record.forward_images for record in records]),
        backward=_each(images, [record.backward_images for record in records]),
        missed=_each(images, [record.pace.get("missed") for record in records]),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _each(images: int, counts: Sequence[int | None]) -> float | None:
    """A count for each image; None where a record does not have it."""
    known = [count for count in counts if count is not None]
    return sum(known) / images if known and len(known) == len(counts) else None


# Heading, name in the CSV file, value, format.
_COSTS: tuple[tuple[str, str, Callable[[Cost], float | None], str], ...] = (
    ("runs", "runs", lambda cost: cost.runs, ",d"),
    ("images", "images", lambda cost: cost.images, ",d"),
    ("seconds", "seconds", lambda cost: cost.seconds, ",.1f"),
    ("ms / image", "ms_per_image", lambda cost: cost.milliseconds_per_image, ".2f"),
    ("images / s", "images_per_second", lambda cost: cost.images_per_second, ",.1f"),
    ("peak memory [MB]", "peak_memory_mb", lambda cost: cost.peak_memory_mb, ",.0f"),
    ("updates", "steps", lambda cost: cost.steps, ",d"),
    ("refused", "refused", lambda cost: cost.refused, ",d"),
)


def metrics_tables(records: Sequence[Record]) -> list[Table]:
    """For each main column: what else was measured beside accuracy. Records of versions up to 0.2.0 have nothing."""
    made = main_columns(records)
    return [_metrics_table(c) for c in made if any(record.calibration_error is not None for record in c.records)]


# Heading, name in the CSV file, value, format.
_METRICS: tuple[tuple[str, str, Callable[[Cost], float | None], str], ...] = (
    ("forward", "forward_passes", lambda cost: cost.forward, ".2f"),
    ("backward", "backward_passes", lambda cost: cost.backward, ".2f"),
    ("ms / image", "ms_per_image", lambda cost: cost.milliseconds_per_image, ".2f"),
    ("memory [MB]", "run_memory_mb", lambda cost: cost.run_memory_mb, ",.0f"),
)
CALIBRATION = "calibration_error_percent"
_MISSED = ("missed [%]", "missed_percent", lambda cost: None if cost.missed is None else 100 * cost.missed, ".1f")


def _metrics_table(column: Column) -> Table:
    sheet, lines = Sheet(f"metrics-{column.dataset}-{column.protocol}-{column.mode}"), rows(column.records)
    for head, measure, values in _qualities(column, lines):
        sheet.heads.append((head,))
        best = ranked(lines, values, lowest=measure == CALIBRATION)
        for row in lines:
            value, rank = values.get(row.label), best.get(row.label, "")
            sheet.put(row.label, value.text() if value else None, rank)
            if value:
                sheet.measured(column, row, measure, value, rank=rank)
    limited = any(record.pace for record in column.records)
    for head, measure, of_cost, form in (*_METRICS, *((_MISSED,) if limited else ())):
        sheet.heads.append((head,))
        for row in lines:
            _put_cost(sheet, column, row, measure, of_cost, form)
    return sheet.table(
        f"Accuracy, calibration and cost: {column.name}, {column.mode}",
        ("method", "needs"),
        method_heads(lines),
        caption=(
            "ECE: expected calibration error of the answers, 15 bins. Forward and backward: passes of an image through "
            "the network, as counted. Memory: the peak of the run, less what was in use when it began. Mean ± standard "
            "deviation over seeds."
        ),
    )


def _qualities(column: Column, lines: Sequence[Row]) -> list[tuple[str, str, dict[str, Estimate]]]:
    """Heading, name in the CSV file, and the estimate of each row: of what has a spread over seeds."""
    worst = {row.label: worst_corruption(column, row) for row in lines}
    return [
        ("accuracy [%]", "accuracy_percent", estimates(column, lines, accuracy)[0]),
        ("ECE [%]", CALIBRATION, estimates(column, lines, calibration_error)[0]),
        ("worst corruption [%]", "worst_corruption_percent", {label: w[1] for label, w in worst.items() if w}),
    ]


def _put_cost(
    sheet: Sheet, column: Column, row: Row, measure: str, of_cost: Callable[[Cost], float | None], form: str
) -> None:
    own = column.of(row.label)
    number, seeds = of_cost(cost(own)), tuple(sorted({record.seed for record in own}))
    sheet.put(row.label, None if number is None else f"{number:{form}}")
    if number is not None:
        sheet.measured(column, row, measure, Estimate(float(number), None, seeds))


def calibration_error(record: Record) -> float | None:
    """In per cent."""
    return None if record.calibration_error is None else 100 * record.calibration_error


def worst_corruption(column: Column, row: Row) -> tuple[str, Estimate] | None:
    """The corruption on which a row is worst, and its accuracy there."""
    found = by_corruption(column.of(row.label))
    return min(found.items(), key=lambda item: item[1].mean, default=None)


def cost_tables(records: Sequence[Record]) -> list[Table]:
    """One for each data set and mode of the main experiments."""
    dealt: dict[tuple[str, str], list[Record]] = {}
    for column in main_columns(records):
        dealt.setdefault((column.mode, column.dataset), []).extend(column.records)
    return [_cost_table(Column(dataset, "all", mode, tuple(own))) for (mode, dataset), own in dealt.items()]


def _cost_table(column: Column) -> Table:
    sheet, lines = Sheet(f"cost-{column.dataset}-{column.mode}"), rows(column.records)
    sheet.heads = [(head,) for head, *_ in _COSTS]
    for row in lines:
        for _, measure, of_cost, form in _COSTS:
            _put_cost(sheet, column, row, measure, of_cost, form)
    machines = sorted({_machine(record) for record in column.records})
    return sheet.table(
        f"Cost on {column.dataset}, {column.mode}: all protocols and seeds together",
        ("method", "needs"),
        method_heads(lines),
        caption="Time of adapting and answering; making the corrupted images is not counted.",
        about=(f"measured on: {'; '.join(machines)}",),
        notes=("measured on several machines: times cannot be compared",) if len(machines) > 1 else (),
    )


def _machine(record: Record) -> str:
    facts = [
        f"{value} {key}" if key in ("processes", "threads") else str(value)
        for key, value in sorted(record.machine.items())
    ]
    return ", ".join(facts) or "an unknown machine"


# What a reader must know before comparing the numbers of a column: gaps, seeds, images, frost


def describe_column(column: Column) -> str:
    """What a column is: images, episodes, seeds, model, corruptions."""
    first, episodes = column.first, len(column.episodes)
    images = " to ".join(f"{number:,}" for number in {column.images[0]: 0, column.images[-1]: 0})
    parts = [
        f"{images} images{f' in each of {episodes} episodes' if episodes > 1 else ''}",
        count(len(column.seeds), "seed"),
        " ".join(filter(None, [first.model.get("architecture"), short(first.model.get("weights"))])),
        f"data {short(first.data.get('digest'))}",
    ]
    if any(domain != "clean" for domain in column.domains) and first.corruptions:
        origin = "from the published files" if first.corruptions.get("official_files") else "generated"
        parts.append(f"corruptions {origin} (preset {first.corruptions.get('preset')})")
    return f"{column.name}: {', '.join(parts)}"


def gaps(
    column: Column, rows: Sequence[Row], seeds: dict[str, Estimate], incomplete: dict[str, list[Incomplete]]
) -> list[Remark]:
    """Methods, seeds and episodes that others in the column or in the table have."""
    notes = []
    missing = [row.label for row in rows if row.label not in seeds and row.label not in incomplete]
    if missing:
        notes.append((column.name, f"no runs of {', '.join(missing)}"))
    for label, parts in incomplete.items():
        for part in parts:
            episodes = f"{part.finished} of {part.expected} episodes"
            notes.append((column.name, f"{label} with seed {part.seed} has only {episodes} and is left out"))
    most = max((len(estimate.seeds) for estimate in seeds.values()), default=0)
    fewer = [f"{label} {len(estimate.seeds)}" for label, estimate in seeds.items() if len(estimate.seeds) < most]
    if fewer:
        notes.append((column.name, f"{count(most, 'seed')}, but {', '.join(fewer)}"))
    return notes


def warnings(column: Column) -> list[Remark]:
    """Frost that is not the standard one, steps that were refused, and runs that other code or source values made."""
    notes = [(column.name, text) for text in _versions(column)]
    if column.first.corruptions.get("frost_is_standard") is False and any("frost" in name for name in column.domains):
        notes.append((column.name, "frost was made with stand-in textures, not with the standard ones"))
    for label in dict.fromkeys(record.label for record in column.records):
        spent = cost(column.of(label))
        if spent.refused:
            notes.append((column.name, f"{label} refused {count(spent.refused, 'step')} and took {spent.steps:,}"))
    return notes


def _versions(column: Column) -> list[str]:
    """What is not the same in all runs of a column, and need not be: the code, and the bits of source values."""
    texts = []
    commits = list(dict.fromkeys(code_text(record) for record in column.records if record.code.get("commit")))
    if len(commits) > 1 or any(record.code.get("dirty") for record in column.records):
        texts.append(f"made by the code of {', '.join(commits)}")
    for label in dict.fromkeys(record.label for record in column.records):
        values = {json.dumps(r.source["values"], sort_keys=True) for r in column.of(label) if "values" in r.source}
        if len(values) > 1:
            texts.append(f"the runs of {label} used {len(values)} versions of its source values")
    return texts


def code_text(record: Record) -> str:
    """The commit that made a record.

    >>> from types import SimpleNamespace
    >>> code_text(SimpleNamespace(code={"commit": "0123456789abcdef0123", "dirty": True}))
    'commit 0123456789 with changed files'
    """
    return f"commit {short(record.code.get('commit'))}{' with changed files' if record.code.get('dirty') else ''}"


def unlike_the_paper(column: Column) -> list[Remark]:
    """How a column differs from the paper's: a reader must know before comparing the two."""
    setting = paper.SETTINGS.get(column.dataset)
    differences = unlike(column, setting) if setting else []
    return [(column.name, f"unlike the paper's: {'; '.join(differences)}")] if differences else []


def unlike(column: Column, setting: paper.Setting) -> list[str]:
    """How a column differs from a published setting, as far as both are known."""
    differences = []
    model = column.first.model.get("architecture")
    if model != setting.model:
        differences.append(f"{model} instead of {setting.model}")
    if column.images != [setting.images]:
        differences.append(f"{column.images[0]:,} images instead of {setting.images:,}")
    if column.domains != ["clean"]:
        expected = setting.corruptions * len(setting.severities)
        severities = sorted({domain.rpartition("-")[2] for domain in column.domains})
        if len(column.domains) != expected or severities != [str(severity) for severity in setting.severities]:
            ours = f"{count(len(column.domains), 'domain')} of severity {', '.join(severities)}"
            differences.append(f"{ours} instead of {expected} of severity {', '.join(map(str, setting.severities))}")
        if not column.first.corruptions.get("official_files"):
            differences.append("generated corruptions instead of the published files")
    return differences


def merged(remarks: Iterable[Remark]) -> tuple[str, ...]:
    """What is true of several columns is said once.

    >>> merged([("a", "frost is odd"), ("b", "frost is odd"), ("b", "no runs of x")])
    ('a, b: frost is odd', 'b: no runs of x')
    """
    subjects: dict[str, list[str]] = {}
    for subject, text in remarks:
        subjects.setdefault(text, []).append(subject)
    return tuple(f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in subjects.items())


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "seed"), count(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(digest: Any) -> str:
    """The beginning of a hash, or a name as it is."""
    text = "unknown" if digest is None else str(digest)
    return text[:10] if len(text) >= 16 and all(letter in "0123456789abcdef" for letter in text) else text
