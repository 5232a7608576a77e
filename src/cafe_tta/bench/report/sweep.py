"""Accuracy against the number of groups k, with the size of the largest group, which decides whether k works."""

from collections.abc import Sequence
from dataclasses import dataclass

from cafe_tta.bench import paper
from cafe_tta.bench.report import notes
from cafe_tta.bench.report.columns import Column, Row, columns, rows
from cafe_tta.bench.report.estimates import Estimate, estimate, ranks
from cafe_tta.bench.report.records import Record
from cafe_tta.bench.report.table import NOTHING, Cell, Fact, Line, Table, fact, published_text

NAME = "groups"


@dataclass(frozen=True)
class Point:
    """One k in one column."""

    row: Row
    num_groups: int
    accuracy: Estimate
    largest_group: int | None
    published: paper.Published


def sweeps(records: Sequence[Record]) -> list[tuple[Column, list[Point]]]:
    """For every column of the experiment `groups`: its points, from few groups to many."""
    own = [record for record in records if record.scope == "groups" and record.num_groups is not None]
    return [(column, _points(column)) for column in columns(own)]


def sweep_table(records: Sequence[Record], with_paper: bool) -> Table | None:
    made = sweeps(records)
    if not made:
        return None
    keys = sorted({_key(point) for _, points in made for point in points}, key=lambda key: (key[1], key[0]))
    heads: list[tuple[str, ...]] = []
    cells: dict[tuple[str, int], list[Cell]] = {key: [] for key in keys}
    facts: list[Fact] = []
    remarks: list[notes.Remark] = []
    for column, points in made:
        by_key = {_key(point): point for point in points}
        best = ranks({point.row.label: point.accuracy.mean for point in points})
        theirs = with_paper and any(point.published for point in points)
        names = ("ours", *(("paper",) if theirs else ()), "largest group")
        heads += [(column.dataset, f"{column.protocol}, {column.mode}", name) for name in names]
        for key in keys:
            point = by_key.get(key)
            rank = best.get(point.row.label, "") if point else ""
            cells[key].append(Cell(point.accuracy.text(), rank) if point else Cell())
            if theirs:
                cells[key].append(Cell(published_text(point.published)) if point else Cell())
            cells[key].append(Cell(str(point.largest_group)) if point and point.largest_group else Cell())
            if point:
                published = point.published if theirs else None
                measure, k = "accuracy_percent", point.num_groups
                row, value = point.row, point.accuracy
                facts.append(fact(NAME, column, row, measure, value, num_groups=k, rank=rank, paper=published))
        remarks += notes.warnings(column) + (notes.unlike_the_paper(column) if theirs else [])
    several = len({method for method, _ in keys}) > 1
    return Table(
        name=NAME,
        title="Test accuracy [%] for each number of groups k",
        stub=("method", "k") if several else ("k",),
        heads=tuple(heads),
        lines=tuple(Line((*((key[0],) if several else ()), str(key[1])), tuple(cells[key])) for key in keys),
        caption=(
            "Mean ± standard deviation over seeds. Best in bold, second-best underlined. N/A: the paper's CAFe did not "
            f"work, because a group was wider than the batch. {NOTHING}: not run."
        ),
        about=tuple(notes.about(column) for column, _ in made),
        notes=notes.merged(remarks),
        facts=tuple(facts),
    )


def _points(column: Column) -> list[Point]:
    points = []
    for row in rows(column.records):
        records = column.of(row.label)
        value, _ = estimate(records, lambda record: 100 * record.accuracy, column.episodes)
        k = records[0].num_groups
        if value is None or k is None:
            continue
        sizes = records[0].source.get("group_sizes")
        theirs = paper.published(column.dataset, column.protocol, column.mode, row.method, num_groups=k)
        points.append(Point(row, k, value, max(sizes) if sizes else None, theirs))
    return sorted(points, key=lambda point: (point.num_groups, point.row.order))


def _key(point: Point) -> tuple[str, int]:
    return point.row.method, point.num_groups
