"""Images of a set in batches, ready for a classifier. Images that cannot be read are listed and left out."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from cafe_tta.data.imageset import Images, ImageSet, Labels, Unreadable, UnreadableImage


@dataclass(frozen=True)
class Batch:
    """Images with their places in the set."""

    images: Tensor  # (B, 3, S, S) preprocessed, or (B, H, W, 3) uint8 without a preprocessing
    indices: Labels  # (B,)
    names: tuple[str, ...]
    consumed: int  # how much of the order was gone through up to the last image: where to go on after a stop


def batches(
    imageset: ImageSet,
    batch_size: int,
    preprocessing: Callable[[Images], Tensor] | None = None,
    *,
    order: Sequence[int] | Labels | None = None,
    start: int = 0,
    unreadable: list[Unreadable] | None = None,
    workers: int = 0,
) -> Iterator[Batch]:
    """The images of a set, `batch_size` at a time; the last batch may be smaller.

    Every image is preprocessed by itself, so images may differ in size. Those that cannot be read are appended to
    `unreadable`, and the batch is filled up with the next ones. `order` says which images come, and when; `start`
    passes over its beginning. `workers` threads read ahead, by one batch; the result does not depend on their number.
    """
    if batch_size < 1:
        raise ValueError(f"expected `batch_size` to be at least 1, but got {batch_size}")
    if workers < 0:
        raise ValueError(f"expected `workers` to be at least 0, but got {workers}")
    places = [int(i) for i in (range(len(imageset)) if order is None else order)]
    left_out = [] if unreadable is None else unreadable
    prepare = torch.from_numpy if preprocessing is None else preprocessing

    def read(index: int) -> Tensor | Unreadable:
        try:
            return prepare(imageset.images([index]))  # (1, H, W, 3) -> (1, 3, S, S)
        except UnreadableImage as error:
            return Unreadable(index, imageset.item_name(index), str(error))
        except MemoryError:
            return Unreadable(index, imageset.item_name(index), "too large for the memory of this machine")

    images: list[Tensor] = []
    indices: list[int] = []
    consumed = start
    for index, found in _read_ahead(read, places[start:], batch_size, workers):
        consumed += 1
        if isinstance(found, Unreadable):
            left_out.append(found)
            continue
        images.append(found)
        indices.append(index)
        if len(images) == batch_size:
            yield _batch(imageset, images, indices, consumed)
            images, indices = [], []
    if images:
        yield _batch(imageset, images, indices, consumed)


def _read_ahead(
    read: Callable[[int], Tensor | Unreadable], places: Iterable[int], depth: int, workers: int
) -> Iterator[tuple[int, Tensor | Unreadable]]:
    if not workers:
        yield from ((index, read(index)) for index in places)
        return
    with ThreadPoolExecutor(workers) as pool:
        rest = iter(places)
        waiting = deque((index, pool.submit(read, index)) for index in islice(rest, depth))
        try:
            while waiting:
                index, future = waiting.popleft()
                waiting.extend((i, pool.submit(read, i)) for i in islice(rest, 1))
                yield index, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _batch(imageset: ImageSet, images: list[Tensor], indices: list[int], consumed: int) -> Batch:
    if len({image.shape for image in images}) > 1:
        raise ValueError(f"{imageset.name} has images of different sizes; pass a preprocessing that makes them equal")
    names = tuple(imageset.item_name(index) for index in indices)
    return Batch(torch.cat(images), np.array(indices, dtype=np.int64), names, consumed)
