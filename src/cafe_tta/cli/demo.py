"""`cafe-tta demo`: the whole story in two minutes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cafe_tta.cli.console import progress, say, show_table
from cafe_tta.cli.report import drawn

_ONE_PASS = {"dann": {"iterations": 1}}  # the paper's 400 would take longer than all the rest


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the model, the records and the picture.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every method; the table shows mean and spread.")] = 3,
) -> None:
    """Adapt a small digit classifier to 15 mixed corruptions and compare the methods. Downloads nothing.

    Runs that the output folder has already are not done again.
    """
    from cafe_tta import METHODS, bench, storage  # loads scikit-learn and more: only when it is needed
    from cafe_tta.bench.report.columns import main_columns
    from cafe_tta.bench.report.figures import draw_summary
    from cafe_tta.bench.report.tables import summary_table

    methods = [name for name, kind in METHODS.items() if kind.in_tables]
    plan = bench.plan("mixed", "digits", methods, _ONE_PASS, seeds=tuple(range(seeds)))
    bench.run(plan, output, say=say, watch=progress)
    (column,) = main_columns(bench.report.make([output]).records)
    show_table(drawn(summary_table(column)))
    picture = draw_summary(column, _samples(plan))
    paths = [output / "demo.png", output / "demo.svg"]
    for path, content in zip(paths, (picture.png, picture.svg), strict=True):
        storage.write_bytes(path, content)
    print(f"\nwritten: {output / 'records.jsonl'}, {', '.join(map(str, paths))}")


def _samples(plan: Any) -> list[tuple[str, Any]]:
    """One image of the data set, clean and with each corruption."""
    from cafe_tta import corruptions, data

    clean = data.load(plan.dataset.data).images([3])
    changed = [(name, corruptions.corrupt(clean, name, severity=5, seed=0)[0]) for name in plan.corruptions]
    return [("clean", clean[0]), *changed]
