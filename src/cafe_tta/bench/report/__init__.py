"""The report: tables in the paper's form, figures and a page, made from the records of a benchmark."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cafe_tta import storage
from cafe_tta.bench.records import Record, collect
from cafe_tta.bench.report import figures, leaderboard
from cafe_tta.bench.report.beside import published_tables
from cafe_tta.bench.report.columns import rows
from cafe_tta.bench.report.figures import Drawing
from cafe_tta.bench.report.formats import to_csv, to_latex, to_markdown
from cafe_tta.bench.report.page import to_html
from cafe_tta.bench.report.paired import against_tables, corruption_tables
from cafe_tta.bench.report.searched import rates_tables
from cafe_tta.bench.report.tables import (
    DISTANCES,
    Table,
    accuracy_tables,
    cost_tables,
    distance_table,
    metrics_tables,
    sweep_table,
)
from cafe_tta.display import Displayed

__all__ = ["Report", "leaderboard", "make", "write"]


@dataclass(frozen=True, repr=False)
class Report(Displayed):
    """Records and the tables made of them. Figures are drawn when it is written."""

    paths: tuple[Path, ...]
    records: tuple[Record, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    with_paper: bool
    against: str | None = None

    def facts(self) -> Mapping[str, Any]:
        tables = ", ".join(table.name for table in self.tables)
        return {"records": len(self.records), "tables": tables, "notes": len(self.notes) or None}

    @property
    def command(self) -> str:
        """The command that makes this report again."""
        options = [] if self.with_paper else ["--no-paper"]
        options += ["--against", self.against] if self.against else []
        return shlex.join(["cafe-tta", "report", *map(str, self.paths), *options])


def make(paths: str | Path | Sequence[str | Path], with_paper: bool = True, against: str | None = None) -> Report:
    """Reads the records of folders or files, checks that they can be compared, and makes the tables that they fill.

    `against` is a row: the differences of all others from it are then shown, with intervals.
    """
    files = (Path(paths),) if isinstance(paths, (str, Path)) else tuple(map(Path, paths))
    records, notes = collect(files)
    tables = [
        *accuracy_tables(records, with_paper),
        *(against_tables(records, against) if against else ()),
        *metrics_tables(records),
        *rates_tables(records),
        *corruption_tables(records),
        sweep_table(records, with_paper),
        *(distance_table(records, kind) for kind in DISTANCES),
        *(published_tables(records) if with_paper else ()),
        *cost_tables(records),
    ]
    return Report(files, tuple(records), tuple(filter(None, tables)), tuple(notes), with_paper, against)


def drawings(report: Report) -> list[Drawing]:
    """Every figure for which there are records."""
    records, with_paper = report.records, report.with_paper
    styled = figures.styles(rows(records))
    return [
        *figures.draw_accuracy(records, styled, with_paper),
        *figures.draw_corruptions(records, styled),
        *figures.draw_frechet(records),
        *figures.draw_sweep(records, with_paper),
        *figures.draw_group_sizes(records),
        *figures.draw_streams(records, styled),
        *figures.draw_cost(records, styled),
    ]


def write(report: Report, output: str | Path | None = None) -> list[Path]:
    """Writes tables, figures and the page to `output`, or to the folder `report` beside the first records.

    Files of an earlier report with the same names are replaced.
    """
    first = report.paths[0]
    output = Path(output) if output else (first if first.is_dir() else first.parent) / "report"
    drawn = drawings(report)
    files = {
        "tables.md": to_markdown(report.tables, report.notes),
        "tables.csv": to_csv(report.tables),
        "tables.tex": to_latex(report.tables),
        "index.html": to_html(report.tables, drawn, report.records, report.notes, report.command),
    }
    (output / "figures").mkdir(parents=True, exist_ok=True)
    paths = [output / name for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        storage.write_bytes(path, text.encode())
    for figure in drawn:
        stem = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in figure.name)
        storage.write_bytes(output / "figures" / f"{stem}.pdf", figure.pdf)
        storage.write_bytes(output / "figures" / f"{stem}.png", figure.png)
    return [*paths, output / "figures"]
