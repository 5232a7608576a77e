"""The model before and after adapting: distance of its features from the source, and accuracy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cafe_tta import data, stream
from cafe_tta.adapter import Adapter
from cafe_tta.classifier import SplitClassifier
from cafe_tta.data import Labels
from cafe_tta.models import Model
from cafe_tta.normalisation import batchnorm_layers
from cafe_tta.source import Reference


@dataclass(frozen=True)
class Measurement:
    """Values before and after adapting, on the same images in evaluation mode. None where they are not known."""

    images: int
    alignment: tuple[float, float] | None
    frechet: tuple[float, float] | None
    accuracy: tuple[float, float] | None
    drift: tuple[float, float] | None = None  # 1: like the source images

    def summary(self) -> dict[str, Any]:
        """As JSON."""
        pairs = {"alignment": self.alignment, "frechet_distance": self.frechet, "accuracy": self.accuracy}
        pairs |= {"drift": self.drift}
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
) -> Measurement:
    """Compares the model with its adapter, in evaluation mode, on `count` images drawn at random. Nothing adapts.

    They are drawn from the images whose indices are `among`, or from all.
    """
    order = np.random.default_rng(seed).permutation(len(imageset) if among is None else among)[:count]
    loader = data.Loader(imageset, model.preprocessing, adapter.config.batch_size, order=order, workers=workers)
    before, hits_before = _evaluate(model.classifier, loader, labels)
    after, hits_after = _evaluate(adapter, loader, labels)
    frechet = None if reference is None else (reference.full_frechet(before), reference.full_frechet(after))
    return Measurement(
        images=len(before),
        alignment=None if reference is None else (reference.alignment(before), reference.alignment(after)),
        frechet=_both(frechet),
        accuracy=(hits_before.mean().item(), hits_after.mean().item()) if len(hits_before) else None,
        drift=None if reference is None else _both((reference.drift(before), reference.drift(after))),
    )


def _both(pair: tuple[float | None, float | None] | None) -> tuple[float, float] | None:
    return None if pair is None or pair[0] is None or pair[1] is None else (pair[0], pair[1])


def _evaluate(
    evaluated: Adapter | SplitClassifier, loader: data.Loader, labels: Labels | None
) -> tuple[Tensor, Tensor]:
    """Features, and which of the labelled images are classified correctly."""
    features, hits = [], [torch.zeros(0, dtype=torch.float64)]
    for answer in stream.evaluate(evaluated, loader.batches()):
        features.append(answer.features.cpu())
        if labels is not None:
            truth = torch.from_numpy(labels[answer.batch.indices])
            hits.append((answer.logits.argmax(1).cpu() == truth)[truth >= 0].double())
    return torch.cat(features), torch.cat(hits)


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


def notes(
    measurement: Measurement | None, follow: Followed | None, *, online: bool, adapter: Adapter, images: int
) -> list[str]:
    """Warnings about the model in evaluation mode, with advice."""
    rise = None if measurement is None else _rise(measurement.alignment)
    short = follow is not None and follow.source_share > MUCH_SOURCE
    if follow is None or not short:
        return [f"the alignment loss of the model in evaluation mode {rise}"] if rise else []
    batches = f"{follow.batches} {'batch' if follow.batches == 1 else 'batches'}"
    share = f"{follow.source_share:.0%} the source's after {batches}"
    if rise:
        text = f"the alignment loss of the model in evaluation mode {rise}; "
        text += f"BatchNorm's running statistics, which it uses, are still {share}"
    elif not online:
        text = f"offline answers use BatchNorm's running statistics, which are still {share}"
    else:
        return []
    smaller = 2 ** (max(images // 10, 1).bit_length() - 1)  # makes at least 10 batches
    advice = []
    if 8 <= smaller < adapter.config.batch_size:
        advice.append(f"a batch size of {smaller} would make {images // smaller} batches of these images")
    if getattr(adapter.config, "answer", "before") != "after-eval":
        advice.append(
            "the answers given online with a step do not use them"
            if online
            else "online answers do not use them: they normalise with the batch"
        )
    return ["; ".join([text, *advice])]


def _rise(pair: tuple[float, float] | None) -> str:
    if pair is None:
        return ""
    before, after = (f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in pair)
    return f"rose from {before} to {after}" if pair[1] > pair[0] and before != after else ""


def _tracking(adapter: Adapter) -> list[Any]:
    return [layer for layer in batchnorm_layers(adapter) if layer.num_batches_tracked is not None]
