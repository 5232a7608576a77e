"""The flags of `cafe-tta bench`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cafe_tta.bench.experiments import DATASETS, EXPERIMENTS
from cafe_tta.cli import inputs

_SOURCE, _WHAT = "The source side", "What is run"


def _what(help: str, *names: str, **rules: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_WHAT, **{"show_default": False, **rules})


def _source(help: str, *names: str, **rules: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_SOURCE, **{"show_default": False, **rules})


ExperimentName = Annotated[
    str | None, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.", show_default=False, metavar="[EXPERIMENT]")
]
Output = Annotated[
    Path | None,
    typer.Option(help="Folder for the records; by default results/EXPERIMENT-DATASET.", show_default=False),
]
Listing = Annotated[bool, typer.Option("--list", help="List the experiments, with what each costs on this machine.")]
ShowEpisodes = Annotated[
    bool, typer.Option("--show-episodes", help="Print which images come with which corruptions, and stop.")
]
Data = Annotated[str | None, typer.Option(help="Test images, instead of the data set's own.", show_default=False)]

DatasetName = Annotated[str, _what(f"One of {', '.join(DATASETS)}.", show_default=True)]
Methods = Annotated[
    str | None,
    _what(
        "Run only these, separated by commas. With options, a row of its own: cafe,cafe(normalisation=blend,lr=0.1)."
    ),
]
CorruptionNames = Annotated[
    str, _what("all, held-out, or names separated by commas.", "--corruptions", show_default=True)
]
Seeds = Annotated[int, _what("Number of seeds: 0, 1, …", min=1, show_default=True)]
Limit = Annotated[int | None, _what("Number of images of the data set in each episode.", min=1)]
Set = Annotated[
    list[str] | None,
    _what("An option of a method, such as cafe.lr=0.01, or of all that have it: lr=0.01; may be repeated.", "--set"),
]
Sweep = Annotated[str | None, _what("Values of k for the experiment `groups`, separated by commas.")]
Frechet = Annotated[
    bool | None,
    _what(
        "Measure the distance to the source before and after adapting; by default as the experiment says.",
        "--frechet/--no-frechet",
    ),
]
ModeName = Annotated[str | None, _what("online or offline, instead of the experiment's mode.")]

SourceData = Annotated[str | None, _source("Training images, instead of the data set's own.")]
SourceLimit = Annotated[int | None, _source("Number of source images used.", min=1)]
NumGroups = Annotated[int | None, _source("Number of groups k, instead of the data set's.", min=1)]
MaxGroupSize = Annotated[
    int, _source("Wider groups are split; 0 sets no limit, as in the paper.", min=0, show_default=True)
]
Posterior = Annotated[Path | None, _source("File of the SWAG posterior that bacs needs.")]
SwagEpochs = Annotated[
    int, _source("Collect that posterior around the weights in this many epochs.", min=0, show_default=True)
]
SwagLr = Annotated[float, _source("Learning rate while the posterior is collected.", min=0, show_default=True)]
Model = Annotated[str | None, _source("Model, instead of the paper's.")]

Synchronised = Annotated[
    bool,
    typer.Option(
        "--synchronised",
        help="All ranks do every run together, each with its part of every batch, as one adapter; otherwise each rank "
        "does runs of its own.",
        rich_help_panel=inputs.TORCHRUN,
    ),
]
