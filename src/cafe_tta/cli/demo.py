"""`cafe-tta demo`: the whole story in two minutes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cafe_tta.cli.console import progress, say, show_table

if TYPE_CHECKING:
    from cafe_tta.bench.demo import Demo, MethodResult


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the numbers and the picture.")] = Path("cafe-tta-demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every method; the table shows mean and spread.")] = 3,
) -> None:
    """Adapt a small digit classifier to 15 mixed corruptions and compare the methods. Downloads nothing."""
    from cafe_tta.bench import demo as bench  # loads scikit-learn and more: only when it is needed
    from cafe_tta.methods import METHODS

    with progress("training the source model", bench.TRAINING.total_epochs) as advance:
        prepared = bench.prepare(say, advance)
    say(f"clean test digits: {100 * prepared.clean_accuracy:.1f} % right; now they are corrupted in 15 ways")
    with progress("adapting", seeds * len(METHODS)) as advance:
        results = bench.compare(prepared, range(seeds), advance)
    show_table(_table(prepared, results))
    paths = bench.write(prepared, results, range(seeds), output)
    print(f"\nwritten: {', '.join(map(str, paths))}")


def _table(prepared: "Demo", results: "list[MethodResult]") -> Table:
    best = max(result.mean for result in results if result.needs != "data")
    images, runs = results[0].outcomes[0].images, len(results[0].outcomes)
    title = f"{images} digits, 15 corruptions mixed, severity 5: offline accuracy, mean ± std of {runs} seeds"
    table = Table(title=title, caption="dann is a reference, no rival: it needs labelled source data while it adapts")
    table.add_column("method")
    table.add_column("needs of the source")
    for name in ("accuracy %", "Fréchet distance", "ms / image"):
        table.add_column(name, justify="right")
    for result in results:
        values = (
            f"{result.mean:.2f} ± {result.spread:.2f}",
            f"{result.frechet:.2f}",
            f"{result.milliseconds:.2f}",
        )
        style = "bold" if result.mean == best else ""
        table.add_row(result.name, result.needs or "nothing", *values, style=style)
    return table
