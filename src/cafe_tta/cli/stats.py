"""`cafe-tta stats`: what the methods need from the source domain, computed at the training site."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cafe_tta import data, models
from cafe_tta.cli.console import progress, readable_bytes, say, say_unreadable, show_facts
from cafe_tta.cli.flags import TimeoutOption, command
from cafe_tta.data.options import DataOptions
from cafe_tta.distributed import torchrun_job, torchrun_share
from cafe_tta.distributed.job import HEARTBEAT_TIMEOUT
from cafe_tta.models import ModelOptions
from cafe_tta.options import Options, option
from cafe_tta.source import SOURCES, FeatureStats, ImageRecord
from cafe_tta.source.groups import dead_dims
from cafe_tta.source.make import SourceImages, SourceOptions
from cafe_tta.source.shards import Merged, Shard, merge_files
from cafe_tta.source.shards import save as save_shard

_PARTS = "Many machines"
_KINDS = ", ".join(kind for kind, value in SOURCES.items() if value.file_kind)


@dataclass(frozen=True)
class StatsOptions(Options):
    """What `cafe-tta stats` computes, and where it is written."""

    output: Path | None = option(None, "File for what is computed: the `--source` of other commands.")
    kind: str = option("stats", f"What to compute: {_KINDS}. `cafe-tta methods` says which method needs what.")
    feature_stats: Path | None = option(
        None,
        "Also write the statistics before grouping, to --merge with those of other image sets.",
        panel=_PARTS,
    )
    shard: str | None = option(
        None,
        "Read only one part of the images, such as 2/8, and write a shard to --output. --merge needs all of them, 1/8 "
        "to 8/8.",
        panel=_PARTS,
        metavar="NUMBER/COUNT",
    )
    merge: bool = option(False, "Merge shards instead of reading images.", panel=_PARTS, flag="--merge")


@command("model", "data")
def stats(
    model: ModelOptions,
    images: DataOptions,
    options: SourceOptions,
    writing: StatsOptions,
    shards: Annotated[
        list[Path] | None, typer.Argument(help="Shards for --merge.", show_default=False, metavar="[SHARD]...")
    ] = None,
    histograms: Annotated[Path | None, typer.Option(hidden=True)] = None,  # now: --kind histograms --output FILE
    timeout: TimeoutOption = HEARTBEAT_TIMEOUT,
) -> None:
    """Compute what methods need from the source domain, once, at the training site: by default feature statistics.

    cafe-tta stats --model model.safetensors --data images/ --output stats.safetensors

    Many machines, one job: torchrun --nproc-per-node 4 -m cafe_tta stats ... divides the images between its processes; the result is that of one process.

    Many jobs: each writes a part with --shard 1/8 --output FILE; then cafe-tta stats --merge FILE... --output STATS. Files of different image sets, written with --feature-stats, are merged in the same way.
    """  # noqa: E501 - a line break here would be one in the help
    share = torchrun_share()
    shard = None if writing.shard is None else Shard.parse(writing.shard)
    _check_inputs(shards or [], model, images, writing)
    _check_shard(writing, options)
    if (writing.kind != "stats" or histograms) and (writing.shard or writing.merge or share or not writing.output):
        raise ValueError(
            "only statistics are made in parts; other kinds are made by one process that reads all the images, "
            "into --output FILE: without --shard, --merge and torchrun"
        )
    if writing.merge:
        if share is None or not share.rank:  # one process is enough
            _write_merged(merge_files(shards or []), options, writing)
        return None
    loaded, imageset = models.load_classifier(model), data.load(images.data)
    with nullcontext() if share is None else torchrun_job(timeout) as job:
        read = SourceImages(loaded, imageset, options, shard=shard, job=job, workers=images.workers)
        say(f"images are read at {loaded.preprocessing.describe()}")
        if writing.kind != "stats":
            return _write_value(read, writing.kind, writing.output)
        if histograms is not None:
            _write_value(read, "histograms", histograms)
        return _write_computed(read, writing)


def _write_merged(merged: Merged, options: SourceOptions, writing: StatsOptions) -> None:
    if merged.note:
        say(f"note: {merged.note}")
    _write_stats(merged.stats, merged.unreadable, options, writing)


def _write_computed(read: SourceImages, writing: StatsOptions) -> None:
    with progress("source features", read.total) as advance:
        part = read.feature_stats(advance)
    if part is None:
        return  # rank 0 has it all
    say_unreadable([*part.unreadable, *data.left_out(read.imageset)])
    if read.shard is not None and writing.output is not None:
        size = save_shard(writing.output, part, read.whole(), read.shard)
        count = 0 if part.stats is None else part.stats.count
        name = f"{writing.output}, shard {read.shard.number} of {read.shard.count}, {readable_bytes(size)}"
        show_facts([_images(count, len(part.unreadable)), ("written", name)])
        return
    if part.stats is None:
        raise ValueError("expected at least one source image, but the loader was empty")
    _write_stats(part.stats, len(part.unreadable), read.options, writing, read.model.classifier.num_bytes())


def _write_stats(
    stats: FeatureStats, unreadable: int, options: SourceOptions, writing: StatsOptions, model_bytes: int = 0
) -> None:
    if writing.feature_stats is not None:
        stats.save(writing.feature_stats)
    dead = int(dead_dims(stats.cov).sum())
    facts = [_images(stats.count, unreadable)]
    facts += _read_at(stats.images)
    facts += [("features", f"{len(stats.mean)}{f', of which {dead} hardly vary' if dead else ''}")]
    if writing.output is not None:
        source = options.group(stats)
        size = source.save(writing.output)
        share = f": {size / model_bytes:.1%} of the model's {readable_bytes(model_bytes)}" if model_bytes else ""
        facts.append(("groups", f"{len(source.groups)}, the widest of {source.widest_group} features"))
        facts.append(("written", f"{writing.output}, {readable_bytes(size)}{share}"))
    show_facts(facts + ([("before grouping", str(writing.feature_stats))] if writing.feature_stats else []))


def _write_value(read: SourceImages, kind: str, output: Path | None) -> None:
    assert output is not None
    with progress(kind, len(read.own)) as advance:
        value = read.value(kind, advance)
    written = ("written", f"{output}, {kind}, {readable_bytes(value.save(output))}")
    show_facts([("images", str(len(read.own))), *_read_at(value.images), written])


def _read_at(record: ImageRecord) -> list[tuple[str, str]]:
    classes = ("classes", f"{len(record.classes)}: {', '.join(record.classes[:5])}, …") if record.classes else None
    facts = [("read at", record.describe())] if record.preprocessing is not None else []
    return facts + ([classes] if classes else [])


def _images(count: int, unreadable: int) -> tuple[str, str]:
    return "images", f"{count}{f', {unreadable} unreadable left out' if unreadable else ''}"


def _check_inputs(shards: list[Path], model: ModelOptions, images: DataOptions, writing: StatsOptions) -> None:
    if writing.merge and (model.model or images.data or not shards or not (writing.output or writing.feature_stats)):
        raise ValueError("expected --merge with shard files and --output, and without --model and --data")
    if not writing.merge and shards:
        raise ValueError(f"expected files such as {shards[0]} only after --merge")
    if not writing.merge and not (model.model and images.data):
        raise ValueError("expected --model and --data (or --merge and shard files); see cafe-tta stats --help")
    if writing.output is None and writing.feature_stats is None:
        raise ValueError("expected --output FILE for the statistics, or --feature-stats FILE")
    for path in (writing.output, writing.feature_stats):  # now, not after an hour of reading images
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")


def _check_shard(writing: StatsOptions, options: SourceOptions) -> None:
    if writing.shard is not None and (writing.merge or writing.output is None or writing.feature_stats):
        raise ValueError("expected --shard with --output FILE for the shard, and without --merge and --feature-stats")
    if writing.shard is not None and (options.num_groups or options.full or options.max_group_size != 128):
        raise ValueError("a shard has no groups yet: give --num-groups, --max-group-size and --full to --merge")
