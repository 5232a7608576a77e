"""A table before it is Markdown, LaTeX, HTML or CSV: cells with ranks, headings in levels, notes."""

from dataclasses import dataclass, field
from itertools import groupby

from cafe_tta.bench.paper import Accuracy, Published
from cafe_tta.bench.report.columns import Column, Row
from cafe_tta.bench.report.estimates import Estimate

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    text: str = NOTHING
    rank: str = ""  # "best", "second" or nothing


@dataclass(frozen=True)
class Line:
    """A line of a table: its heading cells, then its values."""

    head: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Fact:
    """One number with all that it belongs to: a line of the CSV file."""

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


@dataclass(frozen=True)
class Table:
    """Headings have levels, from wide to narrow: ("cifar10", "all-mixed", "ours"). All have equally many."""

    name: str
    title: str
    stub: tuple[str, ...]  # names of the heading cells of a line
    heads: tuple[tuple[str, ...], ...]
    lines: tuple[Line, ...]
    caption: str = ""
    about: tuple[str, ...] = ()  # what the columns are
    notes: tuple[str, ...] = ()  # what a reader must know before comparing
    facts: tuple[Fact, ...] = field(default=(), repr=False)

    @property
    def depth(self) -> int:
        return len(self.heads[0])

    def spans(self, level: int) -> list[tuple[str, int]]:
        """Headings of a level with the number of columns each stands over."""
        return [(key[-1], len(list(group))) for key, group in groupby(self.heads, key=lambda head: head[: level + 1])]

    def boundaries(self) -> set[int]:
        """Columns (counted from 0) at which another data set begins."""
        return {i for i in range(1, len(self.heads)) if self.heads[i][0] != self.heads[i - 1][0]}


def needs_text(row: Row) -> str:
    return row.needs or "nothing"


def published_text(value: Published) -> str:
    """As in the paper."""
    if isinstance(value, Accuracy):
        return f"{value.mean:.2f}" if value.std is None else f"{value.mean:.2f} ± {value.std:.2f}"
    return value or NOTHING


def fact(
    table: str,
    column: Column,
    row: Row,
    measure: str,
    estimate: Estimate,
    *,
    num_groups: int | None = None,
    rank: str = "",
    paper: Published = None,
) -> Fact:
    printed = paper if isinstance(paper, Accuracy) else None
    return Fact(
        table,
        column.dataset,
        column.protocol,
        column.mode,
        row.method,
        row.label,
        needs_text(row),
        num_groups,
        measure,
        estimate.mean,
        estimate.std,
        len(estimate.seeds),
        rank,
        printed.mean if printed else (paper if isinstance(paper, str) else None),
        printed.std if printed else None,
    )
