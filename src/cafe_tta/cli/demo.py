"""`cafe-tta demo`: the whole story in two minutes."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the table and the picture.")] = Path("cafe-tta-demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every method; the table shows mean and spread.")] = 3,
) -> None:
    """Adapt a small digit classifier to 15 mixed corruptions and compare the methods. Downloads nothing."""
    from cafe_tta.bench import demo as bench  # loads the plotting library: only when it is needed

    bench.main(output, range(seeds), quiet=not sys.stderr.isatty())
