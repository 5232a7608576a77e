"""Copies in arrays: the layout of CIFAR-10-C, or for every domain a folder that `arrays:DIR` reads.

Blocks of images are made in any order, each in a hidden file of its own; once all blocks of an array are there, they
are joined.
"""

import io
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from cafe_tta import corruptions, storage
from cafe_tta.copies.job import Done, Job, is_done
from cafe_tta.data.imageset import Images

BLOCK_BYTES = 2**23


@dataclass(frozen=True)
class Block:
    """Some images of one domain."""

    corruption: str
    severity: int
    first: int  # rows of `chosen`
    last: int

    def path(self, job: Job) -> Path:
        return job.unfinished / f"{self.corruption}-{self.severity}-{self.first}.block"


class Arrays:
    """<corruption>.npy with the severities one after the other, or <corruption>-<severity>/images.npy."""

    def __init__(self) -> None:
        self._unfinished: Counter[Path] = Counter()  # blocks of every array that are still to be made

    def tasks(self, job: Job) -> Iterator[Block]:
        for path, domains in _targets(job):
            made = is_done(path)
            blocks = [block for domain in domains for block in _blocks(job, *domain)]
            if made:
                _remove(job, blocks)
                blocks = [Block(*domain, 0, len(job.chosen)) for domain in domains]
            self._unfinished[path] = 0 if made else len(blocks)
            yield from blocks

    def do(self, job: Job, task: Block) -> Done:
        copies = task.last - task.first
        if is_done(task.path(job)) or is_done(_target_of(job, task)[0]):
            return Done(copies)
        settings, indices = job.settings, job.chosen[task.first : task.last]
        images = job.imageset.images(indices.tolist())
        made = corruptions.corrupt(images, task.corruption, task.severity, settings.seed, settings.preset, indices)
        job.write(task.path(job), made.tobytes())
        return Done(copies)

    def finish(self, job: Job, task: Block) -> None:
        path, domains = _target_of(job, task)
        self._unfinished[path] -= 1
        if self._unfinished[path] == 0:
            blocks = [block for domain in domains for block in _blocks(job, *domain)]
            _write_labels(job, path.parent, len(domains))
            _join(job, path, blocks)
            _remove(job, blocks)

    def read(self, job: Job, row: int, corruption: str, severity: int) -> Images:
        path, domains = _target_of(job, Block(corruption, severity, 0, 0))
        offset = domains.index((corruption, severity)) * len(job.chosen)
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False)[offset + row])


def _targets(job: Job) -> list[tuple[Path, list[tuple[str, int]]]]:
    """The arrays to make, and the domains that are stacked in each."""
    settings = job.settings
    if settings.layout == "cifar-c":
        return [(job.output / f"{c}.npy", [(c, s) for s in settings.severities]) for c in settings.corruptions]
    return [(job.output / f"{c}-{s}" / "images.npy", [(c, s)]) for c, s in settings.domains]


def _target_of(job: Job, block: Block) -> tuple[Path, list[tuple[str, int]]]:
    return next(target for target in _targets(job) if (block.corruption, block.severity) in target[1])


@lru_cache(maxsize=4)
def _size(job: Job) -> tuple[int, int]:
    shape = job.imageset.images([int(job.chosen[0])]).shape
    return shape[1], shape[2]


def _blocks(job: Job, corruption: str, severity: int) -> Iterator[Block]:
    height, width = _size(job)
    rows = max(1, BLOCK_BYTES // (3 * height * width))
    for first in range(0, len(job.chosen), rows):
        yield Block(corruption, severity, first, min(first + rows, len(job.chosen)))


def _join(job: Job, path: Path, blocks: list[Block]) -> None:
    temporary = job.unfinished / f"{os.getpid()}.tmp"
    rows = sum(block.last - block.first for block in blocks)
    with temporary.open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (rows, *_size(job), 3)}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(block.path(job).read_bytes())
        file.flush()
        os.fsync(file.fileno())  # the blocks are removed next
    os.replace(temporary, path)


def _remove(job: Job, blocks: list[Block]) -> None:
    for block in blocks:
        block.path(job).unlink(missing_ok=True)


def _write_labels(job: Job, folder: Path, copies: int) -> None:
    folder.mkdir(exist_ok=True)
    if job.imageset.labels is not None and not is_done(folder / "labels.npy"):
        labels = np.tile(job.imageset.labels[job.chosen], copies)
        file = io.BytesIO()
        np.save(file, labels.astype(np.uint8) if labels.max() < 256 else labels)
        storage.write_bytes(folder / "labels.npy", file.getvalue())
    if job.settings.layout == "arrays" and job.settings.classes is not None:
        storage.write_bytes(folder / "classes.txt", ("\n".join(job.settings.classes) + "\n").encode())
