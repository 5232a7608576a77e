"""Images of a set in batches, ready for a classifier, and their labels in the classifier's numbers."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from cafe_tta.data.imageset import Images, ImageSet, Labels, Unreadable, UnreadableImage

Advance = Callable[[int], None]  # moves a progress bar on


@dataclass(frozen=True)
class Batch:
    """Images with their indices in the set."""

    images: Tensor  # (B, 3, S, S) preprocessed, or (B, H, W, 3) uint8 without a preprocessing
    indices: Labels  # (B,)
    names: tuple[str, ...]
    consumed: int  # images of the order that were read up to the last of these: where to start after a stop


class Loader:
    """The images of a set, `batch_size` at a time, as often as it is iterated over; the last batch may be smaller.

    Every image is preprocessed by itself, so images may differ in size. Those that cannot be read are listed in
    `unreadable`, and the batch is filled up with the next ones. `order` says which images come, and when. `workers`
    threads read ahead, by one batch; the result does not depend on their number. `advance` is called with the number
    of images that were read, after each batch.

    >>> from cafe_tta import data, models
    >>> preprocessing = models.Preprocessing(32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    >>> digits = data.load("digits:test")
    >>> images, labels = next(iter(Loader(digits, preprocessing, 64, labels=digits.labels)))
    >>> images.shape, labels.shape
    (torch.Size([64, 3, 32, 32]), torch.Size([64]))
    """

    def __init__(
        self,
        imageset: ImageSet,
        preprocessing: Callable[[Images], Tensor] | None = None,
        batch_size: int = 256,
        *,
        order: Sequence[int] | Labels | None = None,
        labels: Labels | None = None,
        workers: int = 0,
        advance: Advance = lambda amount: None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"expected `batch_size` to be at least 1, but got {batch_size}")
        if workers < 0:
            raise ValueError(f"expected `workers` to be at least 0, but got {workers}")
        self.imageset, self.preprocessing, self.batch_size = imageset, preprocessing, batch_size
        self.order = [int(index) for index in (range(len(imageset)) if order is None else order)]
        self.labels, self.workers, self.advance = labels, workers, advance
        self.unreadable: list[Unreadable] = []  # of the last pass

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        """Images alone, or (images, labels) where the loader has labels."""
        for batch in self.batches():
            yield batch.images if self.labels is None else (batch.images, torch.from_numpy(self.labels[batch.indices]))

    def batches(self, start: int = 0, unreadable: list[Unreadable] | None = None) -> Iterator[Batch]:
        """The batches with indices and names, from an offset in the order on, such as `consumed` of an earlier batch.

        Images that cannot be read are appended to the list `unreadable`, if there is one.
        """
        self.unreadable = [] if unreadable is None else unreadable
        images: list[Tensor] = []
        indices: list[int] = []
        advanced = start
        for consumed, (index, image) in enumerate(self._read_ahead(self.order[start:]), start + 1):
            if isinstance(image, Unreadable):
                self.unreadable.append(image)
            else:
                images.append(image)
                indices.append(index)
            if images and (len(images) == self.batch_size or consumed == len(self.order)):
                yield self._batch(images, indices, consumed)
                self.advance(consumed - advanced)
                images, indices, advanced = [], [], consumed

    def _read(self, index: int) -> Tensor | Unreadable:
        try:
            image = self.imageset.images([index])  # (1, H, W, 3) -> (1, 3, S, S)
            return torch.from_numpy(image) if self.preprocessing is None else self.preprocessing(image)
        except UnreadableImage as error:
            return Unreadable(index, self.imageset.item_name(index), str(error))
        except MemoryError:
            return Unreadable(index, self.imageset.item_name(index), "too large for the memory of this machine")

    def _read_ahead(self, order: Iterable[int]) -> Iterator[tuple[int, Tensor | Unreadable]]:
        if not self.workers:
            yield from ((index, self._read(index)) for index in order)
            return
        with ThreadPoolExecutor(self.workers) as pool:
            rest = iter(order)
            waiting = deque((index, pool.submit(self._read, index)) for index in islice(rest, self.batch_size))
            try:
                while waiting:
                    index, future = waiting.popleft()
                    waiting.extend((i, pool.submit(self._read, i)) for i in islice(rest, 1))
                    yield index, future.result()
            finally:
                for _, future in waiting:
                    future.cancel()

    def _batch(self, images: list[Tensor], indices: list[int], consumed: int) -> Batch:
        if len({image.shape for image in images}) > 1:
            name = self.imageset.name
            raise ValueError(f"{name} has images of different sizes; pass a preprocessing that makes them equal")
        names = tuple(self.imageset.item_name(index) for index in indices)
        return Batch(torch.cat(images), np.array(indices, dtype=np.int64), names, consumed)


def match_labels(imageset: ImageSet, classes: tuple[str, ...] | None, num_classes: int) -> tuple[Labels | None, str]:
    """Labels of the images in the model's numbers, -1 where unknown; or None, and why there are none.

    Class folders are matched by name, since their order says nothing: a target set rarely has every class.
    """
    labels, names = imageset.labels, imageset.classes
    if labels is None:
        return None, "no class folders or labels"
    if names is None:
        numbers = np.arange(max(int(labels.max()) + 1, num_classes))
        numbers[num_classes:] = -1
    elif len(names) == num_classes == 1000 and all(re.fullmatch(r"n\d{8}", name) for name in names):
        numbers = np.arange(num_classes)  # ImageNet's folders, whose order is that of its classes
    elif classes is not None:
        number_of = {name: number for number, name in enumerate(classes)}
        numbers = np.array([number_of.get(name, -1) for name in names])
    elif all(name.isdecimal() for name in names):
        numbers = np.array([int(name) if int(name) < num_classes else -1 for name in names])
    elif len(names) == num_classes:
        numbers = np.arange(num_classes)  # as many classes: their numbers are the model's
    else:
        there = "is 1 class" if len(names) == 1 else f"are {len(names)} classes"
        return None, f"there {there}, but the model has {num_classes}, without names"
    matched: Labels = numbers[labels].astype(np.int64)
    if (matched < 0).all():
        return None, "no class folder is called like a class of the model"
    return matched, ""
