"""Soft histograms of the source features and logits: what FR needs from the source domain."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from cafe_tta import losses
from cafe_tta.classifier import SplitClassifier, evaluating, require_classifier, require_match
from cafe_tta.display import Displayed
from cafe_tta.source.value import Content, SourceValue, images_of, require_rereadable

TEMPERATURES = (0.01, 0.05)  # τ of the paper, offline and online (Appendix A.2)


@dataclass(frozen=True, repr=False)
class UnitHistograms(Displayed):
    """Histograms of the units of one layer. A unit that never varied (range 0) is left out of the loss."""

    low: Tensor  # (U,)
    high: Tensor  # (U,)
    counts: Mapping[float, Tensor]  # temperature -> (U, J) soft counts

    def edges(self, num_bins: int) -> Tensor:
        """Edges of equal inner bins, in units of the range. (U, num_bins + 1)"""
        steps = torch.linspace(0, 1, num_bins + 1, dtype=self.low.dtype)
        return self.low[:, None] / self.scale[:, None] + steps

    def facts(self) -> Mapping[str, Any]:
        return {"units": len(self.low), "temperatures": ", ".join(map(str, self.counts))}

    @property
    def live(self) -> Tensor:
        return self.high > self.low  # (U,)

    @property
    def scale(self) -> Tensor:
        return torch.where(self.live, self.high - self.low, torch.ones_like(self.low))


@dataclass(frozen=True, repr=False)
class SourceHistograms(SourceValue):
    """Soft histograms of every feature and every logit over the source images.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)))
    >>> SourceHistograms.fit(classifier, [torch.rand(8, 3, 2, 2)]).count
    8
    """

    kind = "histograms"
    file_kind = "source-histograms"
    how_to_make = "make them with SourceHistograms.fit(classifier, source_loader) or `cafe-tta stats --kind histograms`"

    features: UnitHistograms
    logits: UnitHistograms
    num_bins: int = 8
    count: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        classifier: SplitClassifier,
        loader: Iterable[Any],
        num_bins: int = 8,
        temperatures: Sequence[float] = TEMPERATURES,
    ) -> Self:
        """Two passes over the source images, in evaluation mode: ranges first, then soft counts."""
        require_classifier(classifier)
        require_rereadable(loader, "histograms take two passes: pass a list or a DataLoader")
        if num_bins < 1 or not temperatures or min(temperatures) <= 0:
            raise ValueError(f"expected bins and temperatures above 0, but got {num_bins} and {list(temperatures)}")
        ranges: list[tuple[Tensor, Tensor]] = []
        count = 0
        for values in _passes(classifier, loader):
            batch = [(v.amin(0), v.amax(0)) for v in values]
            pairs = zip(ranges or batch, batch, strict=True)
            ranges = [(torch.minimum(a, c), torch.maximum(b, d)) for (a, b), (c, d) in pairs]
            count += len(values[0])
        if not count:
            raise ValueError("expected at least one source image, but the loader was empty")
        layers = [UnitHistograms(low, high, {}) for low, high in ranges]
        counts: list[dict[float, Tensor]] = [{}, {}]
        for values in _passes(classifier, loader):
            for layer, sums, v in zip(layers, counts, values, strict=True):
                for temperature in temperatures:
                    soft = losses.soft_histogram(v / layer.scale, layer.edges(num_bins), temperature)
                    sums[temperature] = sums[temperature] + soft if temperature in sums else soft
        features, logits = (
            UnitHistograms(layer.low, layer.high, sums) for layer, sums in zip(layers, counts, strict=True)
        )
        return cls(features, logits, num_bins, count, classifier.identity())

    def check_belongs_to(self, classifier: SplitClassifier) -> None:
        """Raises where the features are another classifier's, and says what differs."""
        require_match("source histograms", len(self.features.low), self.meta, classifier)

    def facts(self) -> Mapping[str, Any]:
        own = {"features": len(self.features.low), "logits": len(self.logits.low), "bins": self.num_bins}
        return {**own, "images": self.count, **super().facts()}

    def content(self) -> Content:
        tensors: dict[str, Tensor] = {}
        for name, layer in (("features", self.features), ("logits", self.logits)):
            tensors |= {f"{name}.low": layer.low, f"{name}.high": layer.high}
            tensors |= {f"{name}.counts.{temperature}": counts for temperature, counts in layer.counts.items()}
        return tensors, {"num_bins": self.num_bins, "count": self.count, "classifier": dict(self.meta)}

    @classmethod
    def from_content(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        def layer(name: str) -> UnitHistograms:
            start = f"{name}.counts."
            counts = {float(key.removeprefix(start)): t for key, t in tensors.items() if key.startswith(start)}
            return UnitHistograms(tensors[f"{name}.low"], tensors[f"{name}.high"], counts)

        return cls(layer("features"), layer("logits"), meta["num_bins"], meta["count"], meta["classifier"])


def _passes(classifier: SplitClassifier, loader: Iterable[Any]) -> Iterable[tuple[Tensor, Tensor]]:
    """Features and logits of every batch, in float64 on the CPU."""
    weights = next(classifier.parameters())
    with torch.no_grad(), evaluating(classifier):
        for batch in loader:
            features, logits = classifier.features_and_logits(images_of(batch).to(weights))
            yield features.cpu().double(), logits.cpu().double()
