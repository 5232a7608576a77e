"""Unmixing: BatchNorm normalises each image with the images of the stream that are corrupted like it.

The statistics of a mixed batch describe no single image's corruption. So images are clustered by their style (see
`styles`), online and without labels, and every cluster k keeps the sums n_k, Σμ, Σq of its images' channel means μ and
mean squares q in every BatchNorm layer. An image of cluster k is normalised with

    mean_k = (Σμ + N μ_source) / (n_k + N),    var_k = (Σq + N q_source) / (n_k + N) - mean_k²

where N images of the source are the prior. The number of clusters follows the stream (DP-means): an image farther from
every centre than a threshold opens a cluster of its own, centres that come close are merged, and when there is no room
the smallest cluster is forgotten. Clean or uniformly corrupted images stay within the threshold: one cluster.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cafe_tta.styles import StyleStats, describe

PRIOR = 16.0  # images of the source in the statistics of every cluster
THRESHOLD = 1.5  # times the median radius of source styles: an image farther from every centre opens a cluster
MAX_CLUSTERS = 32
THINNED = 16  # pixels a side: larger maps have their moments taken over every second pixel in each direction
CENTRE_WINDOW = 512  # images that a centre averages over
MERGE_SHARE = 0.5  # of the threshold: closer centres are merged
FORGET = 20_000  # images after which a cluster that gets no more of them counts e times less


class Unmixer:
    """Clusters of image styles, and the BatchNorm statistics of each."""

    def __init__(
        self,
        layers: Sequence[_BatchNorm],
        styles: StyleStats,
        *,
        prior: float,
        window: float,
        threshold: float,
        max_clusters: int = MAX_CLUSTERS,
    ) -> None:
        if not styles.radius > 0:
            raise ValueError(
                "unmixing needs a sample of source styles, but these statistics have none; make them again"
            )
        self.styles, self.prior, self.window, self.max_clusters = styles, prior, window, max_clusters
        self.threshold = threshold * styles.radius
        self.enabled = True  # off: the source's statistics, as without unmixing
        self._offsets = np.cumsum([0, *(layer.num_features for layer in layers)]).tolist()
        self._members = torch.zeros(0, dtype=torch.long)  # of the images of the pass at hand; -1: in no cluster
        self._updating = False
        for number, layer in enumerate(layers):
            _Hooks(self, layer, slice(self._offsets[number], self._offsets[number + 1]))
        self.reset()

    def reset(self) -> None:
        """Forgets every cluster."""
        count, width = self.max_clusters, self._offsets[-1]
        self.memory = {
            "centres": torch.zeros(count, len(self.styles.mean), dtype=torch.float64),
            "images": torch.zeros(count, dtype=torch.float64),  # of each cluster; 0: a free slot
            "weights": torch.zeros(count, dtype=torch.float64),  # n: images that the sums stand for
            "sums": torch.zeros(2, count, width, dtype=torch.float64),  # Σμ and Σq
        }

    @property
    def sizes(self) -> list[int]:
        """Images of every cluster, the largest first."""
        return sorted((round(size) for size in self.memory["images"].tolist() if size > 0), reverse=True)

    def look(self, images: Tensor, update: bool) -> None:
        """Assigns the images of the next pass to clusters; with `update`, the clusters follow them."""
        if not self.enabled:
            return
        embedded = self.styles.embed(describe(images)).numpy()
        self._updating = update
        if update:
            self.memory = {name: tensor.clone() for name, tensor in self.memory.items()}  # the old one is the backup
            self._members = torch.from_numpy(self._follow(embedded))
            self._make_room()
        else:
            self._members = torch.from_numpy(self._nearest(embedded))

    def _nearest(self, embedded: Any) -> Any:
        used = np.flatnonzero(self.memory["images"].numpy() > 0)
        if not len(used):
            return np.full(len(embedded), -1)
        distances = np.linalg.norm(embedded[:, None] - self.memory["centres"].numpy()[used], axis=2)
        nearest = used[distances.argmin(1)]
        return np.where(distances.min(1) <= self.threshold, nearest, -1)

    def _follow(self, embedded: Any) -> Any:
        """Assigns one image after the other; centres move, and clusters are opened where there is none near."""
        centres, images = self.memory["centres"].numpy(), self.memory["images"].numpy()
        images *= np.exp(-len(embedded) / FORGET)
        members = np.empty(len(embedded), dtype=np.int64)
        for row, vector in enumerate(embedded):
            distances = np.where(images > 0, np.linalg.norm(centres - vector, axis=1), np.inf)
            member = int(distances.argmin())
            if distances[member] > self.threshold:
                member = self._free_slot()
                centres[member] = vector
            images[member] += 1
            centres[member] += (vector - centres[member]) / min(images[member], CENTRE_WINDOW)
            members[row] = member
        return self._merge(members)

    def _free_slot(self) -> int:
        """The slot of a new cluster: a free one, or that of the smallest cluster, which is forgotten."""
        slot = int(self.memory["images"].argmin())
        self.memory["images"][slot] = self.memory["weights"][slot] = 0
        self.memory["sums"][:, slot] = 0
        return slot

    def _merge(self, members: Any) -> Any:
        """Merges the two centres that are closest, where they have come close."""
        images, centres = self.memory["images"], self.memory["centres"]
        used = torch.nonzero(images > 0).flatten()
        distances = torch.cdist(centres[used], centres[used]) + torch.diag(torch.full((len(used),), torch.inf))
        if len(used) < 2 or distances.min() > MERGE_SHARE * self.threshold:
            return members
        first, second = (int(used[i]) for i in divmod(int(distances.argmin()), len(used)))
        share = images[second] / (images[first] + images[second])
        centres[first] += share * (centres[second] - centres[first])
        for name in ("images", "weights"):
            self.memory[name][first] += self.memory[name][second]
            self.memory[name][second] = 0
        self.memory["sums"][:, first] += self.memory["sums"][:, second]
        self.memory["sums"][:, second] = 0
        return np.where(members == second, first, members)

    def _make_room(self) -> None:
        """Counts the images of the pass, and lets older ones fade so that a cluster stands for `window` at most."""
        weights = self.memory["weights"]
        new = torch.bincount(self._members, minlength=self.max_clusters).double()
        kept = (self.window - new).clamp(min=0)
        fade = torch.where(weights > kept, kept / weights.clamp(min=1e-12), torch.ones_like(weights))
        self.memory["sums"].mul_(fade[:, None])
        self.memory["weights"] = weights * fade + new

    def scale_and_shift(
        self, activations: Tensor, channels: slice, source: tuple[Tensor, Tensor], eps: float
    ) -> tuple[Tensor, Tensor]:
        """1 / √(var + ε) and -mean / √(var + ε) of each image's cluster, of which this pass is a part. (B, C) each"""
        device, dtype = activations.device, activations.dtype
        sums = self.memory["sums"][:, :, channels].to(device)  # (2, K, C)
        members, weights = self._members.to(device), self.memory["weights"].to(device)
        if self._updating:
            one_hot = nn.functional.one_hot(members, self.max_clusters).to(dtype)  # (B, K)
            sums = sums + (one_hot.T @ _moments(activations)).view(self.max_clusters, 2, -1).transpose(0, 1).double()
            self.memory["sums"][:, :, channels] = sums.detach().cpu()
        mean, square = (sums + self.prior * torch.stack(source)[:, None]) / (weights + self.prior)[:, None]  # (K, C)
        mean, square = torch.cat([mean, source[0][None]]), torch.cat([square, source[1][None]])  # -1: the source's
        scale = ((square - mean.square()).clamp(min=0) + eps).rsqrt()
        return scale.to(dtype)[members], (-mean * scale).to(dtype)[members]

    def notes(self) -> dict[str, float]:
        """For the report of a batch: the number of clusters, and the share of the largest."""
        sizes = self.sizes
        return {"clusters": float(len(sizes)), "largest_cluster": sizes[0] / sum(sizes)} if sizes else {}


def _moments(activations: Tensor) -> Tensor:
    """Mean and mean square of every channel of every image. Large maps: of every second pixel. (B, 2C)"""
    if activations.dim() == 4 and min(activations.shape[2:]) >= THINNED:
        layout = torch.channels_last if activations.is_contiguous(memory_format=torch.channels_last) else None
        thinned = activations[:, :, ::2, ::2]
        activations = thinned.contiguous(memory_format=layout) if layout else thinned.contiguous()
    if activations.shape[2:].numel() == 1:
        means = activations.flatten(1)
        return torch.cat([means, means.square()], 1)
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
        self.source = (mean, layer.running_var.detach().double() + mean.square())
        self._had: tuple[Tensor | None, Tensor | None] | None = None
        if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            layer.forward = self._forward  # type: ignore[method-assign, assignment]
        else:
            layer.register_forward_pre_hook(self._before)
            layer.register_forward_hook(self._after, always_call=True)  # also where the layer fails

    def _forward(self, activations: Tensor) -> Tensor:
        if not self.unmixer.enabled:
            return type(self.layer).forward(self.layer, activations)
        scale, shift = self._statistics(activations)
        if self.layer.affine:
            scale, shift = scale * self.layer.weight, shift * self.layer.weight + self.layer.bias
        return _affine(activations, scale, shift)

    def _statistics(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        source = (self.source[0].to(activations.device), self.source[1].to(activations.device))
        return self.unmixer.scale_and_shift(activations, self.channels, source, self.layer.eps)

    def _before(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not self.unmixer.enabled:
            return None
        normalised = _affine(args[0], *self._statistics(args[0]))
        self._had = self.layer.running_mean, self.layer.running_var
        self.layer.running_mean = normalised.new_zeros(normalised.shape[1])
        self.layer.running_var = torch.full_like(self.layer.running_mean, 1 - self.layer.eps)
        return (normalised, *args[1:])

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._had is not None:
            self.layer.running_mean, self.layer.running_var = self._had
            self._had = None


def _affine(activations: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x · scale + shift, with one of both for every channel of every image."""
    shape = (*scale.shape, *([1] * (activations.dim() - 2)))
    return torch.addcmul(shift.view(shape), activations, scale.view(shape))
