"""Parts of a set of source images: which images are in one, and their statistics, put together from files or ranks.

A part is made of whole batches, so that its features are, bit for bit, those that one process would compute. The parts
know what the whole is; those of another whole, one that comes twice and one that is missing are refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cafe_tta import data, storage
from cafe_tta.classifier import describe_difference
from cafe_tta.cli.console import say
from cafe_tta.distributed import Job
from cafe_tta.source.stats import FORMAT_VERSION, FeatureStats

# What ranks send, in this order.
_TENSORS = (("mean", torch.float64), ("cov", torch.float64), ("sample", torch.float32), ("keys", torch.float32))


@dataclass(frozen=True)
class Part:
    """The statistics of a part of the source images: None where it has no images."""

    stats: FeatureStats | None
    meta: Mapping[str, Any]  # of the classifier; of a file also which part it is, and of what
    unreadable: Sequence[data.Unreadable] = ()


def parse(text: str) -> tuple[int, int]:
    """Number and count of shards.

    >>> parse("2/8")
    (2, 8)
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"expected --shard to be such as 1/8, 2/8, … 8/8, but got {text!r}")
    return int(number), int(count)


def bounds(total: int, batch_size: int, number: int, of: int) -> tuple[int, int]:
    """Where a part begins and ends: whole batches, shared out evenly; `number` counts from 0.

    >>> [bounds(10, 4, number, 2) for number in (0, 1)], [bounds(3, 4, number, 2) for number in (0, 1)]
    ([(0, 4), (4, 10)], [(0, 0), (0, 3)])
    """
    batches = -(-total // batch_size)
    return tuple(min(total, batch_size * (batches * place // of)) for place in (number, number + 1))  # type: ignore[return-value]


# Files


def save(path: Path, part: Part, whole: Mapping[str, Any], number: int, of: int) -> int:
    """Writes a part to a file, to be merged with the others later. Returns its size in bytes."""
    shard = {"number": number, "of": of, "whole": whole, "unreadable": len(part.unreadable)}
    if part.stats is not None:
        return replace(part.stats, meta={**part.stats.meta, "shard": shard}).save(path)
    meta = {**part.meta, "shard": shard, "count": 0}
    return storage.write(path, "feature-stats", FORMAT_VERSION, {}, meta)


def merge_files(paths: Sequence[Path]) -> tuple[FeatureStats, int]:
    """Statistics of the whole, from files of all its parts; and how many images could not be read."""
    metas, digests = [], []
    for path in paths:  # all are looked at before any is merged, and one at a time is in memory
        part = _load(path)
        metas.append(part.meta)
        digests.append("" if part.stats is None else _digest(part.stats))
    shards = [meta["shard"] for meta in metas if "shard" in meta]
    order = list(range(len(paths)))
    if shards and len(shards) < len(paths):
        numbered = ["shard" in meta for meta in metas]
        raise ValueError(
            f"{paths[numbered.index(True)]} is a numbered shard, but {paths[numbered.index(False)]} is not; "
            "merge the numbered ones first, with --feature-stats FILE, then that file with the others"
        )
    if shards:
        _check_numbers(shards, paths)
        order.sort(key=lambda place: int(shards[place]["number"]))
    else:
        _check_unnumbered(digests, paths)
    merged = _merged((_load(paths[place]) for place in order), [str(paths[place]) for place in order])
    if merged is None:
        raise ValueError("expected at least one source image, but all the shards are empty")
    meta = {name: value for name, value in merged.meta.items() if name != "shard"}
    return replace(merged, meta=meta), sum(shard["unreadable"] for shard in shards)


def _load(path: Path) -> Part:
    tensors, meta = storage.read(path, "feature-stats", FORMAT_VERSION)
    return Part(FeatureStats.from_file(tensors, meta) if meta["count"] else None, meta)


def _digest(stats: FeatureStats) -> str:
    return f"{stats.count} {storage.tensor_digest(stats.mean)} {storage.tensor_digest(stats.cov)}"


def _check_numbers(shards: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> None:
    first = shards[0]
    places: dict[int, Path] = {}
    for shard, path in zip(shards, paths, strict=True):
        if shown := _differences(first["whole"], shard["whole"]):
            raise ValueError(f"{paths[0]} and {path} are not parts of the same whole: {shown}; make them again alike")
        if shard["of"] != first["of"]:
            raise ValueError(f"{paths[0]} is one of {first['of']} shards, but {path} is one of {shard['of']}")
        if shard["number"] in places:
            raise ValueError(f"shard {shard['number']}/{shard['of']} comes twice: {places[shard['number']]}, {path}")
        places[shard["number"]] = path
    if missing := [number for number in range(1, first["of"] + 1) if number not in places]:
        shown = ", ".join(f"{number}/{first['of']}" for number in missing[:10])
        raise ValueError(f"{len(missing)} of {first['of']} shards are missing: {shown}{', …' * (len(missing) > 10)}")


def _check_unnumbered(digests: Sequence[str], paths: Sequence[Path]) -> None:
    """Files of sets of their own do not say which images they are of; but the same images twice show."""
    seen: dict[str, Path] = {}
    for digest, path in zip(digests, paths, strict=True):
        if digest in seen:
            raise ValueError(f"{seen[digest]} and {path} hold the same statistics: their images would count twice")
        seen[digest] = path
    if len(paths) > 1:
        say(
            "note: these files do not say which images they are of: whether one is missing, or two share images, "
            "is not known; of files made with --shard it is"
        )


# Ranks


def merge_ranks(job: Job, part: Part, whole: Mapping[str, Any]) -> Part | None:
    """Statistics of the whole, from the parts of all ranks: on rank 0. None on the others."""
    import torch.distributed as dist

    stats = part.stats
    found = () if stats is None else (stats.mean, stats.cov, stats.sample, stats.keys)
    tensors = [tensor.contiguous() for tensor in found if tensor is not None]
    header = {
        "whole": whole,
        "meta": part.meta,
        "count": 0 if stats is None else stats.count,
        "shapes": [list(tensor.shape) for tensor in tensors],
        "unreadable": [[item.index, item.name, item.why] for item in part.unreadable],
    }
    job.publish(f"part {job.rank}", header)
    headers = [job.wait_for(f"part {rank}") for rank in range(job.world)]
    for rank, theirs in enumerate(headers):
        if shown := _differences(headers[0]["whole"], theirs["whole"]):
            raise ValueError(f"rank {rank} does not see the same images as rank 0: {shown}")

    def receive() -> Iterator[Part]:
        yield part
        for rank, theirs in enumerate(headers[1:], start=1):
            received = {
                name: torch.zeros(shape, dtype=kind)
                for (name, kind), shape in zip(_TENSORS, theirs["shapes"], strict=False)
            }
            for tensor in received.values():
                dist.recv(tensor, rank)
            meta = {**theirs["meta"], "count": theirs["count"]}
            yield Part(FeatureStats.from_file(received, meta) if received else None, meta)

    with job.process_group("gloo"):  # the sums are on the CPU, wherever the features were computed
        if job.rank:
            for tensor in tensors:
                dist.send(tensor, 0)
            return None
        merged = _merged(receive(), [f"rank {rank}" for rank in range(job.world)])
    if merged is None:
        raise ValueError("expected at least one source image, but no rank could read any")
    return Part(merged, part.meta, [data.Unreadable(*item) for theirs in headers for item in theirs["unreadable"]])


def _merged(parts: Iterable[Part], names: Sequence[str]) -> FeatureStats | None:
    """One after the other, so that no more than two are in memory; None where all are empty."""
    merged: FeatureStats | None = None
    first: Mapping[str, Any] | None = None
    for part, name in zip(parts, names, strict=True):
        first = part.meta if first is None else first
        if difference := describe_difference(first, part.meta):
            raise ValueError(f"{names[0]} and {name} do not belong to the same classifier: {difference}")
        if part.stats is not None:
            merged = part.stats if merged is None else FeatureStats.merge(merged, part.stats)
    return merged


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    words = {"data": "other images"}
    return ", ".join(
        words.get(name, f"{name} is {theirs.get(name)!r} there, {ours.get(name)!r} here") for name in names
    )
