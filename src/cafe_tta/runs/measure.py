"""The model before and after adapting: distance of its features from the source, and accuracy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cafe_tta import data, stream
from cafe_tta.adapter import Adapter
from cafe_tta.classifier import SplitClassifier
from cafe_tta.data import Labels
from cafe_tta.judge import FEWEST, Judge
from cafe_tta.models import Model
from cafe_tta.normalisation import batchnorm_layers
from cafe_tta.runs.progress import Answers, answer_type, answers_of
from cafe_tta.source import Reference


@dataclass(frozen=True)
class Measurement:
    """Values before and after adapting, on the same images. None where they are not known."""

    images: int
    alignment: tuple[float, float] | None
    frechet: tuple[float, float] | None
    accuracy: tuple[float, float] | None
    drift: tuple[float, float] | None = None  # 1: like the source images
    group_frechet: tuple[float, float] | None = None  # the Fréchet distance summed over the feature groups
    like_source: bool | None = None  # whether the images look like the source images to the source model
    worse: str = ""  # why the adapted model is worse than the source model, as far as that shows without labels
    source_answers: Answers | None = None  # of the source model, without their probabilities

    def summary(self) -> dict[str, Any]:
        """As JSON."""
        pairs = {"alignment": self.alignment, "frechet_distance": self.frechet, "accuracy": self.accuracy}
        pairs |= {"drift": self.drift, "group_frechet_distance": self.group_frechet}
        named = {name: None if pair is None else {"before": pair[0], "after": pair[1]} for name, pair in pairs.items()}
        return {"images": self.images, **named}


def measure(
    model: Model,
    adapter: Adapter,
    imageset: data.ImageSet,
    *,
    count: int = 1024,
    seed: int = 0,
    reference: Reference | None = None,
    labels: Labels | None = None,
    workers: int = 0,
    among: Labels | None = None,
    as_answered: bool = False,
) -> Measurement:
    """Compares the model with its adapter on `count` images drawn at random. Nothing adapts.

    They are drawn from the images whose indices are `among`, or from all. The adapter is in evaluation mode, or
    normalises `as_answered`: with the batch, where it does so while it adapts.
    """
    order = np.random.default_rng(seed).permutation(len(imageset) if among is None else among)[:count]
    loader = data.Loader(imageset, model.preprocessing, adapter.config.batch_size, order=order, workers=workers)
    before = _evaluate(model.classifier, loader)
    after = _evaluate(adapter, loader, as_answered)
    judge = Judge(reference, model.classifier.num_classes, agree=True)
    figures = [judge.measure(passed.features, passed.logits) for passed in (before, after)]

    def pair(figure: Callable[[Tensor], float | None] | None) -> tuple[float, float] | None:
        return None if figure is None else _both(figure(before.features), figure(after.features))

    return Measurement(
        images=len(before.indices),
        alignment=pair(None if reference is None else reference.alignment),
        frechet=pair(None if reference is None else reference.full_frechet),
        accuracy=_both(_accuracy(before, labels), _accuracy(after, labels)),
        drift=pair(None if reference is None else reference.drift),
        group_frechet=pair(None if reference is None else reference.frechet),
        like_source=None if reference is None else reference.looks_like_source(before.features),
        worse=judge.worse(figures[1], figures[0], "the source model") if len(before.indices) >= FEWEST else "",
        source_answers=answers_of(before.indices, before.logits, answer_type()),
    )


def _both(before: float | None, after: float | None) -> tuple[float, float] | None:
    return None if before is None or after is None else (before, after)


@dataclass(frozen=True)
class _Passed:
    """The measured images after their pass."""

    indices: Labels
    features: Tensor
    logits: Tensor


def _evaluate(evaluated: Adapter | SplitClassifier, loader: data.Loader, as_answered: bool = False) -> _Passed:
    passed = list(stream.evaluate(evaluated, loader.batches(), as_answered))
    return _Passed(
        np.concatenate([answer.batch.indices for answer in passed]),
        torch.cat([answer.features.cpu() for answer in passed]),
        torch.cat([answer.logits.cpu() for answer in passed]),
    )


def _accuracy(passed: _Passed, labels: Labels | None) -> float | None:
    """The share of the labelled images that are classified correctly."""
    if labels is None:
        return None
    truth = torch.from_numpy(labels[passed.indices])
    hits = (passed.logits.argmax(1) == truth)[truth >= 0].double()
    return hits.mean().item() if len(hits) else None


# Remarks on a short run

MUCH_SOURCE = 0.35  # the source's share in BatchNorm's running statistics after 10 batches with momentum 0.1


@dataclass(frozen=True)
class Followed:
    """How far BatchNorm's running statistics have followed the images."""

    batches: int
    source_share: float  # weight of the source's statistics in them


def tracked_batches(adapter: Adapter) -> list[int]:
    """Batches that each BatchNorm layer with running statistics has seen, training included."""
    return [int(layer.num_batches_tracked) for layer in _tracking(adapter)]


def running_statistics_followed(adapter: Adapter, counts_before: list[int]) -> Followed | None:
    """How far the running statistics have moved since `tracked_batches`; None where they do not follow batches."""
    shares, most = [], 0
    for layer, before in zip(_tracking(adapter), counts_before, strict=True):
        batches = int(layer.num_batches_tracked) - before
        if batches > 0:
            most = max(most, batches)
            # Without a momentum, the running statistics are the average of all batches.
            shares.append(before / (before + batches) if layer.momentum is None else (1 - layer.momentum) ** batches)
    return Followed(most, max(shares)) if shares else None


def notes(measurement: Measurement | None, follow: Followed | None, *, adapter: Adapter, images: int) -> list[str]:
    """Warnings about the answers of the model in evaluation mode, with advice."""
    rise = None if measurement is None else _rise(measurement.alignment)
    if follow is None or follow.source_share <= MUCH_SOURCE:
        return [f"the alignment loss of the model in evaluation mode {rise}"] if rise else []
    batches = f"{follow.batches} {'batch' if follow.batches == 1 else 'batches'}"
    share = f"{follow.source_share:.0%} the source's after {batches}"
    text = f"offline answers use BatchNorm's running statistics, which are still {share}"
    if rise:
        text = f"the alignment loss of the model in evaluation mode {rise}; "
        text += f"BatchNorm's running statistics, which it uses, are still {share}"
    smaller = 2 ** (max(images // 10, 1).bit_length() - 1)  # makes at least 10 batches
    advice = ["online answers do not use them: they normalise with the batch"]
    if 8 <= smaller < adapter.config.batch_size:
        advice.insert(0, f"a batch size of {smaller} would make {images // smaller} batches of these images")
    return ["; ".join([text, *advice])]


def _rise(pair: tuple[float, float] | None) -> str:
    if pair is None:
        return ""
    before, after = (f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in pair)
    return f"rose from {before} to {after}" if pair[1] > pair[0] and before != after else ""


def _tracking(adapter: Adapter) -> list[Any]:
    return [layer for layer in batchnorm_layers(adapter) if layer.num_batches_tracked is not None]
