"""Clusters of image styles that follow a stream: one where it is uniform, more where it is mixed.

The last styles of the stream are divided into cells by k-means on their principal components, and cells that are parts
of one cloud are joined again. Two clouds are told apart only where

    t = |m₁ - m₂| / (s₁ + s₂) > threshold

with their means m and their standard deviations s along m₁ - m₂. A Gaussian cloud cut in two has t = 1.33, a uniform
one 1.73, two that hardly overlap have 2 and more. The pair with the smallest t is joined first, and counts as one cloud
from then on. What remains apart are the clusters; an image far outside of all of them is a stranger.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cafe_tta.styles import StyleStats

THRESHOLD = 1.9  # of t
MANY, FINER = 6, 0.8  # clusters, at least, that make a stream one of many kinds: then 0.8 of the threshold is enough
CELLS = 16  # at most
BUFFER = 2048  # styles that the cells are made of
COMPONENTS = 12  # principal components of the styles in the buffer
PER_CELL = 24  # styles for each cell, while the stream is young
FEWEST = 4  # styles: a cell with fewer is given up
FRESH = 32  # new styles after which cells and clusters are made again
ROUNDS = 5  # of k-means, at most, each time
STRANGE = 1.6  # times a cluster's root mean square distance from its mean: the images farther out are strangers
SOURCE_LIKE, UNLIKE_SOURCE = 0.6, 1.0  # t between a cluster and the source: below, like it; above, unlike it
RARE = 0.15  # of the images: where fewer are in clusters that seem unlike the source, these may be rare source images
RARE_LIKE, RARE_UNLIKE = 2.5, 3.0  # t, for such clusters


class StyleClusters:
    """Assigns styles to cells, and cells to clusters. Everything that it remembers is in `memory`.

    >>> source = StyleStats(torch.zeros(8), torch.eye(8))
    >>> clusters = StyleClusters(source)
    >>> dark, noisy = torch.randn(2, 200, 8) + torch.tensor([[[9.0]], [[-9.0]]])
    >>> cells, _ = clusters.follow(source.embed(torch.cat([dark, noisy])))
    >>> clusters.sizes
    [200, 200]
    """

    def __init__(self, styles: StyleStats, threshold: float = THRESHOLD) -> None:
        self.threshold, self.spread = threshold, styles.spread
        width = len(styles.mean)
        self.memory = {
            "styles": torch.zeros(BUFFER, width, dtype=torch.float64),  # a ring buffer
            "seen": torch.tensor(0),  # styles of the whole stream
            "fresh": torch.tensor(0),  # of them, since cells and clusters were made
            "used": torch.tensor(0),  # cells that there are; the other rows below are empty
            "mean": torch.zeros(width, dtype=torch.float64),  # of the buffer, when the cells were made
            "basis": torch.zeros(width, min(COMPONENTS, width), dtype=torch.float64),
            "centres": torch.zeros(CELLS, width, dtype=torch.float64),
            "images": torch.zeros(CELLS, dtype=torch.long),  # of each cell in the buffer
            "cluster": torch.arange(CELLS),  # of each cell: the number of one of its cells
            "kind": torch.arange(CELLS),  # of each cell: the cluster before it was cut finer, likewise
            "middle": torch.zeros(CELLS, width, dtype=torch.float64),  # of each cell's cluster: its mean
            "reach": torch.zeros(CELLS, dtype=torch.float64),  # its root mean square distance from the mean
            "shift": torch.ones(CELLS, dtype=torch.float64),  # 0: like the source; 1: unlike it
        }

    @property
    def counts(self) -> dict[int, int]:
        """Images of every cluster among the last ones by its number, the largest first."""
        sizes = torch.bincount(self.memory["cluster"], self.memory["images"].double()).long().tolist()
        return {number: size for number, size in sorted(enumerate(sizes), key=lambda pair: -pair[1]) if size}

    @property
    def sizes(self) -> list[int]:
        """Images of every cluster among the last ones, the largest first."""
        return list(self.counts.values())

    @property
    def joined(self) -> Tensor:
        """Which cells are of the same cluster: 0 or 1. (CELLS, CELLS)"""
        return _same(self.memory["cluster"])

    @property
    def akin(self) -> Tensor:
        """Which cells are of the same kind: one cluster, or several that it was cut into: 0 or 1. (CELLS, CELLS)"""
        return _same(self.memory["kind"])

    def nearest(self, styles: Tensor) -> Tensor:
        """The cell of each style (n, S); -1: none yet, or a stranger. (n,)"""
        memory = {name: tensor.numpy() for name, tensor in self.memory.items()}
        used = int(memory["used"])
        if not used:
            return torch.full((len(styles),), -1)
        vectors = styles.numpy()
        basis = memory["basis"]
        cells = _nearest((vectors - memory["mean"]) @ basis, (memory["centres"][:used] - memory["mean"]) @ basis)
        distance = np.linalg.norm(vectors - memory["middle"][cells], axis=1)  # NaN: of a style that is not finite
        return torch.from_numpy(np.where(distance <= STRANGE * memory["reach"][cells], cells, -1))

    def follow(self, styles: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
        """Follows new styles (n, S): their cells, -1 for strangers, and which cell each new cell was split from."""
        self.memory = {name: tensor.clone() for name, tensor in self.memory.items()}  # the old one is the backup
        seen = int(self.memory["seen"])
        usable = styles[styles.isfinite().all(1)]
        kept = usable[-BUFFER:]
        slots = torch.arange(seen + len(usable) - len(kept), seen + len(usable)) % BUFFER
        self.memory["styles"][slots] = kept
        self.memory["seen"] += len(usable)
        self.memory["fresh"] += len(usable)
        splits: list[tuple[int, int]] = []
        if len(usable) and (int(self.memory["fresh"]) >= FRESH or seen < FRESH):
            splits = self._make_cells()
            self.memory["fresh"].zero_()
        return self.nearest(styles), splits

    def _make_cells(self) -> list[tuple[int, int]]:
        memory = {name: tensor.numpy() for name, tensor in self.memory.items()}  # shared with the tensors
        count = min(int(memory["seen"]), BUFFER)
        styles = memory["styles"][:count]
        mean = styles.mean(0)
        vectors = np.linalg.eigh(np.cov((styles - mean).T, bias=True))[1]
        basis = vectors[:, ::-1][:, : memory["basis"].shape[1]]
        points = (styles - mean) @ basis
        used = int(memory["used"])
        centres = (memory["centres"][:used] - mean) @ basis if used else np.zeros((1, points.shape[1]))
        centres, labels, splits = _k_means(points, centres, int(np.clip(count // PER_CELL, 1, CELLS)))
        used = len(centres)
        memory["used"][...], memory["mean"][...], memory["basis"][...] = used, mean, basis
        memory["centres"][:used] = mean + centres @ basis.T
        memory["images"][:used] = np.bincount(labels, minlength=used)
        memory["kind"][:used], memory["cluster"][:used] = self._join(points, labels, used)
        self._describe_clusters(memory, styles, memory["cluster"][labels])
        return splits

    def _join(self, points: Any, labels: Any, used: int) -> tuple[Any, Any]:
        """Kind and cluster of every cell. Where there are many kinds, they come at all strengths, and overlap."""
        kinds = _joined(points, labels, used, self.threshold, self.spread**0.5)
        if len(np.unique(kinds)) < MANY:
            return kinds, kinds
        return kinds, _joined(points, labels, used, FINER * self.threshold, self.spread**0.5)

    def _describe_clusters(self, memory: dict[str, Any], styles: Any, clusters: Any) -> None:
        numbers, sizes = np.unique(clusters, return_counts=True)
        t = np.zeros(len(numbers))
        for place, cluster in enumerate(numbers):
            own = styles[clusters == cluster]
            middle = own.mean(0)
            square = max(((own - middle) ** 2).sum(1).mean(), self.spread * len(middle))
            cells = memory["cluster"] == cluster
            memory["middle"][cells] = middle
            memory["reach"][cells] = np.sqrt(square)
            length = np.linalg.norm(middle)
            # The mean of few styles is long by chance: as long as that of a stranger, at most.
            shift = np.sqrt(max(length**2 - STRANGE**2 * square / len(own), 0))
            t[place] = shift / (self.spread**0.5 + (own @ (middle / max(length, 1e-12))).std())
        rare = sizes[t > SOURCE_LIKE].sum() < RARE * len(styles)
        low, high = (RARE_LIKE, RARE_UNLIKE) if rare else (SOURCE_LIKE, UNLIKE_SOURCE)
        for cluster, shift in zip(numbers, np.clip((t - low) / (high - low), 0, 1), strict=True):
            memory["shift"][memory["cluster"] == cluster] = shift


def _same(numbers: Tensor) -> Tensor:
    return (numbers[:, None] == numbers).double()


def _nearest(points: Any, centres: Any) -> Any:
    return ((centres**2).sum(1) - 2 * points @ centres.T).argmin(1)


def _k_means(points: Any, centres: Any, wanted: int) -> tuple[Any, Any, list[tuple[int, int]]]:
    """k-means from these centres; the widest cells are split until there are enough: centres, cells, (from, new)."""
    splits: list[tuple[int, int]] = []
    centres, labels = _lloyd(points, centres)
    given_up = False
    while True:
        images = np.bincount(labels, minlength=len(centres))
        if len(centres) < wanted:
            new = len(centres)
        elif images.min() < FEWEST and len(centres) > 1 and not given_up:  # one at a time
            new, given_up = int(images.argmin()), True
        else:
            return centres, labels, splits
        errors = np.bincount(labels, ((points - centres[labels]) ** 2).sum(1), minlength=len(centres))
        widest = int(np.where((images > 2 * FEWEST) & (np.arange(len(centres)) != new), errors, -1).argmax())
        if images[widest] <= 2 * FEWEST:
            return centres, labels, splits
        values, vectors = np.linalg.eigh(np.cov(points[labels == widest].T))
        half = 0.8 * np.sqrt(max(values[-1], 0)) * vectors[:, -1]  # the means of the halves of a Gaussian
        middle = centres[widest].copy()
        centres = np.concatenate([centres, middle[None]]) if new == len(centres) else centres
        centres[widest], centres[new] = middle - half, middle + half
        splits.append((widest, new))
        centres, labels = _lloyd(points, centres)


def _lloyd(points: Any, centres: Any) -> tuple[Any, Any]:
    labels = _nearest(points, centres)
    for _ in range(ROUNDS):
        one_hot = labels == np.arange(len(centres))[:, None]  # (K, n)
        images = one_hot.sum(1)[:, None]
        centres = np.where(images, one_hot @ points / np.maximum(images, 1), centres)
        before, labels = labels, _nearest(points, centres)
        if (before == labels).all():
            break
    return centres, labels


def _joined(points: Any, labels: Any, used: int, threshold: float, narrowest: float) -> Any:
    """The cluster of every cell, as the number of one of its cells. No cloud counts as narrower than `narrowest`."""
    images = np.bincount(labels, minlength=used).astype(float)
    means, covs = np.zeros((used, points.shape[1])), np.zeros((used, points.shape[1], points.shape[1]))
    for cell in np.flatnonzero(images):
        own = points[labels == cell]
        means[cell], covs[cell] = own.mean(0), np.cov(own.T, bias=True)

    def separation(cell: int) -> Any:
        """t between the cloud of a cell and all others."""
        line = means - means[cell]
        length = np.linalg.norm(line, axis=1)
        line /= np.maximum(length, 1e-12)[:, None]
        widths = np.sqrt(np.maximum(np.einsum("ip,ipq,iq->i", line, covs, line), narrowest**2))
        own = np.sqrt(np.maximum(np.einsum("ip,pq,iq->i", line, covs[cell], line), narrowest**2))
        return np.where((images > 0) & (np.arange(used) != cell), length / (widths + own), np.inf)

    clusters = np.arange(used)
    t = np.stack([separation(cell) if images[cell] else np.full(used, np.inf) for cell in range(used)])
    while t.min() <= threshold:
        kept, gone = divmod(int(t.argmin()), used)
        share, line = images[gone] / (images[kept] + images[gone]), means[gone] - means[kept]
        covs[kept] += share * (covs[gone] - covs[kept]) + share * (1 - share) * np.outer(line, line)
        means[kept] += share * line
        images[kept], images[gone] = images[kept] + images[gone], 0
        clusters[clusters == gone] = kept
        t[gone], t[:, gone] = np.inf, np.inf
        t[kept] = t[:, kept] = separation(kept)
    return clusters
