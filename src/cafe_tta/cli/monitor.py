"""`cafe-tta monitor`: how far the images of a folder have drifted from the source images; nothing adapts."""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from cafe_tta import data
from cafe_tta.cli.console import progress, say, say_unreadable, show_table
from cafe_tta.cli.flags import command
from cafe_tta.data.options import DataOptions
from cafe_tta.methods.choice import MethodOptions
from cafe_tta.models import ModelOptions
from cafe_tta.monitor import WINDOW, Monitor
from cafe_tta.options import Options, option


@dataclass(frozen=True)
class MonitorOptions(Options):
    """What `cafe-tta monitor` watches."""

    source: Path = option(Path(), "Statistics of the source images, made by `cafe-tta stats`.", required=True)
    window: int = option(WINDOW, "Number of last images that drift is told of.", least=8)
    every: int = option(WINDOW, "Number of images after which drift is told.", least=1)
    csv: bool = option(False, "Print CSV instead of a table, line by line as the images are read.", flag="--csv")


@command()
def monitor(model: ModelOptions, images: DataOptions, options: MonitorOptions) -> None:
    """Tell how far the images of a folder have drifted from the source images. Needs no labels; nothing adapts.

    cafe-tta monitor --model model.safetensors --source stats.safetensors --data photos/

    Drift is 1 for images like the source images, and grows with the shift of their features. Images are read in the order of their names: photos that are named by time show drift over time.
    """  # noqa: E501 - a line break here would be one in the help
    chosen = MethodOptions(method="source", source=[str(options.source)]).load(model)
    if "stats" not in chosen.sources:
        raise ValueError(f"expected statistics as --source, but {options.source} holds {', '.join(chosen.sources)}")
    watched = Monitor(chosen.model.classifier, chosen.sources["stats"], options.window)
    imageset = data.load(images.data)
    for note in chosen.notes:
        say(note)
    table = Table("images", "up to", "drift", box=None)
    lines = csv.writer(sys.stdout, lineterminator="\n")
    if options.csv:
        lines.writerow(("images", "file", "drift"))
    with progress("watching", len(imageset)) as advance:
        loader = data.Loader(imageset, chosen.model.preprocessing, options.every, workers=images.workers)
        for batch in loader.batches():
            watched(batch.images)
            drift = "" if watched.drift is None else f"{watched.drift:.3f}"
            if options.csv:
                lines.writerow((watched.images, batch.names[-1], drift))
                sys.stdout.flush()
            else:
                table.add_row(str(watched.images), batch.names[-1], drift or "too few images")
            advance(len(batch.images))
    say_unreadable(loader.unreadable)
    if not watched.images:
        raise ValueError(f"none of the {len(imageset)} images of {imageset.name} could be read")
    if not options.csv:
        show_table(table)
