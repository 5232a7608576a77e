"""Sums over features that stream by: exact, in float64, with memory that does not grow."""

import torch
from torch import Tensor

BLOCK = 256  # columns of the covariance that are added up together
SAMPLE = 2048  # feature vectors that are kept: as much memory as the covariance of 2048 features
AT_ONCE = 2**20  # keys that are passed over together


class FeatureSums:
    """Running sums n, Σ(z-a), Σ(z-a)(z-a)ᵀ in float64. The shift a, the first batch's mean, avoids cancellation.

    `start` is how many feature vectors of the whole come before these, where these are a part. Every place of the whole
    has a random key of its own, and the rows with the smallest keys are the sample: so that the rows with the smallest
    keys of all the parts' samples are the sample of the whole.
    """

    def __init__(self, start: int = 0) -> None:
        self.count = 0
        self._generator = torch.Generator().manual_seed(0)
        for done in range(0, start, AT_ONCE):
            torch.rand(min(AT_ONCE, start - done), generator=self._generator)
        self.sample = torch.zeros(0)
        self.keys = torch.zeros(0)  # of the sample, in ascending order

    def add(self, features: Tensor) -> None:
        if features.dim() != 2:
            raise ValueError(f"expected features of shape (batch, D), but got {tuple(features.shape)}")
        if not len(features):
            return
        values = features.detach().to("cpu", torch.float64)
        if self.count == 0:
            self.shift = values.mean(0)  # (D,)
            self.sum = torch.zeros_like(self.shift)
            self.outer = torch.zeros(values.shape[1], values.shape[1], dtype=torch.float64)
        self._draw(features)
        values = values - self.shift
        self.count += len(values)
        self.sum += values.sum(0)
        for start in range(0, len(self.sum), BLOCK):  # the lower triangle is enough: half of the work
            rows = slice(start, start + BLOCK)
            self.outer[rows, : start + BLOCK].addmm_(values[:, rows].T, values[:, : start + BLOCK])

    def mean_and_cov(self) -> tuple[Tensor, Tensor]:
        """Mean (D,) and covariance (D, D), divided by n, of what was added."""
        offset = self.sum / self.count
        cov = torch.empty_like(self.outer)
        for start in range(0, len(cov), BLOCK):
            rows, before = slice(start, start + BLOCK), slice(start)
            square = self.outer[rows, rows].tril()
            cov[rows, rows] = square + square.tril(-1).T
            cov[rows, before] = self.outer[rows, before]
            cov[before, rows] = self.outer[rows, before].T
        cov.div_(self.count).addr_(offset, offset, alpha=-1)
        cov.diagonal().clamp_(min=0)  # a constant feature may come out a rounding error below zero
        return self.shift + offset, cov

    def _draw(self, features: Tensor) -> None:
        keys = torch.rand(len(features), generator=self._generator)
        if len(self.keys) == SAMPLE:
            better = keys < self.keys.max()
            if not better.any():
                return
            features, keys = features[better.to(features.device)], keys[better]
        rows = features.detach().to("cpu", torch.float32)
        rows = torch.cat([self.sample, rows]) if len(self.sample) else rows
        self.sample, self.keys = smallest(rows, torch.cat([self.keys, keys]))


def smallest(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The rows with the smallest keys, as many as a sample has, and their keys."""
    kept = keys.argsort(stable=True)[:SAMPLE]
    return rows[kept], keys[kept]
