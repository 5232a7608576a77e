"""What the methods cost: time, memory, steps taken and refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cafe_tta.bench.report.columns import Column, Row, columns, rows
from cafe_tta.bench.report.records import MAIN, Record
from cafe_tta.bench.report.table import Cell, Fact, Line, Table, needs_text

_HEADS = ("runs", "images", "seconds", "ms / image", "images / s", "peak memory [MB]", "updates", "refused")


@dataclass(frozen=True)
class Cost:
    """Sums over runs; the memory is that of the greediest."""

    runs: int
    images: int
    seconds: float
    steps: int
    refused: int
    peak_memory_mb: float | None

    @property
    def milliseconds_per_image(self) -> float:
        return 1000 * self.seconds / self.images


def cost(records: Sequence[Record]) -> Cost:
    peaks = [record.peak_memory_mb for record in records if record.peak_memory_mb is not None]
    return Cost(
        runs=len(records),
        images=sum(record.images for record in records),
        seconds=math.fsum(record.seconds for record in records),
        steps=sum(record.steps for record in records),
        refused=sum(record.refused for record in records),
        peak_memory_mb=max(peaks, default=None),
    )


def cost_tables(records: Sequence[Record]) -> list[Table]:
    """One for each data set and mode of the main experiments."""
    dealt: dict[tuple[str, str], list[Record]] = {}
    for column in columns([record for record in records if record.scope == MAIN]):
        dealt.setdefault((column.mode, column.dataset), []).extend(column.records)
    return [_table(dataset, mode, own) for (mode, dataset), own in dealt.items()]


def _table(dataset: str, mode: str, records: list[Record]) -> Table:
    name = f"cost-{dataset}-{mode}"
    lines, facts = [], []
    machines = sorted({_machine(record) for record in records})
    for row in rows(records):
        own = [record for record in records if record.label == row.label]
        found = cost(own)
        speed = found.images / found.seconds if found.seconds else 0.0
        values: tuple[tuple[str, float | None, str], ...] = (
            ("runs", found.runs, f"{found.runs:,}"),
            ("images", found.images, f"{found.images:,}"),
            ("seconds", found.seconds, f"{found.seconds:,.1f}"),
            ("ms_per_image", found.milliseconds_per_image, f"{found.milliseconds_per_image:.2f}"),
            ("images_per_second", speed, f"{speed:,.1f}"),
            ("peak_memory_mb", found.peak_memory_mb, f"{found.peak_memory_mb or 0:,.0f}"),
            ("steps", found.steps, f"{found.steps:,}"),
            ("refused", found.refused, f"{found.refused:,}"),
        )
        lines.append(
            Line((row.label, needs_text(row)), tuple(Cell() if v is None else Cell(text) for _, v, text in values))
        )
        column = Column(dataset, "all", mode, tuple(own))
        seeds = len(column.seeds)
        facts += [_fact(name, column, row, measure, value, seeds) for measure, value, _ in values if value is not None]
    return Table(
        name=name,
        title=f"Cost on {dataset}, {mode}: all protocols and seeds together",
        stub=("method", "needs"),
        heads=tuple((head,) for head in _HEADS),
        lines=tuple(lines),
        caption="Time of adapting and answering; making the corrupted images is not counted.",
        about=(f"measured on: {'; '.join(machines)}",),
        notes=("measured on several machines: times cannot be compared",) if len(machines) > 1 else (),
        facts=tuple(facts),
    )


def _fact(name: str, column: Column, row: Row, measure: str, value: float, seeds: int) -> Fact:
    place = (name, column.dataset, column.protocol, column.mode)
    return Fact(*place, row.method, row.label, needs_text(row), None, measure, float(value), None, seeds)


def _machine(record: Record) -> str:
    facts = [
        f"{value} {key}" if key in ("processes", "threads") else str(value)
        for key, value in sorted(record.machine.items())
    ]
    return ", ".join(facts) or "an unknown machine"
