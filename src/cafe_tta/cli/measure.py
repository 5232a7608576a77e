"""How far the target's features are from the source's, before and after adapting."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cafe_tta import data, losses, metrics
from cafe_tta.adapter import Adapter
from cafe_tta.classifier import SplitClassifier, evaluating
from cafe_tta.data.imageset import Labels
from cafe_tta.stats import FeatureStats, SourceStats


@dataclass(frozen=True)
class Measurement:
    """Before and after adapting, on the same images in evaluation mode. None where it cannot be known."""

    images: int
    alignment: tuple[float, float] | None
    frechet: tuple[float, float] | None
    accuracy: tuple[float, float] | None


def measure(
    classifier: SplitClassifier,
    adapter: Adapter,
    imageset: data.ImageSet,
    preprocessing: Any,
    *,
    count: int,
    seed: int,
    batch_size: int,
    stats: SourceStats | None,
    labels: Labels | None,
    workers: int = 0,
) -> Measurement:
    """Compares the classifier and the adapter on `count` images drawn at random. Nothing adapts."""
    order = np.random.default_rng(seed).permutation(len(imageset))[:count]
    features: tuple[list[Tensor], list[Tensor]] = ([], [])
    hits: tuple[list[Tensor], list[Tensor]] = ([], [])
    place = classifier.head.weight
    for batch in data.batches(imageset, batch_size, preprocessing, order=order, workers=workers):
        images = batch.images.to(place)
        with torch.no_grad(), evaluating(classifier):
            before = classifier.features_and_logits(images)
        truth = None if labels is None else torch.from_numpy(labels[batch.indices])
        for side, (found, logits) in enumerate((before, adapter.features_and_logits(images))):
            features[side].append(found.cpu())
            if truth is not None:
                hits[side].append((logits.argmax(1).cpu() == truth)[truth >= 0])
    joined = [torch.cat(part) for part in features]
    return Measurement(
        images=len(joined[0]),
        alignment=None if stats is None else _alignment(joined, stats, adapter),
        frechet=None if stats is None or stats.full_cov is None else _frechet(joined, stats),
        accuracy=_accuracy(hits),
    )


def _alignment(features: list[Tensor], stats: SourceStats, adapter: Adapter) -> tuple[float, float]:
    floor = getattr(adapter.config, "eigenvalue_floor", losses.EIGENVALUE_FLOOR)
    before, after = (losses.alignment(part, stats, floor).item() for part in features)
    return before, after


def _frechet(features: list[Tensor], stats: SourceStats) -> tuple[float, float]:
    assert stats.full_cov is not None
    targets = [FeatureStats.from_features(part) for part in features]
    before, after = (metrics.frechet_distance(stats.mean, stats.full_cov, t.mean, t.cov) for t in targets)
    return before, after


def _accuracy(hits: tuple[list[Tensor], list[Tensor]]) -> tuple[float, float] | None:
    if not hits[0] or not sum(map(len, hits[0])):
        return None
    before, after = (torch.cat(part).double().mean().item() for part in hits)
    return before, after
