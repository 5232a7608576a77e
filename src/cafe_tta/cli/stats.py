"""`cafe-tta stats`: what the deployment site needs to know of the source images."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cafe_tta import data
from cafe_tta.cli import inputs
from cafe_tta.cli import shards as parts
from cafe_tta.cli.console import progress, readable_bytes, show_facts
from cafe_tta.distributed import Job, Share, torchrun_job, torchrun_share
from cafe_tta.distributed.job import HEARTBEAT_TIMEOUT
from cafe_tta.source.groups import dead_dims
from cafe_tta.source.histograms import SourceHistograms
from cafe_tta.source.stats import FeatureStats


def stats(
    shards: Annotated[
        list[Path] | None, typer.Argument(help="Files to --merge.", show_default=False, metavar="[SHARD]...")
    ] = None,
    model: inputs.ModelOption = "",
    data_spec: inputs.DataOption = "",
    output: Annotated[
        Path | None, typer.Option(help="File for the statistics: what `cafe-tta adapt` takes.", show_default=False)
    ] = None,
    num_groups: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Groups of correlated features; else 128, or one for 16 features of a smaller model.",
            show_default=False,
        ),
    ] = None,
    max_group_size: Annotated[
        int, typer.Option(min=0, help="Wider groups are split: keep it below the batch size. 0: no limit.")
    ] = 128,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Keep the whole covariance too: larger, but `adapt` can tell the Fréchet distance."
        ),
    ] = False,
    feature_stats: Annotated[
        Path | None,
        typer.Option(help="Also write a shard, to --merge with those of other machines.", show_default=False),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help="Read only a part of the images, such as 2/8, and write a shard of the statistics to --output: for "
            "jobs that know nothing of each other. --merge then wants all the shards, 1/8 to 8/8.",
            show_default=False,
            metavar="NUMBER/COUNT",
        ),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Put shards together instead of reading images.")] = False,
    histograms: Annotated[
        Path | None, typer.Option(help="Also write what the method `fr` needs.", show_default=False)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read only so many images, drawn at random.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the grouping, and of --limit.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    workers: inputs.WorkersOption = 0,
    device: inputs.DeviceOption = "auto",
    weights: inputs.WeightsOption = None,
    num_classes: inputs.NumClassesOption = None,
    pretrained: inputs.PretrainedOption = False,
    image_size: inputs.ImageSizeOption = None,
    mean: inputs.MeanOption = None,
    std: inputs.StdOption = None,
    head: inputs.HeadOption = None,
    timeout: inputs.TimeoutOption = HEARTBEAT_TIMEOUT,
) -> None:
    """Compute mean, covariance and groups of the source features: once, at the training site.

    cafe-tta stats --model model.safetensors --data images/ --output stats.safetensors

    Many machines, one job: torchrun --nproc-per-node 4 -m cafe_tta stats ... shares the images out to its processes; the result is that of one process.

    Many jobs: each writes a part with --shard 1/8 --output FILE; then cafe-tta stats --merge FILE... --output STATS. Files of image sets of their own, written with --feature-stats, are merged in the same way.
    """  # noqa: E501 - a line break here would be one in the help
    own = torchrun_share()
    wanted = _Wanted(output, feature_stats, histograms, num_groups, max_group_size or None, seed, full)
    place = None if shard is None else parts.parse(shard)
    _check(shards or [], merge, model, data_spec, wanted)
    _check_parts(wanted, merge, place, own)
    if merge:
        if own is None or not own.rank:  # one process is enough
            found, unreadable = parts.merge_files(shards or [])
            _write(found, wanted, unreadable)
        return
    load = partial(
        inputs.load_model,
        model,
        weights=weights,
        num_classes=num_classes,
        pretrained=pretrained,
        image_size=image_size,
        mean=mean,
        std=std,
        head=head,
        device=device,
    )
    reading = _Reading(data_spec, batch_size, workers, limit, seed, place)
    if own is None:
        _read_and_write(load(), reading, wanted)
        return
    with torchrun_job(timeout) as job:
        _read_and_write(load(), reading, wanted, job)


@dataclass(frozen=True)
class _Wanted:
    """What is to be written."""

    output: Path | None
    feature_stats: Path | None
    histograms: Path | None
    num_groups: int | None
    max_group_size: int | None
    seed: int
    full: bool


@dataclass(frozen=True)
class _Reading:
    """What is to be read."""

    data: str
    batch_size: int
    workers: int
    limit: int | None
    seed: int
    place: tuple[int, int] | None  # which part of how many, counted from 1


def _read_and_write(chosen: inputs.Model, reading: _Reading, wanted: _Wanted, job: Job | None = None) -> None:
    imageset = data.load(reading.data)
    order = np.arange(len(imageset))
    if reading.limit is not None:
        # At random: the first images of class folders would all be of one class.
        order = np.sort(np.random.default_rng(reading.seed).permutation(len(imageset))[: reading.limit])
    start, stop = 0, len(order)
    if reading.place is not None:
        start, stop = parts.bounds(stop, reading.batch_size, reading.place[0] - 1, reading.place[1])
    total = stop - start
    if job is not None:
        start, stop = (start + edge for edge in parts.bounds(total, reading.batch_size, job.rank, job.world))
    own = order[start:stop]
    loader = inputs.Loader(imageset, chosen.preprocessing, reading.batch_size, order=own, workers=reading.workers)
    with progress("source features", total) as advance:
        loader.advance = advance
        if job is not None:
            job.on_progress, loader.advance = advance, job.advance
        stats = FeatureStats.fit_part(chosen.classifier, loader, start)
        part = parts.Part(stats, chosen.classifier.identity(), loader.unreadable)
        whole = {} if job is None and reading.place is None else _whole(chosen, reading, imageset, len(order))
        merged = part if job is None else parts.merge_ranks(job, part, whole)
        if job is not None:
            job.on_progress = None
    if merged is None:
        return  # rank 0 has it all
    if wanted.histograms is not None:
        with progress("histograms", 2 * len(order)) as loader.advance:
            SourceHistograms.fit(chosen.classifier, loader).save(wanted.histograms)
    inputs.say_unreadable(list(merged.unreadable))
    if reading.place is not None and wanted.output is not None:
        size = parts.save(wanted.output, merged, whole, *reading.place)
        count = 0 if merged.stats is None else merged.stats.count
        name = f"{wanted.output}, shard {reading.place[0]} of {reading.place[1]}, {readable_bytes(size)}"
        show_facts([_images(count, len(merged.unreadable)), ("written", name)])
        return
    if merged.stats is None:
        raise ValueError("expected at least one source image, but the loader was empty")
    _write(merged.stats, wanted, len(merged.unreadable), chosen.classifier.num_bytes())


def _whole(chosen: inputs.Model, reading: _Reading, imageset: data.ImageSet, images: int) -> dict[str, Any]:
    """What all parts have in common. Paths play no part: machines may keep their copies in different places."""
    drawn = None if reading.limit is None else reading.seed
    facts = {"data": imageset.digest(), "images": images, "batch_size": reading.batch_size, "seed": drawn}
    return facts | {"preprocessing": asdict(chosen.preprocessing)}


def _images(count: int, unreadable: int) -> tuple[str, str]:
    return "images", f"{count}{f', {unreadable} unreadable left out' if unreadable else ''}"


def _write(found: FeatureStats, wanted: _Wanted, unreadable: int, model_bytes: int = 0) -> None:
    if wanted.feature_stats is not None:
        found.save(wanted.feature_stats)
    dead = int(dead_dims(found.cov).sum())
    facts = [_images(found.count, unreadable)]
    facts += [("features", f"{len(found.mean)}{f', of which {dead} never vary' if dead else ''}")]
    if wanted.output is not None:
        source = found.group(
            wanted.num_groups, seed=wanted.seed, max_group_size=wanted.max_group_size, keep_full=wanted.full
        )
        size = source.save(wanted.output)
        share = f": {size / model_bytes:.1%} of the model's {readable_bytes(model_bytes)}" if model_bytes else ""
        facts.append(("groups", f"{len(source.groups)}, the widest of {source.widest_group} features"))
        facts.append(("written", f"{wanted.output}, {readable_bytes(size)}{share}"))
    facts += [("shard", str(wanted.feature_stats))] if wanted.feature_stats else []
    facts += [("histograms", str(wanted.histograms))] if wanted.histograms else []
    show_facts(facts)


def _check(shards: list[Path], merge: bool, model: str, data_spec: str, wanted: _Wanted) -> None:
    if merge and (model or data_spec or not shards or not (wanted.output or wanted.feature_stats)):
        raise ValueError("expected --merge with shard files and --output, and without --model and --data")
    if not merge and shards:
        raise ValueError(f"expected files such as {shards[0]} only after --merge")
    if not merge and not (model and data_spec):
        raise ValueError("expected --model and --data (or --merge and shard files); see cafe-tta stats --help")
    if wanted.output is None and wanted.feature_stats is None:
        raise ValueError("expected --output FILE for the statistics, or --feature-stats FILE for a shard of them")
    for path in (wanted.output, wanted.feature_stats, wanted.histograms):  # now, not after an hour of reading images
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")


def _check_parts(wanted: _Wanted, merge: bool, place: tuple[int, int] | None, own: Share | None) -> None:
    if place is not None and (merge or wanted.output is None or wanted.feature_stats):
        raise ValueError("expected --shard with --output FILE for the shard, and without --merge and --feature-stats")
    if place is not None and (wanted.num_groups or wanted.full):
        raise ValueError("a shard has no groups yet: give --num-groups and --full to --merge")
    if wanted.histograms is not None and (place is not None or own is not None or merge):
        raise ValueError(
            "--histograms are made by one process that reads all the images: without --shard, --merge and torchrun"
        )
