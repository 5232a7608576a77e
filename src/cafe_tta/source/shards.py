"""Statistics of source images in parts: shards in files, or the parts of ranks, merged into the whole.

A part consists of whole batches, so that its features are, bit for bit, those that one process would compute. Every
part knows the whole it belongs to: parts of another whole, duplicate parts and missing parts are refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cafe_tta import data, storage
from cafe_tta.classifier import describe_difference
from cafe_tta.distributed import Job
from cafe_tta.source.stats import FORMAT_VERSION, FeatureStats

_WORDS = {"data": "other images"}  # for differences
# What ranks send.
_KINDS = {
    "mean": torch.float64,
    "cov": torch.float64,
    "sample": torch.float32,
    "keys": torch.float32,
    "batch_mode": torch.float32,
}


@dataclass(frozen=True)
class Part:
    """The statistics of a part of the source images; None where it has no images."""

    stats: FeatureStats | None
    meta: Mapping[str, Any]  # identity of the classifier; in a file, also which part of which whole this is
    unreadable: Sequence[data.Unreadable] = ()


@dataclass(frozen=True)
class Shard:
    """One of several parts, counted from 1.

    >>> Shard.parse("2/8")
    Shard(number=2, count=8)
    """

    number: int
    count: int

    @staticmethod
    def parse(text: str) -> "Shard":
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ValueError(f"expected a shard such as 1/8, 2/8, … 8/8, but got {text!r}")
        return Shard(int(number), int(count))


class Merged(NamedTuple):
    """Statistics of a whole data set."""

    stats: FeatureStats
    unreadable: int  # images that could not be read
    note: str = ""  # what could not be checked


def bounds(total: int, batch_size: int, number: int, of: int) -> tuple[int, int]:
    """First and last offset of a part: whole batches, divided evenly; `number` counts from 0.

    >>> [bounds(10, 4, number, 2) for number in (0, 1)], [bounds(3, 4, number, 2) for number in (0, 1)]
    ([(0, 4), (4, 10)], [(0, 0), (0, 3)])
    """
    batches = -(-total // batch_size)
    return tuple(min(total, batch_size * (batches * edge // of)) for edge in (number, number + 1))  # type: ignore[return-value]


# Files


def save(path: Path, part: Part, whole: Mapping[str, Any], shard: Shard) -> int:
    """Writes a part to a file, to be merged with the others later. Returns its size in bytes."""
    known = {"number": shard.number, "of": shard.count, "whole": whole, "unreadable": len(part.unreadable)}
    if part.stats is not None:
        return replace(part.stats, meta={**part.stats.meta, "shard": known}).save(path)
    meta = {**part.meta, "shard": known, "count": 0}
    return storage.write(path, "feature-stats", FORMAT_VERSION, {}, meta)


def merge_files(paths: Sequence[Path]) -> Merged:
    """Statistics of the whole, from files of all its parts."""
    metas, digests = [], []
    for path in paths:  # all are checked before any is merged, and one at a time is in memory
        part = _load(path)
        metas.append(part.meta)
        digests.append("" if part.stats is None else _digest(part.stats))
    shards = [meta["shard"] for meta in metas if "shard" in meta]
    order = list(range(len(paths)))
    if shards and len(shards) < len(paths):
        numbered = ["shard" in meta for meta in metas]
        raise ValueError(
            f"{paths[numbered.index(True)]} is a numbered shard, but {paths[numbered.index(False)]} is not; "
            "merge the numbered ones into a file of feature statistics first, then that file with the others"
        )
    note = ""
    if shards:
        _check_numbers(shards, paths)
        order.sort(key=lambda index: int(shards[index]["number"]))
    else:
        note = _check_unnumbered(digests, paths)
    merged = _merged((_load(paths[index]) for index in order), [str(paths[index]) for index in order])
    if merged is None:
        raise ValueError("expected at least one source image, but all the shards are empty")
    meta = {name: value for name, value in merged.meta.items() if name != "shard"}
    return Merged(replace(merged, meta=meta), sum(shard["unreadable"] for shard in shards), note)


def _load(path: Path) -> Part:
    tensors, meta = storage.read(path, "feature-stats", FORMAT_VERSION)
    return Part(FeatureStats.from_file(tensors, meta) if meta["count"] else None, meta)


def _digest(stats: FeatureStats) -> str:
    return f"{stats.count} {storage.tensor_digest(stats.mean)} {storage.tensor_digest(stats.cov)}"


def _check_numbers(shards: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> None:
    first = shards[0]
    by_number: dict[int, Path] = {}
    for shard, path in zip(shards, paths, strict=True):
        if shown := storage.differences(first["whole"], shard["whole"], _WORDS):
            raise ValueError(f"{paths[0]} and {path} are not parts of the same whole: {shown}; make them again alike")
        if shard["of"] != first["of"]:
            raise ValueError(f"{paths[0]} is one of {first['of']} shards, but {path} is one of {shard['of']}")
        if shard["number"] in by_number:
            twice = by_number[shard["number"]]
            raise ValueError(f"shard {shard['number']}/{shard['of']} was given twice: {twice}, {path}")
        by_number[shard["number"]] = path
    if missing := [number for number in range(1, first["of"] + 1) if number not in by_number]:
        shown = ", ".join(f"{number}/{first['of']}" for number in missing[:10])
        raise ValueError(f"{len(missing)} of {first['of']} shards are missing: {shown}{', …' * (len(missing) > 10)}")


def _check_unnumbered(digests: Sequence[str], paths: Sequence[Path]) -> str:
    """Refuses identical files, which is all that can be checked without numbers; returns what stays unknown."""
    seen: dict[str, Path] = {}
    for digest, path in zip(digests, paths, strict=True):
        if digest in seen:
            raise ValueError(f"{seen[digest]} and {path} hold the same statistics: their images would count twice")
        seen[digest] = path
    if len(paths) < 2:
        return ""
    return (
        "these files do not say which images they are of: whether one is missing, or two share images, is not known; "
        "numbered shards are checked for it"
    )


# Ranks


def merge_ranks(job: Job, part: Part, whole: Mapping[str, Any]) -> Part | None:
    """Statistics of the whole, from the parts of all ranks: on rank 0. None on the others."""
    import torch.distributed as dist

    stats = part.stats
    tensors = {} if stats is None else {name: tensor.contiguous() for name, tensor in stats.tensors().items()}
    header = {
        "whole": whole,
        "meta": part.meta if stats is None else dict(stats.meta),
        "count": 0 if stats is None else stats.count,
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "unreadable": [[item.index, item.name, item.why] for item in part.unreadable],
    }
    job.publish(f"part {job.rank}", header)
    headers = [job.wait_for(f"part {rank}") for rank in range(job.world)]
    for rank, theirs in enumerate(headers):
        if shown := storage.differences(headers[0]["whole"], theirs["whole"], _WORDS):
            raise ValueError(f"rank {rank} does not see the same images as rank 0: {shown}")

    def receive() -> Iterator[Part]:
        yield part
        for rank, theirs in enumerate(headers[1:], start=1):
            received = {
                name: torch.zeros(shape, dtype=_KINDS[name.rpartition(".")[2]])
                for name, shape in theirs["shapes"].items()
            }
            for tensor in received.values():
                dist.recv(tensor, rank)
            meta = {**theirs["meta"], "count": theirs["count"]}
            yield Part(FeatureStats.from_file(received, meta) if received else None, meta)

    with job.process_group("gloo"):  # the sums are on the CPU, wherever the features were computed
        if job.rank:
            for tensor in tensors.values():
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
