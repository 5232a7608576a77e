"""SWAG with a diagonal covariance: the posterior over weights that BACS needs from the source domain.

Maddox et al., A simple baseline for Bayesian uncertainty in deep learning, NeurIPS 2019. https://arxiv.org/abs/1902.02476
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from cafe_tta.classifier import SplitClassifier
from cafe_tta.display import Displayed
from cafe_tta.normalisation import batchnorm_layers
from cafe_tta.source.images import ImageRecord
from cafe_tta.source.value import Content, SourceValue, images_of


@dataclass(frozen=True, repr=False)
class PosteriorMember(Displayed):
    """Mean and variance of every parameter, and the BatchNorm statistics that belong to the mean."""

    mean: Mapping[str, Tensor]
    variance: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def facts(self) -> Mapping[str, Any]:
        return {"parameters": sum(mean.numel() for mean in self.mean.values())}

    def put_into(self, classifier: SplitClassifier) -> None:
        """Sets the classifier to the mean of the posterior."""
        with torch.no_grad():
            for name, parameter in classifier.named_parameters():
                parameter.copy_(self.mean[name])
            for name, buffer in classifier.named_buffers():
                buffer.copy_(self.buffers[name])


@dataclass(frozen=True, repr=False)
class Posterior(SourceValue):
    """One diagonal Gaussian over the weights for each member of an ensemble, each from its own training run.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    >>> loader = [(torch.rand(8, 3, 2, 2), torch.zeros(8, dtype=torch.long))]
    >>> len(Posterior.fit(classifier, loader, epochs=1, batch_size=2).members)
    1
    """

    kind = "posterior"
    file_kind = "posterior"
    how_to_make = "collect one with Posterior.fit(classifier, labelled_loader) or `cafe-tta stats --kind posterior`"

    members: tuple[PosteriorMember, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)  # which images

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("expected a posterior of at least one member, but got none")
        object.__setattr__(self, "members", tuple(self.members))

    @classmethod
    def fit(cls, classifier: SplitClassifier, loader: Iterable[Any], **options: Any) -> Self:
        """SWAG around the weights of a trained classifier, which stays as it is.

        The loader gives (images, labels), which are kept in memory; options: see `source.train.collect_swag`.
        """
        from cafe_tta.source.train import collect_swag  # which needs this module

        batches = list(loader)
        if not all(isinstance(batch, (tuple, list)) and len(batch) == 2 for batch in batches) or not batches:
            raise TypeError("expected a loader of (images, labels) to collect a SWAG posterior with")
        images, labels = torch.cat([images_of(batch) for batch in batches]), torch.cat([batch[1] for batch in batches])
        posterior = collect_swag(copy.deepcopy(classifier).requires_grad_(True), images, labels, **options)
        return cls(posterior.members)

    @staticmethod
    def join(*posteriors: "Posterior") -> "Posterior":
        """An ensemble of several posteriors."""
        record = ImageRecord()
        for posterior in posteriors:
            record = record.merge(posterior.images)
        return Posterior(tuple(member for posterior in posteriors for member in posterior.members), record.into({}))

    def check_belongs_to(self, classifier: SplitClassifier) -> None:
        """Raises where the classifier has other parameters than the posterior, and says what differs."""
        expected = {name: tuple(p.shape) for name, p in classifier.named_parameters()}
        for number, member in enumerate(self.members):
            found = {name: tuple(mean.shape) for name, mean in member.mean.items()}
            names = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
            if names:
                raise ValueError(
                    f"member {number} of the posterior does not belong to this classifier: `{names[0]}` has shape "
                    f"{found.get(names[0], 'none')} there, {expected.get(names[0], 'none')} here"
                )

    def facts(self) -> Mapping[str, Any]:
        parameters = self.members[0].facts()["parameters"]
        return {"members": len(self.members), "parameters": parameters, **super().facts()}

    def content(self) -> Content:
        tensors = {
            f"{number}.{part}.{name}": tensor
            for number, member in enumerate(self.members)
            for part in ("mean", "variance", "buffers")
            for name, tensor in getattr(member, part).items()
        }
        return tensors, {**self.meta, "members": len(self.members)}

    @classmethod
    def from_content(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        parts: list[dict[str, dict[str, Tensor]]] = [
            {"mean": {}, "variance": {}, "buffers": {}} for _ in range(meta["members"])
        ]
        for key, tensor in tensors.items():
            number, part, name = key.split(".", 2)
            parts[int(number)][part][name] = tensor
        own = {name: value for name, value in meta.items() if name != "members"}
        return cls(tuple(PosteriorMember(**part) for part in parts), own)


class SwagCollector:
    """Running first and second moments of the parameters, collected while training, in float64.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    >>> collector = SwagCollector(classifier)
    >>> for _ in range(2):  # after every epoch, say
    ...     collector.collect(classifier)
    >>> len(collector.posterior(classifier, [torch.rand(8, 3, 2, 2)]).members)
    1
    """

    def __init__(self, classifier: SplitClassifier) -> None:
        self.count = 0
        self.mean = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in classifier.named_parameters()}
        self.square = {name: torch.zeros_like(mean) for name, mean in self.mean.items()}

    def collect(self, classifier: SplitClassifier) -> None:
        """Adds the classifier's parameters as they are now."""
        self.count += 1
        with torch.no_grad():
            for name, parameter in classifier.named_parameters():
                self.mean[name].lerp_(parameter.double(), 1 / self.count)
                self.square[name].lerp_(parameter.double().square(), 1 / self.count)

    def posterior(self, classifier: SplitClassifier, loader: Iterable[Any]) -> Posterior:
        """The posterior. Sets the classifier to its mean, with BatchNorm statistics recomputed on the source images."""
        if self.count < 2:
            raise RuntimeError(f"a SWAG posterior needs at least 2 collections of the parameters, but has {self.count}")
        with torch.no_grad():
            for name, parameter in classifier.named_parameters():
                parameter.copy_(self.mean[name])
        recompute_batchnorm(classifier, loader)
        means = {name: parameter.detach().clone() for name, parameter in classifier.named_parameters()}
        variances = {n: (self.square[n] - m.square()).clamp(min=0).to(means[n].dtype) for n, m in self.mean.items()}
        buffers = {name: buffer.detach().clone() for name, buffer in classifier.named_buffers()}
        return Posterior((PosteriorMember(means, variances, buffers),))

    def state(self) -> dict[str, Tensor]:
        """All tensors, to go on later: moments of the weights, and how many there were."""
        moments = {"mean": self.mean, "square": self.square}
        tensors = {f"{part}.{name}": tensor for part, values in moments.items() for name, tensor in values.items()}
        return tensors | {"count": torch.tensor(self.count)}

    def set_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from tensors that `state` gave."""
        self.count = int(tensors["count"])
        for name in self.mean:
            self.mean[name] = tensors[f"mean.{name}"].to(self.mean[name]).clone()
            self.square[name] = tensors[f"square.{name}"].to(self.square[name]).clone()


def recompute_batchnorm(module: nn.Module, loader: Iterable[Any]) -> None:
    """Running statistics of every BatchNorm layer, averaged over the loader's batches: averaged weights need it."""
    layers = batchnorm_layers(module)
    if not layers:
        return
    batches = iter(loader)
    first = next(batches, None)
    if first is None:
        raise ValueError("expected source images to recompute BatchNorm statistics with, but the loader was empty")
    momenta = [layer.momentum for layer in layers]
    modes = {child: child.training for child in module.modules()}
    module.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain average over the batches
        layer.training = True
    weights = next(module.parameters())
    try:
        with torch.no_grad():
            for batch in chain([first], batches):
                module(images_of(batch).to(weights))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for child, mode in modes.items():
            child.training = mode
