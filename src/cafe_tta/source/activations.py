"""Mean and variance of activations at every location of every normalisation layer's output (ActMAD)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from cafe_tta.classifier import SplitClassifier, evaluating, require_classifier, require_match
from cafe_tta.normalisation import NORM_LAYERS, batchnorm_layers
from cafe_tta.source.value import Content, SourceValue, rebatched

BATCH = 128


def observed_layers(classifier: SplitClassifier) -> list[nn.Module]:
    """The BatchNorm layers; in a classifier without any, its other normalisation layers."""
    batchnorm: list[nn.Module] = list(batchnorm_layers(classifier.backbone))
    return batchnorm or [layer for layer in classifier.backbone.modules() if isinstance(layer, NORM_LAYERS)]


class Recorder:
    """The outputs of layers in the last pass; only inside `recording`, so that none are kept for longer."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)
        self.outputs: dict[int, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        hooks = [layer.register_forward_hook(self._hook(number)) for number, layer in enumerate(self.layers)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.outputs = {}

    def _hook(self, number: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def keep(layer: nn.Module, args: Any, output: Tensor) -> None:
            self.outputs[number] = output

        return keep


@dataclass(frozen=True, eq=False, repr=False)
class ActivationStats(SourceValue):
    """Mean and variance over the images, at each location: averages over batches of the batches' means and variances.

    The images that are adapted to must be as large as these.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> source = ActivationStats.fit(classifier, [torch.rand(8, 3, 2, 2)])
    >>> [mean.shape for mean in source.means]
    [torch.Size([3, 2, 2])]
    """

    kind = "activations"
    file_kind = "activation-statistics"
    how_to_make = "make them with ActivationStats.fit(classifier, source_loader) or `cafe-tta stats --kind activations`"

    means: Sequence[Tensor]  # of each layer
    variances: Sequence[Tensor]
    num_features: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(cls, classifier: SplitClassifier, loader: Iterable[Any], batch_size: int = BATCH) -> Self:
        """One pass over the source images, in evaluation mode."""
        require_classifier(classifier)
        layers = observed_layers(classifier)
        if not layers:
            raise ValueError("activations are those of normalisation layers, but this classifier has none")
        recorder = Recorder(layers)
        sums: list[tuple[Tensor, Tensor]] = []
        batches = 0
        with torch.no_grad(), evaluating(classifier), recorder.recording():
            for images in rebatched(loader, batch_size):
                classifier(images.to(classifier.head.weight))
                found = [torch.var_mean(recorder.outputs[number].double(), 0) for number in range(len(layers))]
                pairs = zip(sums, found, strict=True)
                sums = [(a + c, b + d) for (a, b), (c, d) in pairs] if batches else found
                batches += 1
        if not batches:
            raise ValueError("expected at least 2 source images, but the loader has fewer")
        variances = [(var / batches).float().cpu() for var, _ in sums]
        means = [(mean / batches).float().cpu() for _, mean in sums]
        return cls(means, variances, classifier.num_features, classifier.identity())

    def check_belongs_to(self, classifier: SplitClassifier) -> None:
        """Raises where the activations are another classifier's, and says what differs."""
        require_match("activation statistics", self.num_features, self.meta, classifier)

    def facts(self) -> Mapping[str, Any]:
        return {"layers": len(self.means), **super().facts()}

    def content(self) -> Content:
        tensors = {f"mean.{i}": mean for i, mean in enumerate(self.means)}
        tensors |= {f"variance.{i}": variance for i, variance in enumerate(self.variances)}
        meta = {"layers": len(self.means), "num_features": self.num_features, "classifier": dict(self.meta)}
        return tensors, meta

    @classmethod
    def from_content(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        means, variances = ([tensors[f"{n}.{i}"] for i in range(meta["layers"])] for n in ("mean", "variance"))
        return cls(means, variances, meta["num_features"], meta["classifier"])
