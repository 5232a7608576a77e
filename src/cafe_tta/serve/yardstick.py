"""How far features are from the source's: the alignment loss beside the gate's threshold, and the Fréchet distance.

Only the groups' own moments leave the training site, so the Fréchet distance here is that of the groups: the sum of
the distances between each group's Gaussians, which is the distance between Gaussians without correlations across
groups.
"""

import torch
from torch import Tensor

from cafe_tta.gate import SAMPLES_PER_DIM, Gate
from cafe_tta.gaussians import SourceGaussians
from cafe_tta.losses import EIGENVALUE_FLOOR
from cafe_tta.stats import SourceStats

FEWEST = 16  # images: of fewer, neither covariance nor threshold means anything


class Yardstick:
    """Measures features against the source statistics."""

    def __init__(self, source: SourceStats, gate_margin: float) -> None:
        known = source.meta.get("alignment") or {}
        self.gate = Gate(known, gate_margin) if known.get("largest") else None
        self.sizes = [len(dims) for dims in source.groups]
        self.total_variance = float(sum(cov.trace() for cov in source.covs))
        self._gaussians = SourceGaussians(source, known.get("eigenvalue_floor", EIGENVALUE_FLOOR))
        self._frechet = _Frechet(source)

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

    def drift_of(self, features: Tensor) -> float | None:
        if self.gate is None or len(features) < FEWEST:
            return None
        return self.drift(self.alignment(features), len(features))

    def frechet(self, features: Tensor) -> float:
        """Fréchet distance of the groups to the source's."""
        return self._frechet.distance(features.detach().double().cpu())

    def dispersion(self, features: Tensor) -> float:
        """Variance of the features over all their dimensions, beside the source's."""
        return float(features.var(0, correction=0).sum()) / max(self.total_variance, 1e-12)


class _Frechet:
    """The source's groups, those of similar width together: thousands of tiny eigenvalue problems in a few calls."""

    def __init__(self, source: SourceStats) -> None:
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        order = sorted(range(len(source.groups)), key=lambda g: len(source.groups[g]))
        by_width: dict[int, list[int]] = {}
        for g in order:
            by_width.setdefault(1 << (len(source.groups[g]) - 1).bit_length(), []).append(g)
        for width, members in by_width.items():
            dims = torch.zeros(len(members), width, dtype=torch.long)
            used = torch.zeros(len(members), width, dtype=torch.float64)
            covs = torch.zeros(len(members), width, width, dtype=torch.float64)
            for row, g in enumerate(members):
                size = len(source.groups[g])
                dims[row, :size] = source.groups[g].cpu()
                used[row, :size] = 1
                covs[row, :size, :size] = source.covs[g].cpu().double()
            values, vectors = torch.linalg.eigh(covs)
            roots = (vectors * values.clamp(min=0).sqrt()[:, None, :]) @ vectors.mT
            means = source.mean.cpu().double()[dims] * used
            self._parts.append((dims, used, roots, means))

    def distance(self, features: Tensor) -> float:
        total = 0.0
        for dims, used, roots, means in self._parts:  # a padded dimension is 0 on both sides: it adds nothing
            part = features[:, dims].permute(1, 0, 2) * used[:, None, :]  # (K, B, d)
            mean = part.mean(1)
            centred = part - mean[:, None, :]
            cov = centred.mT @ centred / len(features)
            cross = torch.linalg.eigvalsh(roots @ cov @ roots).clamp(min=0).sqrt().sum(1)
            trace = (roots.square().sum((1, 2)) + cov.diagonal(dim1=1, dim2=2).sum(1)) - 2 * cross
            total += float(((mean - means).square().sum(1) + trace).clamp(min=0).sum())
        return total
