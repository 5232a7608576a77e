"""How far the target's features are from the source's, before and after adapting."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cafe_tta import data, losses, metrics
from cafe_tta.adapter import Adapter
from cafe_tta.classifier import SplitClassifier, evaluating
from cafe_tta.cli.console import counted
from cafe_tta.data.imageset import Labels
from cafe_tta.gaussians import EIGENVALUE_FLOOR
from cafe_tta.normalisation import batchnorm_layers
from cafe_tta.source.stats import FeatureStats, SourceStats


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
    for batch in data.Loader(imageset, preprocessing, batch_size, order=order, workers=workers).batches():
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
    floor = getattr(adapter.config, "eigenvalue_floor", EIGENVALUE_FLOOR)
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


# What the user should know of a short run

MUCH_SOURCE = 0.35  # of BatchNorm's running statistics, after 10 batches with the usual momentum of 0.1


@dataclass(frozen=True)
class Followed:
    """How far BatchNorm's running statistics have followed the images."""

    batches: int
    source_share: float  # weight that the statistics of the source still have in them


def batchnorm_counts(adapter: Adapter) -> list[int]:
    """Batches that each BatchNorm layer with running statistics has seen, from its training on."""
    return [int(layer.num_batches_tracked) for layer in _tracking(adapter)]


def followed(adapter: Adapter, counts_before: list[int]) -> Followed | None:
    """What adapting made of the running statistics, as BatchNorm counts; None where they do not follow batches."""
    shares, most = [], 0
    for layer, before in zip(_tracking(adapter), counts_before, strict=True):
        batches = int(layer.num_batches_tracked) - before
        if batches > 0:
            most = max(most, batches)
            # Without a momentum, the running statistics are the average of all batches.
            shares.append(before / (before + batches) if layer.momentum is None else (1 - layer.momentum) ** batches)
    return Followed(most, max(shares)) if shares else None


def notes(
    measurement: Measurement | None, follow: Followed | None, *, online: bool, adapter: Adapter, images: int
) -> list[str]:
    """What was measured, or is known, to speak against the model in evaluation mode; and what can be done."""
    rise = None if measurement is None else _rise(measurement.alignment)
    short = follow is not None and follow.source_share > MUCH_SOURCE
    if follow is None or not short:
        return [f"the alignment loss of the model in evaluation mode {rise}"] if rise else []
    share = f"{follow.source_share:.0%} the source's after {counted(follow.batches, 'batch', 'batches')}"
    if rise:
        text = f"the alignment loss of the model in evaluation mode {rise}; "
        text += f"BatchNorm's running statistics, which it uses, are still {share}"
    elif not online:
        text = f"--offline answers with BatchNorm's running statistics, which are still {share}"
    else:
        return []
    smaller = 2 ** (max(images // 10, 1).bit_length() - 1)  # makes at least 10 batches
    advice = []
    if 8 <= smaller < adapter.config.batch_size:
        advice.append(f"--batch-size {smaller} would make {images // smaller} batches of these images")
    if getattr(adapter.config, "answer", "before") != "after-eval":
        advice.append(
            "the answers given online with a step do not use them"
            if online
            else "--online answers do not use them: they normalise with the batch"
        )
    return ["; ".join([text, *advice])]


def _rise(pair: tuple[float, float] | None) -> str:
    if pair is None:
        return ""
    before, after = (f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in pair)
    return f"rose from {before} to {after}" if pair[1] > pair[0] and before != after else ""


def _tracking(adapter: Adapter) -> list[Any]:
    return [layer for layer in batchnorm_layers(adapter) if layer.num_batches_tracked is not None]
