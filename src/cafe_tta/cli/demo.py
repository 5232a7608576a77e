"""`cafe-tta demo`: the whole story in two minutes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cafe_tta.cli.console import progress, say, show_table

if TYPE_CHECKING:
    from cafe_tta.bench.demo import MethodResult


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the model, the records and the picture.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every method; the table shows mean and spread.")] = 3,
) -> None:
    """Adapt a small digit classifier to 15 mixed corruptions and compare the methods. Downloads nothing.

    What is done already in the output folder is not done again.
    """
    from cafe_tta.bench import demo as bench  # loads scikit-learn and more: only when it is needed

    runner = bench.prepare(output, range(seeds), say)
    runs = len(runner.missing())
    with progress("adapting", runs) as advance:
        results = bench.compare(runner, lambda _: advance(1))
    show_table(_table(results))
    paths = bench.draw(runner, results, output)
    print(f"\nwritten: {output / 'records.jsonl'}, {', '.join(map(str, paths))}")


def _table(results: "list[MethodResult]") -> Table:
    best = max(result.mean for result in results if result.needs != "data")
    runs = len(results[0].records)
    title = (
        f"{results[0].images} digits, 15 corruptions mixed, severity 5: offline accuracy, mean ± std of {runs} seeds"
    )
    table = Table(title=title, caption="dann is a reference, no rival: it needs labelled source data while it adapts")
    table.add_column("method")
    table.add_column("needs of the source")
    for name in ("accuracy %", "Fréchet distance", "ms / image"):
        table.add_column(name, justify="right")
    for result in results:
        values = (
            f"{result.mean:.2f} ± {result.spread:.2f}" if runs > 1 else f"{result.mean:.2f}",
            f"{result.frechet:.2f}",
            f"{result.milliseconds:.2f}",
        )
        style = "bold" if result.mean == best else ""
        table.add_row(result.name, result.needs or "nothing", *values, style=style)
    return table
