"""Feature grouping (Sec. 4.2): correlated dimensions together, by spectral clustering on absolute correlations."""

import math
import warnings

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# A dimension whose variance is below this share of the largest one counts as dead. Its eigenvalue would be floored for
# the source but not for the batch, and tr C⁻¹ would ask the network to make it vary, at any price.
DEAD_SHARE = 1e-6


def correlation(cov: Tensor) -> Tensor:
    """Correlation coefficients of a covariance; 0 with dimensions that do not vary.

    >>> correlation(torch.tensor([[4.0, 3.0], [3.0, 9.0]])).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    scale = cov.diagonal().clamp(min=0).sqrt()  # (D,)
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    return (cov * inverse[:, None] * inverse).clamp(-1, 1)


def dead_dims(cov: Tensor) -> Tensor:
    """Which dimensions vary hardly or not at all: they are in no group. (D,) bool"""
    variance = cov.diagonal()
    return variance <= DEAD_SHARE * variance.max().clamp(min=0)


def default_num_groups(num_live: int) -> int:
    """The paper's 128 groups, or its 16 dimensions a group where there are fewer than 2048.

    >>> [default_num_groups(dims) for dims in (2048, 512, 128, 8, 4096)]
    [128, 32, 8, 1, 128]
    """
    return max(1, min(128, num_live // 16))


def group_features(
    cov: Tensor, num_groups: int, seed: int = 0, max_group_size: int | None = None
) -> tuple[Tensor, ...]:
    """Splits the live dimensions into groups of correlated ones: K index tensors, largest group first.

    Spectral clustering (scikit-learn's defaults) on A = |correlation|. Groups wider than `max_group_size` are split
    again in the same way, so there may be more than `num_groups`. The same seed gives the same groups.
    """
    live = torch.nonzero(~dead_dims(cov)).flatten()
    if not len(live):
        raise ValueError("expected features that vary, but every dimension of the covariance is constant")
    if not 1 <= num_groups <= len(live):
        raise ValueError(
            f"expected `num_groups` between 1 and {len(live)}, the number of features that vary "
            f"(of {len(cov)}), but got {num_groups}"
        )
    if max_group_size is not None and max_group_size < 1:
        raise ValueError(f"expected `max_group_size` to be at least 1 or None, but got {max_group_size}")
    affinity = correlation(cov[live][:, live].double()).abs().cpu().numpy()
    limit = len(live) if max_group_size is None else max_group_size
    parts = _cluster(affinity, np.arange(len(live)), num_groups, seed)
    groups: list[npt.NDArray[np.int64]] = []
    while parts:
        part = parts.pop()
        if len(part) <= limit:
            groups.append(np.sort(part))
        else:
            parts += _split(affinity, part, limit, seed)
    groups.sort(key=lambda part: (-len(part), part[0]))
    return tuple(live[torch.from_numpy(part)] for part in groups)


def _split(
    affinity: npt.NDArray[np.float64], part: npt.NDArray[np.int64], limit: int, seed: int
) -> list[npt.NDArray[np.int64]]:
    pieces = math.ceil(len(part) / limit)
    parts = _cluster(affinity, part, pieces, seed)
    if max(map(len, parts)) > 0.9 * len(part):
        # Clustering only peels off outliers here. Cut into equal pieces along the second eigenvector of the graph,
        # which orders the dimensions so that correlated ones are neighbours.
        block = affinity[np.ix_(part, part)]
        root = 1 / np.sqrt(block.sum(1))
        vectors = np.linalg.eigh(block * root[:, None] * root)[1]
        order = np.argsort(vectors[:, -2] * root, kind="stable")
        parts = np.array_split(part[order], pieces)
    return parts


def _cluster(
    affinity: npt.NDArray[np.float64], part: npt.NDArray[np.int64], num_groups: int, seed: int
) -> list[npt.NDArray[np.int64]]:
    from sklearn.cluster import SpectralClustering  # takes a second to import, and only the training site needs it

    if num_groups == 1:
        return [part]
    if num_groups >= len(part):
        return [part[i : i + 1] for i in range(len(part))]
    with warnings.catch_warnings():
        # Exactly uncorrelated blocks make a graph of several components: nothing to warn of here.
        warnings.filterwarnings("ignore", message="Graph is not fully connected")
        # scikit-learn's solver falls back to a dense one where almost as many groups as dimensions are asked for.
        warnings.filterwarnings("ignore", message="k >= N")
        warnings.filterwarnings("ignore", message="Number of distinct clusters")
        labels = SpectralClustering(num_groups, affinity="precomputed", random_state=seed).fit_predict(
            affinity[np.ix_(part, part)]
        )
    return [part[labels == label] for label in np.unique(labels)]
