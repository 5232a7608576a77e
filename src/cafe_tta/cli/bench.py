"""`cafe-tta bench`: the paper's experiments, each by one command."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cafe_tta.bench.experiments import BASES, KINDS, Base, Experiment, Variant, experiment
from cafe_tta.bench.records import RECORDS, SETTINGS
from cafe_tta.bench.records import read as read_records
from cafe_tta.bench.run import Mode
from cafe_tta.bench.runner import Runner, describe
from cafe_tta.bench.source_side import SourceOptions, SourceSide
from cafe_tta.cli import inputs
from cafe_tta.cli.console import Interrupted, progress, say, show_table, sigterm_interrupts
from cafe_tta.cli.options import parse_settings
from cafe_tta.corruptions import choose_names
from cafe_tta.distributed import Job, Share, torchrun_job, torchrun_share
from cafe_tta.distributed.job import HEARTBEAT_TIMEOUT, POLL_INTERVAL
from cafe_tta.methods import METHODS

_SOURCE = "The source side"
_WHAT = "What is run"
VISIBLE = 120.0  # seconds until a file that one machine wrote is seen by another


def bench(
    kind: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(KINDS)}.", show_default=False, metavar="[EXPERIMENT]")
    ] = None,
    dataset: Annotated[str, typer.Option(help=f"One of {', '.join(BASES)}.", rich_help_panel=_WHAT)] = "digits",
    output: Annotated[
        Path | None, typer.Option(help="Folder for the records; else results/EXPERIMENT-DATASET.", show_default=False)
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="What there is, and what it costs on this machine.")] = False,
    show_episodes: Annotated[
        bool, typer.Option("--show-episodes", help="Print which images come with which corruptions, and stop.")
    ] = False,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Only these, with commas; with options for a row of its own: cafe,cafe(normalisation=blend,lr=0.01).",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    corruption_names: Annotated[
        str,
        typer.Option("--corruptions", help="all, held-out, or names with commas.", rich_help_panel=_WHAT),
    ] = "all",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: 0, 1, …", rich_help_panel=_WHAT)] = 3,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Images of the data set for each episode.", rich_help_panel=_WHAT, show_default=False),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="An option of a method, such as cafe.lr=0.01, or of all that have it: lr=0.01; may be repeated.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="k of the experiment `groups`, with commas.", rich_help_panel=_WHAT, show_default=False),
    ] = None,
    frechet: Annotated[
        bool | None,
        typer.Option(
            "--frechet/--no-frechet",
            help="Measure the distance to the source before and after; else as the experiment says.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="online or offline, if not the experiment's.", rich_help_panel=_WHAT, show_default=False),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Test images, if not the data set's own.", show_default=False)
    ] = None,
    source_data: Annotated[
        str | None,
        typer.Option(help="Training images, if not the data set's own.", rich_help_panel=_SOURCE, show_default=False),
    ] = None,
    source_limit: Annotated[
        int | None, typer.Option(min=1, help="Source images used.", rich_help_panel=_SOURCE, show_default=False)
    ] = None,
    num_groups: Annotated[
        int | None, typer.Option(min=1, help="k, if not the data set's.", rich_help_panel=_SOURCE, show_default=False)
    ] = None,
    max_group_size: Annotated[
        int, typer.Option(min=0, help="Wider groups are split. 0: no limit, as in the paper.", rich_help_panel=_SOURCE)
    ] = 0,
    posterior: Annotated[
        Path | None, typer.Option(help="What bacs needs.", rich_help_panel=_SOURCE, show_default=False)
    ] = None,
    swag_epochs: Annotated[
        int, typer.Option(min=0, help="Or collect it around the weights in so many epochs.", rich_help_panel=_SOURCE)
    ] = 0,
    swag_lr: Annotated[float, typer.Option(min=0, help="Learning rate of that.", rich_help_panel=_SOURCE)] = 1e-4,
    model: Annotated[
        str | None, typer.Option(help="If not the paper's.", rich_help_panel=_SOURCE, show_default=False)
    ] = None,
    weights: inputs.WeightsOption = None,
    num_classes: inputs.NumClassesOption = None,
    image_size: inputs.ImageSizeOption = None,
    mean: inputs.MeanOption = None,
    std: inputs.StdOption = None,
    synchronised: Annotated[
        bool,
        typer.Option(
            "--synchronised",
            help="All ranks do every run together, each with its part of every batch, as one adapter; else each rank "
            "does runs of its own.",
            rich_help_panel=inputs.TORCHRUN,
        ),
    ] = False,
    timeout: inputs.TimeoutOption = HEARTBEAT_TIMEOUT,
) -> None:
    """Run an experiment of the paper: many methods, corruptions and seeds, each run written down as it ends.

    cafe-tta bench mixed --dataset digits

    Started again, it goes on where it was: after Ctrl-C, a crash or a power cut. `cafe-tta report` makes tables, figures and a page of the records. Data sets are looked for in $CAFE_TTA_DATA or ~/.cache/cafe-tta/data, and downloaded if CAFE_TTA_DOWNLOAD=1; --data, --source-data, --model and --weights name others.

    Many processes: torchrun --nproc-per-node 4 -m cafe_tta bench mixed ... shares the runs out; --output must be a folder that all machines share. Records are the same, and may be begun and gone on with by any number of processes.
    """  # noqa: E501 - a line break here would be one in the help
    base = _base(dataset, data, source_data, model, image_size, mean, std)
    source_options = SourceOptions(
        weights=None if weights is None else Path(weights),
        num_classes=num_classes,
        limit=source_limit,
        posterior=posterior,
        swag_epochs=swag_epochs,
        swag_lr=swag_lr,
        num_groups=num_groups,
        max_group_size=max_group_size or None,
    )
    own = torchrun_share()
    if own is not None and own.rank and (listing or show_episodes):
        return  # one process is enough
    if listing:
        show_table(_listing(base, source_options))
        return
    if kind is None:
        raise ValueError(
            f"expected the name of an experiment, but got none; choose from: {', '.join(KINDS)}; see --list"
        )
    names, variants = (None, {}) if methods is None else _methods(methods)
    chosen = experiment(
        kind,
        base,
        methods=names,
        options=_options(settings or [], [variants.get(name, (name,))[0] for name in names or METHODS]),
        sweep=None if sweep is None else [_number(text) for text in sweep.split(",")],
        mode=_mode(mode),
        variants=variants,
        corruptions=choose_names(corruption_names),
        seeds=tuple(range(seeds)),
        limit=limit,
        frechet=KINDS[kind].frechet if frechet is None and kind in KINDS else bool(frechet),
    )
    if synchronised:
        _check_synchronised(chosen)
    if show_episodes:
        _show_episodes(chosen)
        return
    folder = output or Path("results") / "-".join([kind, base.name, *([mode] if mode else [])])

    def make(share: Share) -> Runner:
        return Runner(chosen, SourceSide(base, folder / "source", source_options, say), folder, share)

    if own is None:
        _work(make(Share()), folder)
    else:
        with torchrun_job(timeout) as job:
            _work_with_others(job, make, folder, synchronised)
        if job.rank:
            return
    from cafe_tta.bench.report import make as make_report
    from cafe_tta.cli.report import drawn

    for shown in make_report([folder]).tables[:1]:
        show_table(drawn(shown))
    print(f"\nrecords: {folder / RECORDS}; tables, figures and a page: cafe-tta report {folder}")


def _check_synchronised(chosen: Experiment) -> None:
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("expected --synchronised only under torchrun: torchrun --nproc-per-node 2 -m cafe_tta bench …")
    methods = sorted({choice.method for part in chosen.parts for choice in part.choices})
    if alone := [name for name in methods if not METHODS[name].distributed]:
        raise ValueError(
            f"{', '.join(alone)} cannot adapt as one over several ranks; leave it out with --methods, "
            "or do without --synchronised"
        )


def _work(runner: Runner, folder: Path, job: Job | None = None) -> None:
    planned, missing = len(runner.plan()), runner.missing()
    if runner.results.dropped:
        say("note: the last record was cut off by a crash and is done again")
    if len(missing) < planned:
        say(f"{planned - len(missing)} of {planned} runs are done already")
    images = sum(len(run.episode) for run in missing)
    try:
        with progress(f"{len(missing)} runs", images) as advance:
            if job is None:
                runner.work(advance=advance)
            else:
                job.on_progress = advance
                _do_own_runs(runner, job)
                job.on_progress = None
    except KeyboardInterrupt as error:
        number = getattr(error, "exit_code", 128 + signal.SIGINT) - 128
        raise Interrupted(_kept(runner, folder), number) from None


def _kept(runner: Runner, folder: Path) -> str:
    kept = len(read_records(folder / RECORDS))
    return f"{kept} of {len(runner.plan())} runs are done and kept in {folder}; start again to go on"


def _work_with_others(job: Job, make: Callable[[Share], Runner], folder: Path, synchronised: bool) -> None:
    """What one rank does. Rank 0 alone makes what all of them need of the source side."""
    share = Share(job.rank, job.world) if synchronised else Share()
    if job.rank:
        _wait_for_files(job, folder, job.wait_for("source side"))
        runner = make(share)
    else:
        runner = make(share)
        runner.prepare()
        made = [folder / SETTINGS, *sorted((folder / "source").glob("*.safetensors"))]
        if synchronised:
            runner = make(share)  # from the same files as the others: adapters compare what they are made of
        job.publish("source side", {str(path.relative_to(folder)): path.stat().st_size for path in made})
    try:
        with sigterm_interrupts(), job.process_group() if synchronised else nullcontext():
            _work(runner, folder, job)
    except (TimeoutError, ConnectionError, RuntimeError) as error:  # the other ranks, or the machine
        raise RuntimeError(f"{error}; {_kept(runner, folder)}") from error


def _do_own_runs(runner: Runner, job: Job) -> None:
    runner.results.waiting = job.heartbeat
    if runner.share.ranks > 1:
        runner.work(started=job.heartbeat, advance=job.advance)
    else:
        runner.work(
            started=job.heartbeat,
            advance=job.advance,
            claim=lambda planned: job.claim(json.dumps(planned.key)),
            begin=job.rank / job.world,
        )
    job.barrier("runs")


def _wait_for_files(job: Job, folder: Path, files: dict[str, int]) -> None:
    """Until this machine sees what rank 0 has written: network file systems take their time."""
    deadline = time.monotonic() + VISIBLE
    while unseen := [name for name, size in files.items() if _size(folder / name) != size]:
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"rank 0 has written {folder / unseen[0]}, but this rank does not see it: "
                "--output must be a folder that all machines share"
            )
        time.sleep(POLL_INTERVAL)
        job.heartbeat()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _base(
    dataset: str,
    data: str | None,
    source_data: str | None,
    model: str | None,
    image_size: int | None,
    mean: str | None,
    std: str | None,
) -> Base:
    if dataset not in BASES:
        from cafe_tta.options import did_you_mean

        raise ValueError(f"unknown data set {dataset!r}{did_you_mean(dataset, BASES)}; choose from: {', '.join(BASES)}")
    changes: dict[str, Any] = {"data": data, "source_data": source_data, "model": model, "size": image_size}
    changes |= {"mean": inputs.three_numbers("mean", mean), "std": inputs.three_numbers("std", std)}
    return replace(BASES[dataset], **{name: value for name, value in changes.items() if value is not None})


def _options(settings: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`cafe.lr=0.1` for one method; `lr=0.1` for all that have such an option."""
    options: dict[str, dict[str, Any]] = {}
    for setting in settings:
        target, dot, _ = setting.partition("=")[0].rpartition(".")
        text = setting[len(target) + len(dot) :]
        option = text.partition("=")[0].strip()
        having = [name for name in names if name in METHODS and hasattr(METHODS[name].Config(), option)]
        chosen = [target] if dot else having
        if not chosen:
            raise ValueError(f"no method has an option {option!r} (--set {setting})")
        for name in chosen:
            options.setdefault(name, {}).update(parse_settings(name, [text]))
    return options


def _methods(text: str) -> tuple[list[str], dict[str, Variant]]:
    """`cafe,tent(lr=0.1,every=2)`: the rows of the table, and what the rows with options stand for."""
    labels = [part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip()]
    variants: dict[str, Variant] = {}
    for label in labels:
        if (match := re.fullmatch(r"([^()]+)\((.+)\)", label)) is not None:
            name = match[1].strip()
            variants[label] = name, parse_settings(name, match[2].split(","))
    return labels, variants


def _mode(text: str | None) -> Mode | None:
    if text not in (None, "online", "offline"):
        raise ValueError(f"expected --mode to be online or offline, but got {text!r}")
    return text  # type: ignore[return-value]


def _number(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"expected --sweep to be whole numbers with commas, such as 8,32,128, but got {text!r}")
    return int(text)


def _show_episodes(chosen: Experiment) -> None:
    from cafe_tta import data

    images = data.load(chosen.base.data)
    table = Table("protocol", "seed", "episode", "images", "hash", "domains", box=None)
    for part in chosen.parts:
        for seed in chosen.seeds:
            for episode in chosen.episodes(part.protocol, seed, len(images)):
                facts = describe(episode)
                domains = ", ".join(f"{name} {count}" for name, count in facts["domains"].items())
                table.add_row(part.protocol, str(seed), episode.name, str(len(episode)), facts["digest"], domains)
    show_table(table)


def _listing(base: Base, options: SourceOptions) -> Table:
    """Every experiment, with the time it takes on this machine for the data set that was named."""
    import tempfile

    from cafe_tta import data
    from cafe_tta.bench import estimate

    table = Table("experiment", "shows", "data sets", f"{base.name}, 3 seeds", box=None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = SourceSide(base, Path(folder), options, say)
            cost = estimate.measure(source.classifier, source.preprocessing.size)
        count = len(data.load(base.data))
        costs = {
            name: _duration(estimate.seconds(experiment(name, base), cost, count))
            for name, kind in KINDS.items()
            if base.name in kind.bases
        }
        say(f"measured: {1000 * cost.forward:.2f} ms an image forward, {1000 * cost.step:.2f} ms a step")
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        say(f"note: no costs for {base.name}: {error}")
        costs = {}
    for name, kind in KINDS.items():
        table.add_row(name, kind.shows, ", ".join(kind.bases), costs.get(name, "-"))
    return table


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
