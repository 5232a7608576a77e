"""Unmixing: BatchNorm normalises each image with the images of the stream that are corrupted like it.

The statistics of a mixed batch describe no single image's corruption. So images are clustered by their style (see
`styles` and `clusters`), online and without labels. Every cell of the clusters keeps n, Σμ and Σq: the number of its
images, and the sums of their channel means μ and mean squares q in every BatchNorm layer. An image is normalised with
the sums of all cells of its cluster:

    mean = w (Σμ + N μ_source) / (n + N) + (1 - w) μ_source,    var likewise from Σq, less mean²

where N images of the source are the prior, and w is 0 for a cluster whose style is the source's and 1 for one that is
clearly another. Clusters that one kind of images was cut into (see `clusters`) have 128 images with the statistics of
the whole kind as their prior. A stranger, an image like none of the clusters, has the source's statistics. While the
last images are of few classes, w is smaller for all, down to 0, and images count for less in the sums (see
`diversity`).
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cafe_tta.channels import NormalisedInput
from cafe_tta.clusters import CELLS, THRESHOLD, StyleClusters
from cafe_tta.distributed import ALONE, Ranks
from cafe_tta.diversity import Diversity
from cafe_tta.styles import StyleStats, describe

PRIOR = 32.0  # images of the source in the statistics of every cluster
KIND = 128.0  # images of its kind in the statistics of every cluster that is but a part of a kind
WINDOW = 1000  # images of the stream after which one counts e times less
THINNED = 16  # pixels a side: larger maps have their moments taken over every second pixel in each direction
FUSED = 64  # pixels: for larger maps, BatchNorm's own kernel is twice as fast as a multiplication with broadcasting


class Unmixer:
    """Gives the BatchNorm layers of a network the statistics of each image's cluster."""

    def __init__(
        self,
        layers: Sequence[_BatchNorm],
        styles: StyleStats,
        num_classes: int,
        *,
        window: float,
        prior: float = PRIOR,
        threshold: float = THRESHOLD,
        expected: float | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.styles, self.prior, self.window, self.threshold, self.ranks = styles, prior, window, threshold, ranks
        self._classes = num_classes, expected
        self._follows = False  # whether anything follows the pass at hand
        self.enabled = True  # off: the source's statistics, as without unmixing
        self.members = torch.zeros(0, dtype=torch.long)  # cells of the images of the pass at hand; -1: of none
        self.shifted = 1.0  # share of the images of the pass whose style is not the source's
        self._measures = False  # whether any image of the pass is measured, and
        self._counts = torch.zeros(0)  # how much each of them counts in its cell; 0: it is not measured
        self._offsets = np.cumsum([0, *(layer.num_features for layer in layers)]).tolist()
        for number, layer in enumerate(layers):
            _Hooks(self, layer, slice(self._offsets[number], self._offsets[number + 1]))
        self.reset()

    def reset(self) -> None:
        """Forgets every cluster."""
        self.clusters = StyleClusters(self.styles, self.threshold)
        self.diversity = Diversity(*self._classes)
        self._memory = {
            "weights": torch.zeros(CELLS, dtype=torch.float64),  # n: images that the sums of a cell stand for
            "sums": torch.zeros(2, CELLS, self._offsets[-1], dtype=torch.float64),  # Σμ and Σq
        }
        self._pool()

    @property
    def memory(self) -> dict[str, Tensor]:
        """All that is remembered of the stream."""
        return {**self.clusters.memory, **self._memory, **self.diversity.memory}

    @memory.setter
    def memory(self, tensors: Mapping[str, Tensor]) -> None:
        self._memory = {name: tensors[name] for name in self._memory}
        self.clusters.memory = {name: tensors[name] for name in self.clusters.memory}
        self.diversity.memory = {name: tensors[name] for name in self.diversity.memory}
        self._pool()

    @property
    def counts(self) -> dict[int, int]:
        """Images of every cluster among the last ones by its number, the largest first."""
        return self.clusters.counts

    @property
    def numbers(self) -> Tensor:
        """The number of each image's cluster in the last pass; -1: in none. (B,)"""
        return nn.functional.pad(self.clusters.memory["cluster"], (0, 1), value=-1)[self.members]

    def look(self, images: Tensor, update: bool) -> None:
        """Assigns the images of the next pass to clusters; with `update`, the clusters follow them."""
        self._follows = update and self.enabled
        if not self.enabled:
            return
        styles = self.styles.embed(describe(images))
        if update:
            cells, splits = self.clusters.follow(self.ranks.gather(self.ranks.own_part(styles)))
            counts = self._follow(cells, splits)
            self._measures = bool(counts.any())
            shift = torch.cat([self.clusters.memory["shift"], torch.ones(1, dtype=torch.float64)])  # -1: strangers
            self.shifted = shift[cells].mean().item()
            cells, counts = self.ranks.own_rows(cells), self.ranks.own_rows(counts)
            placeholders = (0, len(images) - len(cells))
            self.members = nn.functional.pad(cells, placeholders, value=-1)
            self._counts = nn.functional.pad(counts, placeholders)
        else:
            self.members = self.clusters.nearest(styles)
            self._measures = False

    def _follow(self, cells: Tensor, splits: list[tuple[int, int]]) -> Tensor:
        """Divides the sums of cells that were split, lets older images fade, and says how much each new one counts."""
        weights, sums = self._memory["weights"].clone(), self._memory["sums"].clone()  # the old ones are the backup
        for cell, half in splits:
            weights[cell] = weights[half] = weights[cell] / 2
            sums[:, cell] /= 2
            sums[:, half] = sums[:, cell]
        fade = math.exp(-len(cells) / self.window)
        counts = (cells >= 0).double() * self.diversity.trust
        weights = (weights * fade).index_add(0, cells.clamp(min=0), counts)
        self._memory = {"weights": weights, "sums": sums.mul_(fade)}
        self._pool()
        return counts

    def answered(self, logits: Tensor) -> bool:
        """Follows the answers of the pass. True where they show, as earlier ones did not, images of few classes."""
        if not self._follows:
            return False
        trusted = self.diversity.trusted
        self.diversity.follow(self.ranks.gather(self.ranks.own_part(logits.detach().softmax(1))))
        self._pool()
        return trusted and not self.diversity.trusted

    def _pool(self) -> None:
        """Shares of the cells' sums, and of the source, in the statistics of every cell and, last, of strangers."""
        weights = self._memory["weights"]
        clusters, kinds = self.clusters.joined, self.clusters.akin
        in_cluster, in_kind = (clusters @ weights)[:, None], (kinds @ weights)[:, None]
        cut = (clusters != kinds).any(1, keepdim=True)  # whether the cluster is a part of its kind
        own = cut / (in_cluster + KIND)
        rest = 1 - own * in_cluster
        shift = self.clusters.memory["shift"][:, None] * self.diversity.trust
        shares = shift * (own * clusters + rest * kinds / (in_kind + self.prior))
        self._shares = nn.functional.pad(shares, (0, 0, 0, 1))  # (K + 1, K)
        source = 1 - shift + shift * rest * self.prior / (in_kind + self.prior)
        self._source_share = nn.functional.pad(source, (0, 0, 0, 1), value=1.0)  # (K + 1, 1)

    def scale_and_shift(
        self, activations: Tensor, channels: slice, source: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """1 / √(var + ε) and -mean / √(var + ε) for the images of every cell, and for strangers. (K + 1, C) each"""
        device, dtype = activations.device, activations.dtype
        sums = self._memory["sums"][:, :, channels].to(device)  # (2, K, C)
        if self._measures:
            measured = self._counts.nonzero().squeeze(1)
            one_hot = nn.functional.one_hot(self.members[measured], CELLS).T * self._counts[measured]  # (K, measured)
            own = activations if len(measured) == len(activations) else activations[measured.to(device)]
            new = self.ranks.reduce((one_hot.to(device, dtype) @ _moments(own)).double())
            sums = sums + new.view(CELLS, 2, -1).transpose(0, 1)
            self._memory["sums"][:, :, channels] = sums.detach().cpu()
        mean, square = self._source_share.to(device) * source[:, None] + self._shares.to(device) @ sums
        scale = ((square - mean.square()).clamp(min=0) + eps).rsqrt()
        return scale.to(dtype), (-mean * scale).to(dtype)

    @property
    def sizes(self) -> list[int]:
        """Images of every cluster among the last ones, the largest first."""
        return self.clusters.sizes

    def use_largest(self, layers: Sequence[_BatchNorm]) -> None:
        """Gives ordinary layers, which have the source's statistics, those of the largest cluster, if there is one."""
        images = self.clusters.joined @ self.clusters.memory["images"].double()
        if not images.any():
            return
        largest = int(images.argmax())  # one of its cells
        for number, layer in enumerate(layers):
            assert layer.running_mean is not None and layer.running_var is not None
            mean, var = layer.running_mean.double().cpu(), layer.running_var.double().cpu()
            channels = slice(self._offsets[number], self._offsets[number + 1])
            source = torch.stack([mean, var + mean.square()])
            sums = self._shares[largest] @ self._memory["sums"][:, :, channels]  # (2, C)
            mean, square = sums + self._source_share[largest] * source
            layer.running_mean.copy_(mean)
            layer.running_var.copy_((square - mean.square()).clamp(min=0))

    def notes(self) -> dict[str, float]:
        """For the report of a batch: clusters, the shares of the largest and of shifted images, effective classes."""
        sizes = self.sizes
        if not sizes:
            return {}
        of_clusters = {"clusters": float(len(sizes)), "largest_cluster": sizes[0] / sum(sizes), "shifted": self.shifted}
        return {**of_clusters, "classes": self.diversity.classes}


def _moments(activations: Tensor) -> Tensor:
    """Mean and mean square of every channel of every image. Large maps: of every second pixel. (B, 2C)"""
    if activations.dim() == 4 and min(activations.shape[2:]) >= THINNED:
        layout = torch.channels_last if activations.is_contiguous(memory_format=torch.channels_last) else None
        thinned = activations[:, :, ::2, ::2]
        activations = thinned.contiguous(memory_format=layout) if layout else thinned.contiguous()
    pixels = activations.shape[2:].numel()
    if pixels == 1:
        means = activations.flatten(1)
        return torch.cat([means, means.square()], 1)
    if activations.is_contiguous() and not torch.is_grad_enabled():  # then these are several times as fast
        maps = activations.flatten(2)  # (B, C, P)
        means = (maps @ maps.new_full((pixels, 1), 1 / pixels)).squeeze(2)
        return torch.cat([means, torch.einsum("bcp,bcp->bc", maps, maps) / pixels], 1)
    dims = list(range(2, activations.dim()))
    return torch.cat([activations.mean(dims), activations.square().mean(dims)], 1)


class _Hooks:
    """Gives a BatchNorm layer statistics of its own for each image.

    A plain BatchNorm layer gets another `forward`, of a single multiplication and addition. Libraries have BatchNorm
    layers that also apply the activation: those get activations that are normalised already, by hooks.
    """

    def __init__(self, unmixer: Unmixer, layer: _BatchNorm, channels: slice) -> None:
        if layer.running_mean is None or layer.running_var is None:
            raise ValueError("normalisation='unmix' needs source statistics, but a BatchNorm layer tracks none")
        self.unmixer, self.channels, self.layer = unmixer, channels, layer
        mean = layer.running_mean.detach().double()
        self.source = torch.stack([mean, layer.running_var.detach().double() + mean.square()])  # (2, C)
        if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            layer.forward = self._forward  # type: ignore[method-assign, assignment]
        else:
            NormalisedInput(layer, self._normalised)

    def _forward(self, activations: Tensor) -> Tensor:
        if not self.unmixer.enabled:
            return type(self.layer).forward(self.layer, activations)
        scale, shift = self._statistics(activations)
        if self.layer.affine:
            scale, shift = scale * self.layer.weight, shift * self.layer.weight + self.layer.bias
        return self._affine(activations, scale, shift)

    def _statistics(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        source = self.source.to(activations.device)
        return self.unmixer.scale_and_shift(activations, self.channels, source, self.layer.eps)

    def _normalised(self, activations: Tensor) -> Tensor | None:
        return self._affine(activations, *self._statistics(activations)) if self.unmixer.enabled else None

    def _affine(self, activations: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        members = self.unmixer.members.to(activations.device)
        return _affine(activations, scale[members], shift[members])


def _affine(activations: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x · scale + shift, with one of both for every channel of every image (B, C)."""
    pixels = activations.shape[2:].numel()
    if pixels >= FUSED and activations.is_contiguous():  # each channel of each image as a channel of one image
        channels = scale.numel()
        plain = activations.new_zeros(channels), activations.new_ones(channels)
        flat = activations.view(1, channels, *activations.shape[2:])
        fused = nn.functional.batch_norm(flat, *plain, scale.flatten(), shift.flatten(), eps=0.0)
        return fused.view(activations.shape)
    shape = (*scale.shape, *([1] * (activations.dim() - 2)))
    return torch.addcmul(shift.view(shape), activations, scale.view(shape))
