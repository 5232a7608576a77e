"""Variants of CAFe's alignment, to find out why it does harm: methods from outside, for `cafe-tta bench --methods`.

    cafe-tta bench shift --dataset mnist --data arrays:data/mnist_test --source-data arrays:data/svhn_train16k \\
        --model cafe:svhn --num-groups 16 --seeds 1 --methods 'cafe,benchmarks/alignments.py:Weighted(weight=0.0625)'

`cafe-dimwise` averages its alignment over single dimensions, `cafe` over groups: with 16 dimensions a group, the
alignment of `cafe` weighs 16 times as much. `Weighted` and `WeightedDimwise` have an option for it. `OneSided` aligns
with KL(target ‖ source) alone, whose gradient does not blow up where the target hardly varies.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cafe_tta.methods import CAFe, CAFeDimwise
from cafe_tta.methods.cafe import CAFeConfig
from cafe_tta.options import option
from cafe_tta.source import SourceStats


@dataclass(frozen=True)
class WeightedConfig(CAFeConfig):
    """Options of CAFe with a weight."""

    weight: float = option(1.0, "Weight of the alignment loss beside infomax.", least=0)


_PRESETS = {
    "cifar": WeightedConfig(samples_per_dim=1.25, min_samples=0),
    "cifar-online": WeightedConfig(samples_per_dim=1.25, min_samples=0, answer="after-eval"),
}


class Weighted(CAFe):
    """CAFe with weight · L_a + L_IM."""

    name = "weighted"
    Config = WeightedConfig
    config: WeightedConfig
    presets: ClassVar = _PRESETS

    def alignment(self, features: Tensor) -> Tensor:
        return self.config.weight * super().alignment(features)


class WeightedDimwise(Weighted, CAFeDimwise):
    """CAFe on single dimensions with weight · L_a + L_IM."""

    name = "weighted-dimwise"


class OneSided(Weighted):
    """CAFe with KL(target ‖ source) = ½ [tr C + wᵀw − d − log det C], mean over the groups, instead of both ways.

    w and C are mean and covariance of the whitened batch. The other half of CAFe's loss has tr C⁻¹, which asks a
    feature that hardly varies on the target to vary as on the source.
    """

    name = "one-sided"

    def prepare(self, source: SourceStats) -> None:
        super().prepare(source)
        self.whitening = []  # (d, d) each: features of a group to independent ones of variance 1
        for cov in source.covs:
            values, vectors = torch.linalg.eigh(cov.double())
            self.whitening.append((vectors * values.clamp(min=self.config.eigenvalue_floor).rsqrt()).float())
        self.groups, self.source_mean = source.groups, source.mean.float()

    def alignment(self, features: Tensor) -> Tensor:
        centred = features - self.source_mean.to(features)
        values = [self._divergence(centred[:, dims] @ w) for dims, w in zip(self.groups, self.whitening, strict=True)]
        alignment = torch.stack(values).mean()
        self.notes["alignment"] = alignment.item()
        return self.config.weight * alignment

    def _divergence(self, whitened: Tensor) -> Tensor:
        mean, dims = whitened.mean(0), whitened.shape[1]
        cov = torch.cov(whitened.T, correction=0).reshape(dims, dims) + 1e-4 * torch.eye(dims).to(whitened)
        return (cov.trace() + mean @ mean - dims - torch.logdet(cov)) / 2
