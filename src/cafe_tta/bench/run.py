"""One run: an adapter meets a stream. The only place where labels are compared with answers."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cafe_tta.adapter import Adapter
from cafe_tta.bench.stream import Stream
from cafe_tta.gaussians import SourceGaussians
from cafe_tta.losses import alignment
from cafe_tta.metrics import FrechetReference
from cafe_tta.source.stats import FeatureStats

Mode = Literal["online", "offline"]
EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Outcome:
    """What came out of a run."""

    accuracy: float  # share of images answered right
    by_domain: dict[str, float]
    hits: Tensor  # (n,) bool, in the order of the stream
    online_hits: Tensor  # (n,) bool: of the answers given while adapting
    seconds: float  # of adapting and answering; making the images is not counted
    images: int
    steps: int
    refused: int
    frechet: float | None = None  # distance of the adapted features from the source's
    alignment: float | None = None  # loss of the adapted features

    @property
    def milliseconds_per_image(self) -> float:
        return 1000 * self.seconds / self.images


@dataclass(frozen=True)
class Reference:
    """What the features of a run are compared with. Made once for a classifier."""

    frechet: FrechetReference
    gaussians: SourceGaussians


def run(
    adapter: Adapter,
    stream: Stream,
    mode: Mode,
    reference: Reference | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Resets the adapter, shows it the stream once, and compares its answers with the labels.

    Online: the answers are those given while adapting. Offline: when the stream is over, every image is answered again
    in evaluation mode; only a method that `wants_more` sees the images more than once before that. `advance` is told
    how many images were dealt with. Where the stream is shared by several processes, each shows its adapter its part of
    every batch, answers whole batches in turns when the stream is over, and all of them come to the same outcome; the
    time is that of the slowest.
    """
    share = stream.share
    adapter.reset()
    online, seconds = [], 0.0
    for batch in stream.batches(adapter.config.batch_size):
        start = time.perf_counter()
        logits = adapter(batch.images)
        seconds += time.perf_counter() - start
        online.append(logits.argmax(1) == batch.labels)
        advance(len(batch.images))
    while mode == "offline" and adapter.wants_more():
        for batch in stream.batches(adapter.config.batch_size):
            if not adapter.wants_more():
                break
            start = time.perf_counter()
            adapter(batch.images)
            seconds += time.perf_counter() - start
    offline = []
    frechet = aligned = None
    if mode == "offline" or reference is not None:
        features = []
        for batch in stream.batches(EVALUATION_BATCH, in_turns=True):
            if not len(batch.images):  # another rank's turn
                features.append(torch.zeros(0, adapter.classifier.num_features))
                offline.append(torch.zeros(0, dtype=torch.bool))
                continue
            start = time.perf_counter()
            found, logits = adapter.features_and_logits(batch.images)
            seconds += (time.perf_counter() - start) if mode == "offline" else 0.0
            features.append(found)
            offline.append(logits.argmax(1) == batch.labels)
        if reference is not None:
            frechet, aligned = _distances(share.whole(features), reference)
    answered = share.whole(online)
    right = share.whole(offline) if mode == "offline" else answered
    return Outcome(
        accuracy=right.double().mean().item(),
        by_domain=_by_domain(right, stream),
        hits=right,
        online_hits=answered,
        seconds=max(share.all(seconds)),
        images=len(stream),
        steps=adapter.counters.steps,
        refused=adapter.counters.refused,
        frechet=frechet,
        alignment=aligned,
    )


def _by_domain(right: Tensor, stream: Stream) -> dict[str, float]:
    domain_of = torch.from_numpy(stream.episode.domain_of)
    present = [(number, domain) for number, domain in enumerate(stream.episode.domains) if (domain_of == number).any()]
    return {str(domain): right[domain_of == number].double().mean().item() for number, domain in present}


def _distances(features: Tensor, reference: Reference) -> tuple[float, float]:
    target = FeatureStats.from_features(features)
    return reference.frechet.distance(target.mean, target.cov), alignment(features, reference.gaussians).item()
