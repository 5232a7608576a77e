"""One run: an adapter meets the images of an episode. The only place where labels are compared with answers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cafe_tta import corruptions, metrics, stream
from cafe_tta.adapter import Adapter
from cafe_tta.bench.cost import Passes
from cafe_tta.bench.experiments import Mode
from cafe_tta.bench.pace import Clock
from cafe_tta.bench.protocols import Domain, Episode, Indices
from cafe_tta.classifier import SplitClassifier
from cafe_tta.data import CorruptedSet, ImageSet, Labels
from cafe_tta.display import Displayed
from cafe_tta.distributed import Share
from cafe_tta.models import Preprocessing
from cafe_tta.source import Reference

EVALUATION_BATCH = 256
LARGEST_IN_MEMORY = 2**30  # bytes of corrupted images that are kept; larger episodes are made again on each pass


@dataclass(frozen=True)
class StreamBatch:
    """Consecutive images of an episode, with their labels, which no adapter sees."""

    images: Tensor  # (B, 3, H, W), preprocessed for the classifier
    labels: Tensor  # (B,)


class Stream:
    """The corrupted images of an episode, in batches: the same on every pass; of each batch, this process's share."""

    def __init__(
        self,
        images: ImageSet,
        episode: Episode,
        preprocessing: Preprocessing,
        corruption_preset: str = "cifar",
        corruption_seed: int = 0,
        share: Share | None = None,
        labels: Labels | None = None,
    ) -> None:
        labels = images.labels if labels is None else labels
        if labels is None:
            raise ValueError(f"{images.name} has no labels: there is nothing to measure an accuracy with")
        self.episode = episode
        self.share = share or Share()
        self._source = images
        self._labels = torch.from_numpy(np.asarray(labels)[episode.images])
        self._preprocessing = preprocessing
        self._preset = corruption_preset
        self._seed = corruption_seed
        self._kept: npt.NDArray[np.uint8] | None = None
        self._made = np.zeros(len(episode), dtype=bool)  # which of the kept images are made

    def __len__(self) -> int:
        return len(self.episode)

    def batches(self, batch_size: int, in_turns: bool = False) -> Iterator[StreamBatch]:
        """All batches: of each, this process's part; or, in turns, whole batches, and nothing of the others'."""
        deal = self.share.turn if in_turns else self.share.part
        for number, start in enumerate(range(0, len(self.episode), batch_size)):
            part = deal(number, start, min(start + batch_size, len(self.episode)))
            yield StreamBatch(self._preprocessing(self._corrupted(part)), self._labels[part])

    def make(self) -> None:
        """Makes the images now, if they are kept: their memory is then not that of the first run."""
        if self.share.ranks == 1:
            self._corrupted(slice(0, 1))

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


@dataclass(frozen=True)
class Distance:
    """How far features are from the source's."""

    frechet: float | None = None
    alignment: float | None = None

    @staticmethod
    def of(features: Tensor, reference: Reference) -> "Distance":
        return Distance(reference.full_frechet(features), reference.alignment(features))


@dataclass(frozen=True, repr=False)
class Outcome(Displayed):
    """The result of a run."""

    accuracy: float  # share of images answered right
    by_domain: dict[str, float]
    hits: Tensor  # (n,) bool, in the order of the stream
    online_hits: Tensor  # (n,) bool: of the answers given while adapting
    seconds: float  # of adapting and answering; making the images is not counted
    images: int
    steps: int
    refused: int
    distance: Distance  # of the adapted features
    calibration_error: float | None  # of the answers that count; None where one of them is not a number
    forward: int  # images through the network: of all that `seconds` is the time of
    backward: int  # images through which a gradient came back

    def facts(self) -> Mapping[str, Any]:
        accuracy, time = f"{100 * self.accuracy:.2f} %", f"{self.seconds:.1f} s"
        return {"accuracy": accuracy, "images": self.images, "steps": self.steps, "refused": self.refused, "time": time}


def evaluate(
    adapter: Adapter,
    images: Stream,
    mode: Mode,
    reference: Reference | None = None,
    advance: Callable[[int], None] = lambda _: None,
    clock: Clock | None = None,
) -> Outcome:
    """Resets the adapter, shows it the stream once, and compares its answers with the labels.

    Online: the answers are those given while adapting. Offline: when the stream is over, every image is answered again
    in evaluation mode, unless the method works in `one_pass`; only one that `wants_more` sees the images more than once
    before that. `advance` is called with the number of images of each batch. Where the stream is shared by several
    processes, each shows its adapter its part of every batch, answers whole batches in turns when the stream is over,
    and all of them come to the same outcome; the time is that of the slowest. With a `clock`, the stream does not wait:
    see `bench.pace`.
    """
    share, batch_size = images.share, adapter.config.batch_size
    answers_again = mode == "offline" and not adapter.one_pass
    adapter.reset()
    passes = Passes(adapter)
    answers, online, seconds = _Answers(), _Answers(), 0.0
    with passes.counting():
        batches = images.batches(batch_size)
        for answered in stream.adapt(adapter, batches) if clock is None else clock.answers(adapter, batches):
            online.add(answered)
            seconds += answered.seconds
            advance(len(answered.logits))
        while mode == "offline" and adapter.wants_more():
            for answer in stream.adapt(adapter, images.batches(batch_size)):
                seconds += answer.seconds
                if not adapter.wants_more():
                    break
    distance = Distance()
    if answers_again or reference is not None:
        features = []
        with passes.counting() if answers_again else nullcontext():
            for evaluation in stream.evaluate(adapter, images.batches(EVALUATION_BATCH, in_turns=True)):
                answers.add(evaluation)
                features.append(evaluation.features)
                seconds += evaluation.seconds if answers_again else 0.0
        if reference is not None:
            distance = Distance.of(share.whole(features), reference)
    counted = answers if answers_again else online
    right, confidences = share.whole(counted.hits), share.whole(counted.confidences)
    return Outcome(
        accuracy=right.double().mean().item(),
        by_domain=_by_domain(right, images.episode),
        hits=right,
        online_hits=right if counted is online else share.whole(online.hits),
        seconds=max(share.all(seconds)),
        images=len(images),
        steps=adapter.counters.steps,
        refused=adapter.counters.refused,
        distance=distance,
        calibration_error=metrics.calibration_error(confidences, right) if confidences.isfinite().all() else None,
        forward=sum(share.all(passes.forward)),
        backward=sum(share.all(passes.backward)),
    )


def distance_before(classifier: SplitClassifier, images: Stream, reference: Reference) -> Distance:
    """How far the source classifier's own features are: where every method starts from."""
    passes = stream.evaluate(classifier, images.batches(EVALUATION_BATCH, in_turns=True))
    return Distance.of(images.share.whole([evaluation.features for evaluation in passes]), reference)


class _Answers:
    """Which answers were right, and how sure they were, batch by batch."""

    def __init__(self) -> None:
        self.hits: list[Tensor] = []
        self.confidences: list[Tensor] = []

    def add(self, answer: stream.Answer[StreamBatch] | stream.Evaluation[StreamBatch]) -> None:
        logits = answer.logits.detach().cpu()
        self.hits.append(logits.argmax(1) == answer.batch.labels)
        self.confidences.append(logits.double().softmax(1).amax(1))


def _by_domain(right: Tensor, episode: Episode) -> dict[str, float]:
    domain_of = torch.from_numpy(episode.domain_of)
    present = [(number, domain) for number, domain in enumerate(episode.domains) if (domain_of == number).any()]
    return {str(domain): right[domain_of == number].double().mean().item() for number, domain in present}
