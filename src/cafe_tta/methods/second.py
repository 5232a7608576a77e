"""A second set of weights beside the classifier's: the teacher of CoTTA and RoTTA, the hidden model of CMF."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cafe_tta.classifier import SplitClassifier
from cafe_tta.gradient import GradientAdapter


class SecondWeights(GradientAdapter):
    """A method that keeps the tensors of `second_names` twice: in the classifier, and in buffers of its own."""

    def second_names(self) -> list[str]:
        """Which tensors of the classifier there are two of: what a step moves."""
        return [name for name, tensor in self.changing().items() if tensor.requires_grad]

    def reset(self) -> None:
        super().reset()
        self.set_second({name: self.changing()[name].detach().clone() for name in self.second_names()})

    def second(self) -> dict[str, Tensor]:
        """The tensors of the second model, by the names that the classifier has for them."""
        return {name: self.get_buffer(f"second_{i}") for i, name in enumerate(self.second_names())}

    def set_second(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the tensors of the second model."""
        for number, name in enumerate(self.second_names()):
            setattr(self, f"second_{number}", nn.Buffer(tensors[name]))  # replaced, never changed: a backup is free

    def average_into_second(self, keep: float) -> None:
        """second ← keep · second + (1 - keep) · classifier, for what a step moves."""
        ours = self.changing()
        with torch.no_grad():
            mixed = {n: torch.lerp(ours[n], t, keep) if ours[n].requires_grad else t for n, t in self.second().items()}
        self.set_second(mixed)

    @contextmanager
    def with_weights(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """The classifier has these tensors inside the block, and its own again afterwards."""
        ours = self.changing()
        own = {name: ours[name].data for name in tensors}
        try:
            for name, tensor in tensors.items():
                ours[name].data = tensor.to(ours[name]).detach()
            yield
        finally:
            for name, tensor in own.items():
                ours[name].data = tensor


class Taught(SecondWeights):
    """A method that answers with its second weights, those of a teacher."""

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with self.with_weights(self.second()):
            return super().features_and_logits(images)

    def exported(self) -> SplitClassifier:
        with self.with_weights(self.second()):
            return copy.deepcopy(super().exported())
