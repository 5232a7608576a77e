"""`cafe-tta report`: the paper's tables and figures from the records of a benchmark."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from cafe_tta.cli.console import say, show_table

if TYPE_CHECKING:
    from cafe_tta.bench.report import tables

WIDEST = 8  # columns of numbers side by side
_STYLES = {"best": "bold", "second": "underline"}


def report(
    results: Annotated[list[Path], typer.Argument(help="Folders or files of results. Several are joined.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the report; with --leaderboard, the file.", show_default="RESULTS/report", dir_okay=True
        ),
    ] = None,
    paper: Annotated[bool, typer.Option("--paper/--no-paper", help="Show published numbers beside ours.")] = True,
    against: Annotated[
        str | None,
        typer.Option(help="A row: shows how far all others are from it, by image and by seed, with intervals."),
    ] = None,
    leaderboard: Annotated[
        bool,
        typer.Option(
            "--leaderboard", help="Instead, one page that lists every method in every setting, and can be sorted."
        ),
    ] = False,
) -> None:
    """Make tables, figures and a page from the results of a benchmark."""
    from cafe_tta.bench import report as bench

    if leaderboard:
        print(f"written: {bench.leaderboard.write(results, output or Path('leaderboard.html'))}")
        return
    made = bench.make(results, with_paper=paper, against=against)
    for note in made.notes:
        say(f"note: {note}")
    say("drawing the figures")
    written = bench.write(made, output)  # before anything is printed: `| head` ends the command at its first lines
    for shown in made.tables:
        for part in _parts(shown):
            show_table(drawn(part))
        for note in shown.notes:
            print(f"note: {note}")
        print()
    print(f"written: {', '.join(map(str, written))}")


def show_report_table(results: Sequence[Path]) -> None:
    """Prints the first table of a report."""
    from cafe_tta.bench import report as bench

    for shown in bench.make(results).tables[:1]:
        show_table(drawn(shown))


def _parts(shown: "tables.Table") -> "list[tables.Table]":
    """A table too wide for a terminal, data set by data set."""
    if len(shown.heads) <= WIDEST:
        return [shown]
    starts = sorted(shown.boundaries() | {0})
    parts = []
    for start, stop in zip(starts, [*starts[1:], len(shown.heads)], strict=True):
        lines = tuple(replace(line, cells=line.cells[start:stop]) for line in shown.lines)
        title, caption = shown.title if start == 0 else "", shown.caption if stop == len(shown.heads) else ""
        parts.append(replace(shown, heads=shown.heads[start:stop], lines=lines, title=title, caption=caption))
    return parts


def drawn(shown: "tables.Table") -> Table:
    """A table of the report, for the terminal."""
    title, caption = Text(shown.title) if shown.title else None, Text(shown.caption) if shown.caption else None
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in shown.stub:
        made.add_column(Text(name), no_wrap=True)
    for i, head in enumerate(shown.heads):
        above = shown.heads[i - 1] if i else ("",) * len(head)
        # A heading is said once, over the first of its columns.
        same = next((level for level in range(len(head)) if head[: level + 1] != above[: level + 1]), len(head))
        made.add_column(
            Text("\n".join("" if level < same else part for level, part in enumerate(head))), justify="right"
        )
    for line in shown.lines:
        cells = [Text(cell.text, style=_STYLES.get(cell.rank, "")) for cell in line.cells]
        made.add_row(*map(Text, line.head), *cells)
    return made
