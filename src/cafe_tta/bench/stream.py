"""The images of an episode, corrupted, in batches, with what only the runner may know: labels and domains."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cafe_tta import corruptions
from cafe_tta.bench.protocols import Domain, Episode, Indices
from cafe_tta.data import CorruptedSet, ImageSet
from cafe_tta.distributed import Share
from cafe_tta.models import Preprocessing

LARGEST_IN_MEMORY = 2**30  # bytes of corrupted images that are kept; larger episodes are made again on each pass


@dataclass(frozen=True)
class StreamBatch:
    images: Tensor  # (B, 3, H, W), as the classifier wants them
    labels: Tensor  # (B,)
    domain_of: npt.NDArray[np.int64]  # (B,)


class Stream:
    """An episode over a data set. Gone through again, it gives the same images: of each batch, this process's share."""

    def __init__(
        self,
        images: ImageSet,
        episode: Episode,
        preprocessing: Preprocessing,
        corruption_preset: str = "cifar",
        corruption_seed: int = 0,
        share: Share | None = None,
    ) -> None:
        if images.labels is None:
            raise ValueError(f"{images.name} has no labels: there is nothing to measure an accuracy with")
        self.episode = episode
        self.share = share or Share()
        self._source = images
        self._labels = torch.from_numpy(np.asarray(images.labels)[episode.images])
        self._preprocessing = preprocessing
        self._preset = corruption_preset
        self._seed = corruption_seed
        self._kept: npt.NDArray[np.uint8] | None = None
        self._made = np.zeros(len(episode), dtype=bool)  # which of the kept images are there

    def __len__(self) -> int:
        return len(self.episode)

    def batches(self, batch_size: int, in_turns: bool = False) -> Iterator[StreamBatch]:
        """All batches: of each, this process's part; or, in turns, whole batches, and nothing of the others'."""
        deal = self.share.turn if in_turns else self.share.part
        for number, start in enumerate(range(0, len(self.episode), batch_size)):
            part = deal(number, start, min(start + batch_size, len(self.episode)))
            images = self._preprocessing(self._corrupted(part))
            yield StreamBatch(images, self._labels[part], self.episode.domain_of[part])

    def _corrupted(self, part: slice) -> npt.NDArray[np.uint8]:
        if part.start == part.stop:  # more ranks than images in this batch
            return np.empty((0, self._preprocessing.size, self._preprocessing.size, 3), dtype=np.uint8)
        if self._kept is None:
            first = self._corrupt(slice(0, 1))
            if first.nbytes * len(self.episode) > LARGEST_IN_MEMORY:
                return self._corrupt(part)
            self._kept = np.empty((len(self.episode), *first.shape[1:]), dtype=np.uint8)
        if not self._made[part].all():
            wanted = slice(None) if self.share.ranks == 1 else part
            self._kept[wanted] = self._corrupt(wanted)
            self._made[wanted] = True
        return self._kept[part]

    def _corrupt(self, part: slice) -> npt.NDArray[np.uint8]:
        numbers, domain_of = self.episode.images[part], self.episode.domain_of[part]
        parts = [(np.flatnonzero(domain_of == i), domain) for i, domain in enumerate(self.episode.domains)]
        made = [(own, self._domain(numbers[own], domain)) for own, domain in parts if len(own)]
        result = np.empty((len(numbers), *made[0][1].shape[1:]), dtype=np.uint8)
        for own, images in made:
            result[own] = images
        return result

    def _domain(self, numbers: Indices, domain: Domain) -> npt.NDArray[np.uint8]:
        """Images of one domain: read, where the data set has them corrupted already, or corrupted here."""
        if domain.severity and isinstance(self._source, CorruptedSet):
            return self._source.corrupted(numbers.tolist(), domain.corruption, domain.severity)
        clean = self._source.images(numbers.tolist())
        if not domain.severity:
            return clean
        return corruptions.corrupt(
            clean, domain.corruption, severity=domain.severity, seed=self._seed, preset=self._preset, indices=numbers
        )
