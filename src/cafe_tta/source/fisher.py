"""Fisher information of the normalisation layers: how much the source's predictions depend on each weight (EATA)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from cafe_tta.classifier import SplitClassifier, require_classifier, require_match
from cafe_tta.normalisation import Normaliser, keep_group_norm_from_crashing, norm_parameters
from cafe_tta.source.value import Content, SourceValue, rebatched, sampled

BATCH = 64
LIMIT = 2000


@dataclass(frozen=True, eq=False, repr=False)
class FisherInformation(SourceValue):
    """F = mean over batches of (∂/∂θ CE(z, argmax z))², for weight and bias of every normalisation layer.

    As published: the gradient of a whole batch's mean is squared, BatchNorm normalises with the batch, a prediction is
    its own label, so that unlabelled images do, and 2000 of them are used: drawn at random from all that are given.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> source = FisherInformation.fit(classifier, [torch.rand(128, 3, 2, 2)])
    >>> sorted(source.fisher), source.batches
    (['backbone.model.0.bias', 'backbone.model.0.weight'], 2)
    """

    kind = "fisher"
    file_kind = "fisher-information"
    how_to_make = "make it with FisherInformation.fit(classifier, source_loader) or `cafe-tta stats --kind fisher`"

    fisher: Mapping[str, Tensor]
    batches: int = 0
    num_features: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls, classifier: SplitClassifier, loader: Iterable[Any], batch_size: int = BATCH, limit: int = LIMIT
    ) -> Self:
        """A forward and backward pass over `limit` images, in batches as large as those of the stream will be."""
        require_classifier(classifier)
        moving = {id(parameter) for parameter in norm_parameters(classifier.backbone)}
        named = {name: p for name, p in classifier.named_parameters() if id(p) in moving}
        if not named:
            raise ValueError("the Fisher information is that of normalisation layers, but this classifier has none")
        sample = sampled(loader, limit)
        if len(sample) < 2:
            raise ValueError(f"expected at least 2 source images, but the loader has {len(sample)}")
        sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
        batches = 0
        with torch.inference_mode(False), torch.enable_grad(), _normalising_with_the_batch(classifier, named.values()):
            for images in rebatched([torch.stack(sample)], batch_size):
                logits = classifier(images.to(classifier.head.weight))
                loss = nn.functional.cross_entropy(logits, logits.argmax(1))
                gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
                for name, gradient in zip(named, gradients, strict=True):
                    if gradient is not None:
                        sums[name] += gradient.double().square()
                batches += 1
        fisher = {name: (total / batches).float().cpu() for name, total in sums.items()}
        return cls(fisher, batches, classifier.num_features, classifier.identity())

    def check_belongs_to(self, classifier: SplitClassifier) -> None:
        """Raises where the weights are another classifier's, and says what differs."""
        require_match("Fisher information", self.num_features, self.meta, classifier)

    def facts(self) -> Mapping[str, Any]:
        return {"parameters": len(self.fisher), "batches": self.batches, **super().facts()}

    def content(self) -> Content:
        meta = {"batches": self.batches, "num_features": self.num_features, "classifier": dict(self.meta)}
        return dict(self.fisher), meta

    @classmethod
    def from_content(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        return cls(tensors, meta["batches"], meta["num_features"], meta["classifier"])


@contextmanager
def _normalising_with_the_batch(classifier: SplitClassifier, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """BatchNorm normalises with the batch, these parameters have gradients; afterwards all is as it was before."""
    modes = [(module, module.training) for module in classifier.modules()]
    normaliser = Normaliser(classifier, "batch")
    tracking = [(layer, layer.track_running_stats) for layer in normaliser.layers]
    wanted = [(parameter, parameter.requires_grad) for parameter in classifier.parameters()]
    hooks = keep_group_norm_from_crashing(classifier)
    try:
        classifier.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        normaliser.adapting(update=False)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
        for layer, tracks in tracking:
            layer.track_running_stats = tracks
        for parameter, wants in wanted:
            parameter.requires_grad_(wants)
