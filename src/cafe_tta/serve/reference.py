"""The distance of features from the source: alignment loss, drift against the gate's threshold, Fréchet distance.

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

FEWEST = 16  # images: with fewer, neither covariance nor threshold means anything


class Reference:
    """Measures features against the source statistics."""

    def __init__(self, source: SourceStats, gate_margin: float) -> None:
        known = source.meta.get("alignment") or {}
        self.sizes = [len(dims) for dims in source.groups]
        self._gate = Gate(known, gate_margin) if known.get("largest") else None
        self._total_variance = float(sum(cov.trace() for cov in source.covs))
        self._gaussians = SourceGaussians(source, known.get("eigenvalue_floor", EIGENVALUE_FLOOR))
        self._frechet = _Frechet(source)

    def divergences(self, features: Tensor) -> Tensor:
        """The divergence of each group from the source, (K,)."""
        with torch.no_grad():
            moments = self._gaussians.moments(features)
            return self._gaussians.divergence(moments, SAMPLES_PER_DIM).values.cpu()

    def alignment(self, features: Tensor) -> float:
        """The alignment loss: the mean divergence over the groups."""
        return float(self.divergences(features).mean())

    def threshold(self, images: int) -> float | None:
        """The largest alignment loss of this many images that looks like the source; None if unknown."""
        return None if self._gate is None or images < FEWEST else self._gate.threshold(images)

    def drift(self, features: Tensor) -> float | None:
        """Alignment loss / threshold: at most 1 looks like the source; None if unknown."""
        threshold = self.threshold(len(features))
        return None if threshold is None else self.alignment(features) / threshold

    def frechet(self, features: Tensor) -> float:
        """The Fréchet distance to the source, summed over the groups."""
        return self._frechet.distance(features.detach().double().cpu())

    def dispersion(self, features: Tensor) -> float:
        """The variance of the features, summed over the dimensions, divided by that of the source."""
        return float(features.var(0, correction=0).sum()) / max(self._total_variance, 1e-12)


class _Frechet:
    """The groups of the source in buckets of similar width: thousands of tiny eigenvalue problems in a few calls."""

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
