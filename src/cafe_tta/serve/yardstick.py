"""How far features are from the source's: the alignment loss, the Fréchet distance, and both beside the gate's threshold.

Only the groups' own moments leave the training site, so the Fréchet distance here is that of the groups: the sum of
the distances of each group's mean and covariance, which is the distance between Gaussians without correlations across
groups.
"""

import torch
from torch import Tensor

from cafe_tta.gate import SAMPLES_PER_DIM, Gate
from cafe_tta.gaussians import SourceGaussians
from cafe_tta.losses import EIGENVALUE_FLOOR
from cafe_tta.metrics import FrechetReference
from cafe_tta.stats import SourceStats

FEWEST = 16  # images: of fewer, neither covariance nor threshold means anything


class Yardstick:
    """Measures features against the source statistics."""

    def __init__(self, source: SourceStats, gate_margin: float) -> None:
        known = source.meta.get("alignment") or {}
        self.gate = Gate(known, gate_margin) if known.get("largest") else None
        self._gaussians = SourceGaussians(source, known.get("eigenvalue_floor", EIGENVALUE_FLOOR))
        self.sizes = [len(dims) for dims in source.groups]
        self._groups = source.groups
        self._frechet = [
            FrechetReference(source.mean[dims], cov) for dims, cov in zip(source.groups, source.covs, strict=True)
        ]

    def divergences(self, features: Tensor) -> Tensor:
        """(K,): of each group."""
        with torch.no_grad():
            moments = self._gaussians.moments(features)
            return self._gaussians.divergence(moments, SAMPLES_PER_DIM).values.cpu()

    def alignment(self, features: Tensor) -> float:
        return float(self.divergences(features).mean())

    def drift(self, alignment: float, images: int) -> float | None:
        """Alignment beside the largest that still looks like the source: at most 1 does. None where nobody knows."""
        if self.gate is None or images < FEWEST:
            return None
        return alignment / self.gate.threshold(images)

    def frechet(self, features: Tensor) -> float:
        features = features.detach().double().cpu()
        total = 0.0
        for dims, reference in zip(self._groups, self._frechet, strict=True):
            part = features[:, dims]
            centred = part - part.mean(0)
            total += reference.distance(part.mean(0), centred.T @ centred / len(part))
        return total
