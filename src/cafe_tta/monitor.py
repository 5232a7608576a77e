"""Drift without labels and without adapting: how far the images that a model is shown are from its source images."""

import threading
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cafe_tta.classifier import SplitClassifier, evaluating, require_classifier
from cafe_tta.display import Displayed
from cafe_tta.source import Reference, SourceStats, SourceWarning
from cafe_tta.source.images import ImageCheck
from cafe_tta.source.reference import DRIFT_IMAGES

WINDOW = 256


class Monitor(Displayed):
    """A model that answers as it is, and tells how far its last images have drifted from its source images.

    `monitor(images)` returns the logits; `monitor.drift` is 1 where the last `window` images are like source images
    (None before the first 8), and does not depend on their number. The features of the window are all that is kept. Any
    thread may call it; calls wait for each other.

    >>> from torch import nn
    >>> from cafe_tta import FeatureStats, split_classifier
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> stats = FeatureStats.fit(classifier, [torch.rand(4096, 3, 2, 2)]).group()
    >>> monitor = Monitor(classifier, stats, window=64)
    >>> monitor(torch.rand(64, 3, 2, 2)).shape, 0.7 < monitor.drift < 1.3
    (torch.Size([64, 3]), True)
    >>> logits = monitor(torch.rand(64, 3, 2, 2) + 0.5)  # twice as bright: none of the first images are left
    >>> monitor.drift > 1.5, monitor.images
    (True, 128)
    """

    def __init__(self, classifier: SplitClassifier, stats: SourceStats, window: int = WINDOW) -> None:
        require_classifier(classifier)
        SourceStats.require(stats, classifier, "a monitor")
        if window < DRIFT_IMAGES:
            raise ValueError(f"expected a `window` of at least {DRIFT_IMAGES} images, but got {window}")
        self.classifier, self.window = classifier, window
        self._reference = Reference(stats)
        self._check = ImageCheck(stats.images)
        self._lock = threading.Lock()
        self.reset()

    def __call__(self, images: Tensor) -> Tensor:
        """The logits of the model in evaluation mode. The images are now the last of the window."""
        with self._lock:
            wrong = self._check.look(images)
            with torch.no_grad(), evaluating(self.classifier):
                features, logits = self.classifier.features_and_logits(images.to(self.classifier.head.weight))
            self._features.extend(features.detach().float().cpu()[-self.window :].unbind())
            self.images += len(images)
        if wrong:
            warnings.warn(wrong, SourceWarning, stacklevel=2)
        return logits

    @property
    def drift(self) -> float | None:
        """Of the last images: 1 is like source images. None before there are 8."""
        with self._lock:
            kept = list(self._features)
        return self._reference.drift(torch.stack(kept)) if kept else None

    def reset(self) -> None:
        """Forgets all images."""
        with self._lock:
            self._features: deque[Tensor] = deque(maxlen=self.window)  # (D,) each
            self.images = 0  # so far

    def facts(self) -> Mapping[str, Any]:
        drift = self.drift
        shown = "unknown yet" if drift is None else f"{drift:.2f}"
        return {"drift": f"{shown}, of the last {len(self._features)} images", "images": self.images}


def drift(classifier: SplitClassifier, stats: SourceStats, images: Tensor) -> float:
    """How far images have drifted from the source images, without labels: 1 is like them, whatever the batch size.

    The mean of 8 such images lies `drift` times as far from the source's mean feature as that of 8 source images:
    √(1 + 8 s²), s² the squared shift in standard deviations, averaged over the features (docs/drift.md). For many
    batches, use a `Monitor`.

    >>> from torch import nn
    >>> from cafe_tta import FeatureStats, split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> images = torch.rand(256, 3, 2, 2)
    >>> stats = FeatureStats.fit(classifier, [images]).group()
    >>> 0.9 < drift(classifier, stats, images) < 1.1
    True
    """
    if len(images) < DRIFT_IMAGES:
        raise ValueError(f"expected at least {DRIFT_IMAGES} images to tell their drift, but got {len(images)}")
    monitor = Monitor(classifier, stats, window=len(images))
    monitor(images)
    found = monitor.drift
    assert found is not None
    return found
