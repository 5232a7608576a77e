"""`cafe-tta bench`: the paper's experiments, each by one command."""

import os
from contextlib import nullcontext
from pathlib import Path

from rich.table import Table

from cafe_tta import data as image_sets
from cafe_tta.bench import estimate, run
from cafe_tta.bench.experiments import EXPERIMENTS, Dataset, Plan, choose_dataset, parse_options, plan
from cafe_tta.bench.records import RECORDS
from cafe_tta.bench.source_side import SourceOptions
from cafe_tta.cli import bench_flags as flags
from cafe_tta.cli import inputs
from cafe_tta.cli.console import progress, say, show_table, sigterm_interrupts
from cafe_tta.cli.report import show_report_table
from cafe_tta.corruptions import choose_names
from cafe_tta.distributed import torchrun_share
from cafe_tta.distributed.job import HEARTBEAT_TIMEOUT


def bench(
    experiment: flags.ExperimentName = None,
    dataset: flags.DatasetName = "digits",
    output: flags.Output = None,
    listing: flags.Listing = False,
    show_episodes: flags.ShowEpisodes = False,
    methods: flags.Methods = None,
    corruption_names: flags.CorruptionNames = "all",
    seeds: flags.Seeds = 3,
    limit: flags.Limit = None,
    settings: flags.Set = None,
    sweep: flags.Sweep = None,
    frechet: flags.Frechet = None,
    mode: flags.ModeName = None,
    data: flags.Data = None,
    source_data: flags.SourceData = None,
    source_limit: flags.SourceLimit = None,
    num_groups: flags.NumGroups = None,
    max_group_size: flags.MaxGroupSize = 0,
    posterior: flags.Posterior = None,
    swag_epochs: flags.SwagEpochs = 0,
    swag_lr: flags.SwagLr = 1e-4,
    model: flags.Model = None,
    weights: inputs.WeightsOption = None,
    num_classes: inputs.NumClassesOption = None,
    image_size: inputs.ImageSizeOption = None,
    mean: inputs.MeanOption = None,
    std: inputs.StdOption = None,
    synchronised: flags.Synchronised = False,
    timeout: inputs.TimeoutOption = HEARTBEAT_TIMEOUT,
) -> None:
    """Run an experiment of the paper: many methods, corruptions and seeds, each run recorded as it ends.

    cafe-tta bench mixed --dataset digits

    Started again after Ctrl-C, a crash or a power cut, it continues where it stopped. `cafe-tta report` makes tables, figures and a page from the records. Data sets are looked for in $CAFE_TTA_DATA or ~/.cache/cafe-tta/data, and downloaded if CAFE_TTA_DOWNLOAD=1; --data, --source-data, --model and --weights name others.

    Many processes: torchrun --nproc-per-node 4 -m cafe_tta bench mixed ... shares the runs out; --output must be a folder that all machines share. The records do not depend on the number of processes, which may change from one start to the next.
    """  # noqa: E501 - a line break here would be one in the help
    pixels = {"mean": inputs.three_numbers("mean", mean), "std": inputs.three_numbers("std", std), "size": image_size}
    chosen = choose_dataset(dataset, data=data, source_data=source_data, model=model, **pixels)
    file, widest = None if weights is None else Path(weights), max_group_size or None
    swag = (posterior, swag_epochs, swag_lr)
    options = SourceOptions(file, num_classes, source_limit, *swag, num_groups, widest)
    if (listing or show_episodes) and (own := torchrun_share()) and own.rank:
        return  # one process is enough
    if listing:
        _show_experiments(chosen, options)
        return
    if experiment is None:
        raise ValueError(f"expected an experiment, but got none; choose from: {', '.join(EXPERIMENTS)}; see --list")
    planned = plan(
        experiment, chosen, methods, parse_options(settings or [], methods), _numbers(sweep), mode, frechet,
        seeds=tuple(range(seeds)), limit=limit, corruptions=choose_names(corruption_names),
    )  # fmt: skip
    folder = output or Path("results") / "-".join([experiment, chosen.name, *([mode] if mode else [])])
    if show_episodes:
        _show_episodes(planned)
    else:
        _run(planned, options, folder, synchronised, timeout)


def _run(planned: Plan, options: SourceOptions, folder: Path, synchronised: bool, timeout: float) -> None:
    """Does the runs, alone or with the other ranks, and shows the first table."""
    if synchronised and "WORLD_SIZE" not in os.environ:
        raise ValueError("expected --synchronised only under torchrun: torchrun --nproc-per-node 2 -m cafe_tta bench …")
    share = torchrun_share()
    with nullcontext() if share is None else sigterm_interrupts():
        run(planned, folder, options, say=say, watch=progress, synchronised=synchronised, timeout=timeout)
    if share is None or not share.rank:
        show_report_table([folder])
        print(f"\nrecords: {folder / RECORDS}; tables, figures and a page: cafe-tta report {folder}")


def _numbers(text: str | None) -> list[int] | None:
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"expected --sweep to be whole numbers with commas, such as 8,32,128, but got {text!r}")
    return [int(part) for part in parts] or None


def _show_episodes(planned: Plan) -> None:
    images = len(image_sets.load(planned.dataset.data))
    table = Table("protocol", "seed", "episode", "images", "hash", "domains", box=None)
    for protocol in planned.protocols:
        for seed in planned.seeds:
            for episode in planned.episodes(protocol, seed, images):
                summary = episode.summary()
                domains = ", ".join(f"{name} {count}" for name, count in summary.domains.items())
                table.add_row(protocol, str(seed), episode.name, str(len(episode)), summary.digest, domains)
    show_table(table)


def _show_experiments(dataset: Dataset, options: SourceOptions) -> None:
    """Every experiment, with the time that it takes on this machine for the data set that was named."""
    costs = estimate.every_experiment(dataset, options, say)
    table = Table("experiment", "shows", "data sets", f"{dataset.name}, 3 seeds", box=None)
    for name, kind in EXPERIMENTS.items():
        cost = _duration(costs[name]) if name in costs else "-"
        table.add_row(name, kind.shows, ", ".join(kind.datasets), cost)
    show_table(table)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
