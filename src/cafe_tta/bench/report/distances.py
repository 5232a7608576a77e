"""How far the features are from the source's, before and after adapting: Fréchet distance and alignment loss."""

from collections.abc import Sequence

from cafe_tta.bench.report import notes
from cafe_tta.bench.report.columns import MODES, Column, columns, rows
from cafe_tta.bench.report.estimates import Estimate, Measure, estimate, ranks
from cafe_tta.bench.report.records import MAIN, MOMENTS, Record
from cafe_tta.bench.report.table import Cell, Fact, Line, Table, fact, needs_text

TITLES = {
    "frechet": "Fréchet distance of the features to the source's, before and after adapting",
    "alignment": "Alignment loss of the features, before and after adapting",
}
_MEASURES: dict[str, Measure] = {
    "frechet_before": lambda record: record.frechet_before,
    "frechet_after": lambda record: record.frechet_after,
    "alignment_before": lambda record: record.alignment_before,
    "alignment_after": lambda record: record.alignment_after,
}


def distance_columns(records: Sequence[Record], kind: str) -> list[Column]:
    """Of the experiment `frechet` for the data sets it has, else of the main experiments; offline before online."""
    measured = [record for record in records if _MEASURES[f"{kind}_after"](record) is not None]
    own = [record for record in measured if record.scope == "frechet"]
    covered = {record.dataset for record in own}
    own += [record for record in measured if record.scope == MAIN and record.dataset not in covered]
    modes = {record.mode for record in own}
    # Both modes adapt alike and are measured after the last batch: one of them is enough.
    return columns(own, next((mode for mode in MODES if mode in modes), None))


def distances(column: Column, kind: str, moment: str) -> dict[str, Estimate]:
    found = {}
    for row in rows(column.records):
        value, _ = estimate(column.of(row.label), _MEASURES[f"{kind}_{moment}"], column.episodes)
        if value:
            found[row.label] = value
    return found


def distance_table(records: Sequence[Record], kind: str) -> Table | None:
    made = distance_columns(records, kind)
    if not made:
        return None
    lines = rows(record for column in made for record in column.records)
    heads: list[tuple[str, ...]] = []
    cells: dict[str, list[Cell]] = {row.label: [] for row in lines}
    facts: list[Fact] = []
    remarks: list[notes.Remark] = []
    for column in made:
        heads += [(column.dataset, column.protocol, moment) for moment in MOMENTS]
        found = {moment: distances(column, kind, moment) for moment in MOMENTS}
        rivals = {row.label for row in lines if not row.is_reference}
        after = {label: value.mean for label, value in found["after"].items() if label in rivals}
        best = ranks(after, lowest=True)
        for row in lines:
            for moment in MOMENTS:
                value = found[moment].get(row.label)
                rank = best.get(row.label, "") if moment == "after" else ""
                cells[row.label].append(Cell(value.text(), rank) if value else Cell())
                if value:
                    facts.append(fact(kind, column, row, f"{kind}_{moment}", value, rank=rank))
        remarks += notes.gaps(column, lines, found["after"], {})
    return Table(
        name=kind,
        title=TITLES[kind],
        stub=("method", "needs"),
        heads=tuple(heads),
        lines=tuple(Line((row.label, needs_text(row)), tuple(cells[row.label])) for row in lines),
        caption=f"{made[0].mode.capitalize()}. Mean ± standard deviation over seeds. Smallest after adapting in bold.",
        about=tuple(notes.about(column) for column in made),
        notes=notes.merged(remarks),
        facts=tuple(facts),
    )
