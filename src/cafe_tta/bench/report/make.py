"""A report from records: tables, figures and a page, the same from the same records."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cafe_tta import storage
from cafe_tta.bench.report import settings
from cafe_tta.bench.report.accuracy import accuracy_tables
from cafe_tta.bench.report.columns import rows
from cafe_tta.bench.report.cost import cost_tables
from cafe_tta.bench.report.distances import TITLES, distance_table
from cafe_tta.bench.report.draw_accuracy import draw_accuracy, draw_corruptions, draw_cost
from cafe_tta.bench.report.draw_groups import draw_group_sizes, draw_sweep
from cafe_tta.bench.report.draw_streams import draw_frechet, draw_streams
from cafe_tta.bench.report.drawing import Drawing, styles
from cafe_tta.bench.report.latex import to_latex
from cafe_tta.bench.report.markdown import to_markdown
from cafe_tta.bench.report.page import to_html
from cafe_tta.bench.report.records import Record, read
from cafe_tta.bench.report.sweep import sweep_table
from cafe_tta.bench.report.table import Table
from cafe_tta.bench.report.tidy import to_csv


@dataclass(frozen=True)
class Report:
    """Records and the tables made of them. Figures are drawn when it is written."""

    paths: tuple[Path, ...]
    records: tuple[Record, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    with_paper: bool

    @property
    def command(self) -> str:
        """What makes this report again."""
        return shlex.join(["cafe-tta", "report", *map(str, self.paths), *([] if self.with_paper else ["--no-paper"])])


def make(paths: Sequence[Path], with_paper: bool = True) -> Report:
    """Reads records, checks that they can be compared, and makes the tables that they fill."""
    records, notes = read(paths)
    tables = [
        *accuracy_tables(records, with_paper),
        sweep_table(records, with_paper),
        *(distance_table(records, kind) for kind in TITLES),
        *cost_tables(records),
    ]
    return Report(tuple(paths), tuple(records), tuple(filter(None, tables)), tuple(notes), with_paper)


def drawings(report: Report) -> list[Drawing]:
    """Every figure for which there are records."""
    records, with_paper = report.records, report.with_paper
    styled = styles(rows(records))
    return [
        *draw_accuracy(records, styled, with_paper),
        *draw_corruptions(records, styled),
        *draw_frechet(records),
        *draw_sweep(records, with_paper),
        *draw_group_sizes(records),
        *draw_streams(records, styled),
        *draw_cost(records, styled),
    ]


def write(report: Report, output: Path) -> list[Path]:
    """Tables, figures and the page in `output`. What an earlier report left there under the same names is replaced."""
    figures = drawings(report)
    lines = settings.what_was_run(report.records), settings.choices(report.records)
    files = {
        "tables.md": to_markdown(report.tables, report.notes),
        "tables.csv": to_csv(report.tables),
        "tables.tex": to_latex(report.tables),
        "index.html": to_html(report.tables, figures, *lines, report.notes, report.command),
    }
    (output / "figures").mkdir(parents=True, exist_ok=True)
    paths = [output / name for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        storage.write_bytes(path, text.encode())
    for figure in figures:
        stem = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in figure.name)
        storage.write_bytes(output / "figures" / f"{stem}.pdf", figure.pdf)
        storage.write_bytes(output / "figures" / f"{stem}.png", figure.png)
    return [*paths, output / "figures"]
