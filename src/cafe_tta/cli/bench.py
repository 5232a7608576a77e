"""`cafe-tta bench`: the paper's experiments, each by one command."""

import os
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cafe_tta import data as image_sets
from cafe_tta.bench import estimate, rates, run
from cafe_tta.bench.experiments import DATASETS, EXPERIMENTS, Dataset, Plan, choose_dataset, parse_options, plan
from cafe_tta.bench.protocols import PROTOCOLS
from cafe_tta.bench.records import RECORDS
from cafe_tta.bench.source_side import SourceSideOptions
from cafe_tta.cli.console import duration, progress, say, show_table, sigterm_interrupts
from cafe_tta.cli.flags import TORCHRUN, TimeoutOption, command
from cafe_tta.cli.report import show_report_table
from cafe_tta.copies import choose_severities
from cafe_tta.corruptions import choose_names
from cafe_tta.distributed import torchrun_share
from cafe_tta.distributed.job import HEARTBEAT_TIMEOUT
from cafe_tta.models.preprocessing import Rgb
from cafe_tta.options import Options, option

_IMAGES, _ROWS = "Images and model, instead of the data set's own", "What is run"


@dataclass(frozen=True)
class BenchOptions(Options):
    """What `cafe-tta bench` runs."""

    dataset: str | None = option(
        None,
        f"The data set: one of {', '.join(DATASETS)}, or a name for images of your own, with --data, --source-data and "
        "--model. Default: digits.",
    )
    output: Path | None = option(None, "Folder for the records; by default results/EXPERIMENT-DATASET.")
    listing: bool = option(
        False, "List the experiments, with what each costs on this machine, and the protocols.", flag="--list"
    )
    show_episodes: bool = option(
        False, "Print which images come with which corruptions, and stop.", flag="--show-episodes"
    )
    methods: str | None = option(
        None,
        "Run only these, separated by commas. With options, a row of its own: cafe,cafe(normalisation=blend,lr=0.1). "
        "package.module:Class is one of your own; see docs/own-method.md.",
        panel=_ROWS,
    )
    set: list[str] = option(
        [],
        "An option of a method, such as cafe.lr=0.01, or of all that have it: lr=0.01. May be repeated.",
        panel=_ROWS,
        metavar="OPTION=VALUE",
    )
    protocols: list[str] = option(
        [],
        "A protocol, instead of the experiment's own; see --list. With options: class-correlated(delta=0.01). "
        "package.module:function is one of your own. May be repeated.",
        panel=_ROWS,
    )
    corruptions: str = option(
        "all", "all, held-out, or names separated by commas; package.module:function is one of your own.", panel=_ROWS
    )
    severity: str | None = option(
        None, "Severities such as 5, 1,3 or 1-5, instead of the data set's.", panel=_ROWS, repeated=True
    )
    seeds: int = option(3, "Number of seeds: 0, 1, …", least=1, panel=_ROWS)
    limit: int | None = option(None, "Number of images of the data set in each episode.", least=1, panel=_ROWS)
    sweep: list[int] = option([], "Values of k for the experiment `groups`, such as 8,32.", panel=_ROWS)
    frechet: bool | None = option(
        None, "Measure the distance to the source before and after adapting; by default the experiment's.", panel=_ROWS
    )
    batch_size: int | None = option(
        None, "Images a batch, for all methods, instead of each method's own.", least=1, panel=_ROWS
    )
    pace: str | None = option(
        None,
        "The stream does not wait, and a slow method misses batches: measured, or what a batch costs, in plain forward "
        "passes: 3, or tent=3,cafe=4.",
        panel=_ROWS,
    )
    rates: list[float] = option(
        [],
        "Run each row at these multiples of its own learning rate, such as 0.1,0.3,1,3,10: a search, for source images "
        "with --corruptions held-out.",
        panel=_ROWS,
    )
    rates_of: list[Path] = option(
        [],
        "A folder that was made with --rates: run each row at the learning rate that was best there. May be repeated.",
        panel=_ROWS,
        metavar="DIR",
    )
    mode: str | None = option(None, "online or offline, instead of the experiment's mode.", panel=_ROWS)
    data: str | None = option(None, "Test images.", panel=_IMAGES)
    source_data: str | None = option(None, "Training images.", panel=_IMAGES)
    model: str | None = option(None, "The model.", panel=_IMAGES)
    image_size: int | None = option(None, "Height and width of the images, in pixels.", least=1, panel=_IMAGES)
    mean: Rgb | None = option(
        None, "Mean of the red, green and blue values, which are in 0..1.", panel=_IMAGES, metavar="R,G,B"
    )
    std: Rgb | None = option(
        None, "Standard deviation of the red, green and blue values.", panel=_IMAGES, metavar="R,G,B"
    )
    synchronised: bool = option(
        False,
        "All ranks do every run together, each with its part of every batch, as one adapter; otherwise each rank does "
        "runs of its own.",
        panel=TORCHRUN,
        flag="--synchronised",
    )

    def chosen_dataset(self) -> Dataset:
        pixels = {"mean": self.mean, "std": self.std, "size": self.image_size}
        severities = None if self.severity is None else choose_severities(self.severity)
        own = {"data": self.data, "source_data": self.source_data, "model": self.model, "severities": severities}
        return choose_dataset(self.dataset, **own, **pixels)

    def plan(self, experiment: str) -> Plan:
        if self.rates and self.rates_of:
            raise ValueError(
                "expected --rates or --rates-of, but got both: one searches, the other uses what was found"
            )
        dataset = self.chosen_dataset()
        planned = plan(
            experiment,
            dataset,
            self.methods,
            parse_options(self.set + self._batch_size(), self.methods),
            self.sweep,
            self.mode,
            self.frechet,
            self.protocols,
            self.pace,
            seeds=tuple(range(self.seeds)),
            limit=self.limit,
            corruptions=self._corruptions(dataset),
        )
        if self.rates:
            return rates.search(planned, self.rates)
        return rates.best(planned, self.rates_of) if self.rates_of else planned

    def _batch_size(self) -> list[str]:
        return [] if self.batch_size is None else [f"batch_size={self.batch_size}"]

    def folder(self, planned: Plan) -> Path:
        """Where the records go, unless the user says where: what is not the experiment's own is in the name."""
        batches = f"batches-of-{self.batch_size}" if self.batch_size else ""
        pace = f"pace-{self.pace}" if self.pace else ""
        parts = (planned.experiment, planned.dataset.name, *self.protocols, self.mode, batches, pace)
        name = "-".join(part for part in parts if part)
        return Path("results") / re.sub(r"[^\w.=-]+", "-", name).strip("-")

    def _corruptions(self, dataset: Dataset) -> tuple[str, ...]:
        """Corruptions by name; those of a corrupted data set may be its own."""
        try:
            return choose_names(self.corruptions)
        except ValueError:
            images = image_sets.load(dataset.data)
            if not isinstance(images, image_sets.CorruptedSet):
                raise
            return choose_names(self.corruptions, images.corruptions())


@command()
def bench(
    options: BenchOptions,
    source: SourceSideOptions,
    experiment: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.", show_default=False, metavar="[EXPERIMENT]")
    ] = None,
    timeout: TimeoutOption = HEARTBEAT_TIMEOUT,
) -> None:
    """Run an experiment of the paper: many methods, corruptions and seeds, each run recorded as it ends.

    cafe-tta bench mixed --dataset digits

    Started again after Ctrl-C, a crash or a power cut, it continues where it stopped. `cafe-tta report` makes tables, figures and a page from the records. Data sets are looked for in $CAFE_TTA_DATA or ~/.cache/cafe-tta/data, and downloaded if CAFE_TTA_DOWNLOAD=1; --data, --source-data, --model and --weights name others.

    Many processes: torchrun --nproc-per-node 4 -m cafe_tta bench mixed ... divides the runs between them; --output must be a folder that all machines share. The records do not depend on the number of processes, which may change from one start to the next.
    """  # noqa: E501 - a line break here would be one in the help
    share = torchrun_share()
    if (options.listing or options.show_episodes) and share is not None and share.rank:
        return  # one process is enough
    if options.listing:
        _show_experiments(options.chosen_dataset(), source)
        return
    if experiment is None:
        raise ValueError(f"expected an experiment, but got none; choose from: {', '.join(EXPERIMENTS)}; see --list")
    planned = options.plan(experiment)
    if options.show_episodes:
        _show_episodes(planned)
        return
    _run(planned, source, options.output or options.folder(planned), options.synchronised, timeout)


def _run(planned: Plan, options: SourceSideOptions, folder: Path, synchronised: bool, timeout: float) -> None:
    """Does the runs, alone or with the other ranks, and shows the first table."""
    if synchronised and "WORLD_SIZE" not in os.environ:
        raise ValueError("expected --synchronised only under torchrun: torchrun --nproc-per-node 2 -m cafe_tta bench …")
    share = torchrun_share()
    with nullcontext() if share is None else sigterm_interrupts():
        run(planned, folder, options, say=say, watch=progress, synchronised=synchronised, timeout=timeout)
    if share is None or not share.rank:
        show_report_table([folder])
        print(f"\nrecords: {folder / RECORDS}; tables, figures and a page: cafe-tta report {folder}")


def _show_episodes(planned: Plan) -> None:
    images = image_sets.load(planned.dataset.data)
    table = Table("protocol", "seed", "episode", "images", "hash", "domains", box=None)
    for protocol in planned.protocols:
        for seed in planned.seeds:
            for episode in planned.episodes(protocol, seed, len(images), images.labels):
                summary = episode.summary()
                domains = ", ".join(f"{name} {count}" for name, count in summary.domains.items())
                table.add_row(protocol, str(seed), episode.name, str(len(episode)), summary.digest, domains)
    show_table(table)


def _show_experiments(dataset: Dataset, options: SourceSideOptions) -> None:
    """Every experiment, with the time that it takes on this machine for the data set that was named."""
    costs = estimate.every_experiment(dataset, options, say)
    table = Table("experiment", "shows", "data sets", f"{dataset.name}, 3 seeds", box=None)
    for name, kind in EXPERIMENTS.items():
        cost = duration(costs[name]) if name in costs else "-"
        table.add_row(name, kind.shows, ", ".join(kind.datasets), cost)
    show_table(table)
    print()
    table = Table("protocol", "episodes", box=None)
    for protocol in PROTOCOLS.values():
        table.add_row(protocol.name, protocol.meaning.replace("`", ""))
    show_table(table)
