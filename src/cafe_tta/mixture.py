"""A mixture of channel statistics for each BatchNorm layer, which every image moves a little (UnMix-TNS).

Tomar et al., Un-mixing test-time normalization statistics: combatting label temporal correlation, ICLR 2024.
https://arxiv.org/abs/2401.08328. The original code states no licence; this is written from the paper's formulas.

A layer has K components (μ_k, σ²_k) that together have the source's mean and variance. With the channel means m and
variances s² of one image over its pixels,

    π_k = softmax_k(cos(m, μ_k) / 0.07),    μ̂_k = (1 - π_k) μ_k + π_k m,    σ̂²_k = (1 - π_k) σ²_k + π_k s²

and the image is normalised with the mean and variance of the mixture of all (μ̂_k, σ̂²_k). Then the components follow:
μ_k += λ mean_b π_k (m - μ_k), and σ²_k likewise.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cafe_tta.channels import NormalisedInput

TEMPERATURE = 0.07
SPREAD = 0.5  # share of the source's variance that lies between the components
NO_MIXTURE = "{} normalises each image with a mixture of statistics, which no ordinary model does: nothing to export"
MOMENTUM = 0.1  # of a layer that has none


class Mixture:
    """K components for every BatchNorm layer of images (BatchNorm2d and 3d; others keep the source's statistics).

    A batch of n images moves the components by λ = 1 - (1 - momentum)^(n / full_batch). Passes that only evaluate use
    the components and leave them as they are.
    """

    def __init__(self, layers: Sequence[_BatchNorm], components: int, full_batch: int, seed: int = 0) -> None:
        self.components, self.full_batch, self.seed = components, full_batch, seed
        self.layers = [layer for layer in layers if not isinstance(layer, nn.BatchNorm1d)]
        self.enabled = True  # off: the source's statistics
        self._updating = False
        # Kept apart from the layers, whose running statistics are replaced while they normalise.
        self._source = [(_kept(layer.running_mean), _kept(layer.running_var)) for layer in self.layers]
        for number, layer in enumerate(self.layers):
            NormalisedInput(layer, partial(self.normalised, layer, number))  # which, unlike a lambda, is copied deeply
        self.reset()

    def reset(self) -> None:
        """The first components: by seed, so that two adapters begin alike."""
        generator = torch.Generator().manual_seed(self.seed)
        count = self.components
        share = SPREAD if count > 1 else 0.0
        wide = math.sqrt(share * count / (count - 1)) if count > 1 else 0.0
        self.memory = {}
        for number, (mean, var) in enumerate(self._source):
            mean, var = mean.double().cpu(), var.double().cpu()
            noise = torch.randn(count, len(mean), generator=generator, dtype=torch.float64)
            self.memory[f"means.{number}"] = mean + wide * var.sqrt() * noise  # (K, C)
            self.memory[f"vars.{number}"] = ((1 - share) * var).expand(count, -1).clone()

    def look(self, images: Tensor, update: bool) -> None:
        """Is told of each pass before it begins; with `update`, the components follow it."""
        self._updating = update and self.enabled
        if self._updating:  # the old one is the backup
            self.memory = {name: tensor.to(images.device, copy=True) for name, tensor in self.memory.items()}

    def normalised(self, layer: _BatchNorm, number: int, activations: Tensor) -> Tensor | None:
        """Each image normalised with the mixture as it moves it; gradients flow through its own statistics."""
        if not self.enabled:
            return None
        axes = tuple(range(2, activations.dim()))
        var, mean = torch.var_mean(activations, axes, correction=0)  # (B, C)
        means = self.memory[f"means.{number}"].to(activations)  # (K, C)
        spreads = self.memory[f"vars.{number}"].to(activations)
        with torch.no_grad():
            shares = _cosine(mean, means).div(TEMPERATURE).softmax(1)  # (B, K)
        # Averages over k of (1 - π) μ_k + π m, of its square, and of (1 - π) σ²_k + π s².
        keep, take = 1 - shares, shares
        count = len(means)
        first = (keep @ means + take.sum(1, keepdim=True) * mean) / count
        square = (
            keep.square() @ means.square()
            + 2 * ((keep * take) @ means) * mean
            + take.square().sum(1, keepdim=True) * mean.square()
        ) / count
        within = (keep @ spreads + take.sum(1, keepdim=True) * var) / count
        total = within + square - first.square()
        if self._updating:
            self._follow(layer, number, shares, mean.detach(), var.detach())
        scale = (total.clamp_min(0) + layer.eps).rsqrt()
        shape = (*first.shape, *([1] * len(axes)))
        return (activations - first.view(shape)) * scale.view(shape)

    def _follow(self, layer: _BatchNorm, number: int, shares: Tensor, mean: Tensor, var: Tensor) -> None:
        momentum = MOMENTUM if layer.momentum is None else layer.momentum
        rate = 1 - (1 - momentum) ** (len(mean) / self.full_batch)
        with torch.no_grad():
            weights = shares.double() / len(shares)  # (B, K)
            for name, values in (("means", mean), ("vars", var)):
                old = self.memory[f"{name}.{number}"]
                pulled = weights.T @ values.double() - weights.sum(0)[:, None] * old
                self.memory[f"{name}.{number}"] = old + rate * pulled


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosines between the rows of a (B, C) and b (K, C)."""
    return nn.functional.normalize(a, dim=1) @ nn.functional.normalize(b, dim=1).T


def _kept(statistic: Tensor | None) -> Tensor:
    if statistic is None:
        raise ValueError("normalisation='unmix-tns' needs source statistics, but a BatchNorm layer tracks none")
    return statistic.clone()
