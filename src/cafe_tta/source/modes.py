"""Do BatchNorm's running statistics describe the source images?

Networks are trained on augmented images, and their running statistics are of those. Methods that normalise with the
batch then meet features that the source statistics, made in evaluation mode, do not describe, even of clean images:
their first steps undo that, and not the corruption.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cafe_tta.classifier import SplitClassifier
from cafe_tta.normalisation import batchnorm_layers, is_trained
from cafe_tta.source.reference import Reference

ENOUGH = 512  # images
SMALLEST_BATCH = 64  # whose statistics are worth normalising with
ADVICE = (
    "methods that normalise with the batch, such as cafe and tent, begin with this shift, on clean images too; use "
    "cafe-plus or unmix, which normalise clean images as in training, or see docs/choices.md#modes-that-agree"
)


class BatchMode:
    """Features of the first source images as methods see them that normalise with the batch."""

    def __init__(self, classifier: SplitClassifier) -> None:
        self._classifier = classifier
        self._layers = batchnorm_layers(classifier)
        self._watched = bool(self._layers) and all(map(is_trained, self._layers))
        self._features: list[Tensor] = []

    def add(self, images: Tensor) -> None:
        if not self._watched or sum(map(len, self._features)) >= ENOUGH or len(images) < SMALLEST_BATCH:
            return
        with normalising_with_batch(self._layers):
            self._features.append(self._classifier.backbone(images).detach().to("cpu", torch.float32))

    @property
    def features(self) -> Tensor | None:
        """(n, D), n at most `ENOUGH`; None for a classifier without BatchNorm, or where all batches were small."""
        return torch.cat(self._features)[:ENOUGH] if self._features else None


def joined(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The features of two parts of the source images, as far as they are wanted."""
    parts = [part for part in (a, b) if part is not None]
    return torch.cat(parts)[:ENOUGH] if parts else None


@contextmanager
def normalising_with_batch(layers: list[Any]) -> Iterator[None]:
    """BatchNorm layers normalise with the batch inside the block; their running statistics stay as they are."""
    tracking = [layer.track_running_stats for layer in layers]
    for layer in layers:
        layer.training, layer.track_running_stats = True, False
    try:
        yield
    finally:
        for layer, tracked in zip(layers, tracking, strict=True):
            layer.training, layer.track_running_stats = False, tracked


def disagreement(features: Tensor, reference: Reference) -> dict[str, float]:
    """The alignment loss of source features in batch mode, and the largest that would look like the source."""
    return {"alignment": reference.alignment(features), "threshold": reference.threshold(len(features))}


def describe(found: dict[str, float]) -> str:
    """What is wrong, in words; empty where the modes agree.

    >>> describe({"alignment": 0.3, "threshold": 0.4})
    ''
    """
    if not found["alignment"] > found["threshold"]:
        return ""
    return (
        f"source images that are normalised with their batch are far from the source statistics (alignment "
        f"{found['alignment']:.2g}, expected at most {found['threshold']:.2g}): BatchNorm's running statistics are of "
        f"other images, such as augmented ones; {ADVICE}"
    )
