"""The loop: an adapter, or a model in evaluation mode, meets batches of images one after the other.

    for answer in stream.adapt(adapter, batches):
        print(answer.logits.argmax(1), answer.report, answer.seconds)

A batch is anything with a tensor `images`; what else it carries (labels, indices, names) comes back in `answer.batch`.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from cafe_tta.adapter import Adapter, Report
from cafe_tta.classifier import SplitClassifier, evaluating


class HasImages(Protocol):
    """A batch."""

    @property
    def images(self) -> Tensor: ...


B = TypeVar("B", bound=HasImages)


@dataclass(frozen=True)
class Answer(Generic[B]):
    """The answer to one batch, and what adapting to it did."""

    batch: B
    logits: Tensor  # (B, C)
    report: Report | None
    seconds: float  # of the adapter alone: making the batch is not counted


@dataclass(frozen=True)
class Evaluation(Generic[B]):
    """Features and logits of one batch in evaluation mode."""

    batch: B
    features: Tensor  # (B, D)
    logits: Tensor  # (B, C)
    seconds: float


def adapt(adapter: Adapter, batches: Iterable[B]) -> Iterator[Answer[B]]:
    """Shows every batch to the adapter, in order, and yields its answers as they come.

    >>> from types import SimpleNamespace
    >>> from cafe_tta import create, split_classifier
    >>> classifier = split_classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)))
    >>> batches = [SimpleNamespace(images=torch.zeros(2, 3, 2, 2))]
    >>> [answer.logits.shape for answer in adapt(create("source", classifier), batches)]
    [torch.Size([2, 3])]
    """
    weight = adapter.classifier.head.weight
    for batch in batches:
        images = batch.images.to(weight)
        start = time.perf_counter()
        logits = adapter(images)
        yield Answer(batch, logits, adapter.report, time.perf_counter() - start)


def evaluate(
    model: Adapter | SplitClassifier, batches: Iterable[B], as_answered: bool = False
) -> Iterator[Evaluation[B]]:
    """Features and logits of every batch; nothing adapts.

    An adapter is in evaluation mode, or normalises `as_answered`: see `Adapter.features_as_answered`. An empty batch,
    where another process answers it, gives empty features and logits.
    """
    classifier = model.classifier if isinstance(model, Adapter) else model
    weight = classifier.head.weight
    answer = _frozen(model) if isinstance(model, SplitClassifier) else model.features_and_logits
    if as_answered and isinstance(model, Adapter):
        answer = model.features_as_answered
    for batch in batches:
        images = batch.images.to(weight)
        start = time.perf_counter()
        if len(images):
            features, logits = answer(images)
        else:
            features, logits = weight.new_zeros(0, classifier.num_features), weight.new_zeros(0, classifier.num_classes)
        yield Evaluation(batch, features.detach(), logits.detach(), time.perf_counter() - start)


def _frozen(classifier: SplitClassifier) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def answer(images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), evaluating(classifier):
            return classifier.features_and_logits(images)

    return answer
