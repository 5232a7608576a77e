"""The source features as one Gaussian per group, and how far a batch is from them (Sec. 4.2, Appendix A.2).

With the source eigenpairs (λ, V) of a group, λ floored at ε, whiten the features with Λ^(-½) Vᵀ, and let w, C be mean
and covariance of the whitened batch. The log-determinants of the two directions cancel, and

    ½ [KL(t‖s) + KL(s‖t)] = ¼ [ tr C + tr C⁻¹ - 2d + wᵀ(I + C⁻¹)w ]

exactly. The batch enters only through its moments n, w, C of each group, and moments of several batches (or machines,
or of the source itself: 0 and I) merge exactly: see `merge`. Groups of similar width are padded and worked on together;
the D×D covariance of the batch is never formed. All of it is in float64, where the device has it: the cost is nothing
beside the network's, and a float32 Cholesky of a nearly singular C does fail on real features.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

EIGENVALUE_FLOOR = 1e-3  # ε of Sec. 4.2; docs/choices.md says how it was found
# A group counts as degenerate when a pivot of C is below this share of the mean pivot: C⁻¹ would be noise.
SMALLEST_PIVOT = 1e-10
# The fixed cost of a bucket, in units of one group's d² (a batch of 256, one CPU thread): half a millisecond.
BUCKET_COST = 8192


class GroupedStatistics(Protocol):
    """What is needed of the source: `SourceStats` has it."""

    @property
    def mean(self) -> Tensor: ...
    @property
    def groups(self) -> Iterable[Tensor]: ...
    @property
    def covs(self) -> Iterable[Tensor]: ...


@dataclass(frozen=True)
class Moments:
    """Number of samples, mean and covariance (divided by n) of whitened features, for K groups padded to width d."""

    count: Tensor  # (K,)
    mean: Tensor  # (K, d)
    cov: Tensor  # (K, d, d)

    def detach(self) -> "Moments":
        return Moments(self.count.detach(), self.mean.detach(), self.cov.detach())

    def with_count(self, count: Tensor) -> "Moments":
        """The same distribution, worth another number of samples."""
        return Moments(count, self.mean, self.cov)


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of the samples of `a` and of `b` taken together: exact."""
    count = a.count + b.count
    share = (b.count / count)[:, None]  # (K, 1)
    delta = b.mean - a.mean
    between = (share * (1 - share))[..., None] * delta[:, :, None] * delta[:, None, :]
    return Moments(count, a.mean + share * delta, a.cov + share[..., None] * (b.cov - a.cov) + between)


class Divergence(NamedTuple):
    """How far a batch is from the source, group by group."""

    values: Tensor  # (K,) symmetrised KL divergence of each group, in the order of the source's groups
    padded: Tensor  # (K,) bool: the batch was too small for this group, and was padded with other moments


@dataclass(frozen=True)
class _Bucket:
    """Groups of similar width, padded to the widest. A padded dimension is standard normal on both sides: it adds 0."""

    numbers: list[int]  # (K,) which groups these are
    dims: Tensor  # (K, d) feature dimensions, 0 where padded
    mean: Tensor  # (K, d)
    whitener: Tensor  # (K, d, d): Λ^(-½) Vᵀ, rows and columns of zeros where padded
    padding: Tensor  # (K, d, d): 1 on the diagonal where padded
    eigenvalues: Tensor  # (K, d): λ, not floored; 0 where padded
    scale: Tensor  # (K, d): √λ, floored; 0 where padded
    sizes: Tensor  # (K,)
    widest: int

    def to(self, device: torch.device, dtype: torch.dtype) -> "_Bucket":
        names = ("mean", "whitener", "padding", "eigenvalues", "scale", "sizes")
        floats = {name: getattr(self, name).to(device, dtype) for name in names}
        return _Bucket(self.numbers, self.dims.to(device), **floats, widest=self.widest)


@dataclass(frozen=True)
class _Layout:
    """The order of the features once their columns are arranged bucket by bucket."""

    columns: Tensor  # (P,) the feature in each column
    positions: Tensor  # (D,) the column of each feature; P for a feature in no group
    order: Tensor  # (K,) sorts values that come bucket by bucket into the order of the source's groups

    def to(self, device: torch.device) -> "_Layout":
        return _Layout(self.columns.to(device), self.positions.to(device), self.order.to(device))


class SourceGaussians:
    """The source's Gaussians, with eigenvalues floored, ready to compare batches with."""

    def __init__(self, source: GroupedStatistics, eigenvalue_floor: float) -> None:
        if not eigenvalue_floor > 0:
            raise ValueError(f"expected `eigenvalue_floor` to be above 0, but got {eigenvalue_floor}")
        self.num_features = len(source.mean)
        self.eigenvalue_floor = eigenvalue_floor
        groups, covs = list(source.groups), list(source.covs)
        self.num_groups = len(groups)
        self._buckets = [
            _bucket(numbers, source.mean, groups, covs, eigenvalue_floor)
            for numbers in _partition([len(dims) for dims in groups])
        ]
        self._layout = _layout(self._buckets, self.num_features)

    def moments(self, features: Tensor) -> list[Moments]:
        """Count, mean and covariance of a batch of whitened features: one `Moments` for each bucket of groups."""
        if features.dim() != 2 or features.shape[1] != self.num_features or not len(features):
            raise ValueError(
                f"expected features of shape (batch, {self.num_features}) with at least one row, "
                f"but got {tuple(features.shape)}"
            )
        self._move(features)
        flat = _WhitenedMoments.apply(features, _wide(features), self._buckets, self._layout)
        counts = [torch.full_like(bucket.sizes, len(features)) for bucket in self._buckets]
        return [Moments(count, flat[2 * i], flat[2 * i + 1]) for i, count in enumerate(counts)]

    def divergence(
        self,
        moments: list[Moments],
        samples_per_dim: float = 1.0,
        memory: list[Moments] | None = None,
        at_least: float = 0,
    ) -> Divergence:
        """Symmetrised KL divergence of each group from the source.

        A group of d dimensions needs max(`samples_per_dim` · d, `at_least`) samples. A smaller batch is padded: with
        `memory`, the moments of earlier batches, as far as they go, then with source moments (mean 0, covariance I).
        Groups that are degenerate for another reason (constant features) are padded with d + 1 samples of the source.
        Never fails, and never gives NaN for finite features.
        """
        values, padded = [], []
        for i, bucket in enumerate(self._buckets):
            own = total = moments[i]
            if float(own.count[0]) < max(samples_per_dim * bucket.widest, at_least):
                missing = ((samples_per_dim * bucket.sizes).clamp(min=at_least) - own.count).clamp(min=0)  # (K,)
                if memory is not None:
                    taken = torch.minimum(missing, memory[i].count)
                    total = merge(total, memory[i].with_count(taken))
                    missing = missing - taken
                total = merge(total, _source(total, missing))
            kl, degenerate = _SymmetricKL.apply(total.mean, total.cov)
            if degenerate.any():
                more = torch.where(degenerate, bucket.sizes + 1, torch.zeros_like(bucket.sizes))
                total = merge(total, _source(total, more))
                kl, _ = _SymmetricKL.apply(total.mean, total.cov)
            values.append(kl)
            padded.append(total.count > own.count)
        return Divergence(torch.cat(values)[self._layout.order], torch.cat(padded)[self._layout.order])

    def group_frechet(self, moments: list[Moments]) -> float:
        """The Fréchet distance from the source, summed over the groups.

        In the source's eigenbasis the batch has mean S w and covariance S C S with S = diag(√λ floored), and the source
        has covariance Λ, so that the distance of a group is |S w|² + tr Λ + tr S C S - 2 tr (Λ^½ S C S Λ^½)^½.
        """
        total = 0.0
        for bucket, part in zip(self._buckets, moments, strict=True):
            cov = bucket.scale[:, :, None] * part.cov * bucket.scale[:, None, :]  # (K, d, d)
            root = bucket.eigenvalues.clamp(min=0).sqrt()
            cross = torch.linalg.eigvalsh(root[:, :, None] * cov * root[:, None, :]).clamp(min=0).sqrt().sum(1)
            trace = (root.square() + cov.diagonal(dim1=1, dim2=2)).sum(1) - 2 * cross
            total += float(((bucket.scale * part.mean).square().sum(1) + trace).clamp(min=0).sum())
        return total

    def squared_shift(self, moments: list[Moments]) -> float:
        """The squared shift of the mean, in standard deviations of the source, averaged over the dimensions.

        Σ(‖w‖² - tr C / (n - 1)) / D: without bias, because the mean of n images has a variance of its own. Needs n ≥ 2.
        """
        total, dims = 0.0, 0.0
        for bucket, part in zip(self._buckets, moments, strict=True):
            trace = part.cov.diagonal(dim1=1, dim2=2).sum(1) - (bucket.widest - bucket.sizes)  # without the padding
            total += float((part.mean.square().sum(1) - trace / (part.count - 1)).sum())
            dims += float(bucket.sizes.sum())
        return total / dims

    @property
    def widest(self) -> int:
        """Dimensions of the widest group."""
        return max(bucket.widest for bucket in self._buckets)

    def pack(self, moments: list[Moments]) -> tuple[Tensor, Tensor]:
        """Moments of one batch as two plain tensors: the count, and all the rest. The inverse of `unpack`."""
        if not moments:
            return torch.zeros((), dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        return moments[0].count[0], torch.cat([part.flatten() for m in moments for part in (m.mean, m.cov)])

    def unpack(self, count: Tensor, values: Tensor) -> list[Moments]:
        """Moments of each bucket of groups, from the values that `pack` put in a row."""
        moments, start = [], 0
        for bucket in self._buckets:
            groups, width = bucket.dims.shape
            mean_end = start + groups * width
            cov_end = mean_end + groups * width**2
            mean = values[start:mean_end].view(groups, width).to(bucket.mean)
            cov = values[mean_end:cov_end].view(groups, width, width).to(bucket.mean)
            moments.append(Moments(count.to(bucket.mean).expand(groups), mean, cov))
            start = cov_end
        return moments

    def _move(self, features: Tensor) -> None:
        if self._buckets[0].mean.device != features.device:
            self._buckets = [bucket.to(features.device, _wide(features)) for bucket in self._buckets]
            self._layout = self._layout.to(features.device)


def _wide(features: Tensor) -> torch.dtype:
    return torch.float32 if features.device.type == "mps" else torch.float64  # MPS has no float64


def _partition(widths: Sequence[int]) -> list[list[int]]:
    """Groups by similar width, so that padding and the number of buckets together cost least.

    A bucket of K groups padded to d costs K·d², and BUCKET_COST for itself. In the order of their widths, the best
    buckets are neighbours: the cheapest way to cut the first n widths is found for each n in turn.
    """
    numbers = sorted(range(len(widths)), key=lambda number: widths[number])
    ordered = [widths[number] for number in numbers]
    ends = [end for end in range(1, len(ordered)) if ordered[end] > ordered[end - 1]] + [len(ordered)]
    best = {0: (0, [0])}  # number of groups in buckets so far: cost, and the cuts
    for end in ends:
        width = widths[numbers[end - 1]]
        cost, cuts = min((cost + (end - start) * width**2, cuts) for start, (cost, cuts) in best.items())
        best[end] = (cost + BUCKET_COST, [*cuts, end])
    return [numbers[start:end] for start, end in pairwise(best[len(numbers)][1])]


def _bucket(
    numbers: list[int], mean: Tensor, groups: list[Tensor], covs: list[Tensor], eigenvalue_floor: float
) -> _Bucket:
    width = max(len(groups[number]) for number in numbers)
    shape = (len(numbers), width)
    dims = torch.zeros(shape, dtype=torch.long)
    means = torch.zeros(shape, dtype=torch.float64)
    whitener = torch.zeros(*shape, width, dtype=torch.float64)
    padding = torch.eye(width, dtype=torch.float64).repeat(len(numbers), 1, 1)
    eigenvalues, scale = torch.zeros_like(means), torch.zeros_like(means)
    for row, number in enumerate(numbers):
        group = groups[number].cpu()
        size = len(group)
        values, vectors = torch.linalg.eigh(covs[number].cpu().double())
        dims[row, :size] = group
        means[row, :size] = mean.cpu().double()[group]
        eigenvalues[row, :size] = values
        scale[row, :size] = values.clamp(min=eigenvalue_floor).sqrt()
        whitener[row, :size, :size] = vectors.T / scale[row, :size, None]
        padding[row, :size] = 0  # whole rows: the rest of the diagonal belongs to the padding
    sizes = torch.tensor([len(groups[number]) for number in numbers], dtype=torch.float64)
    return _Bucket(numbers, dims, means, whitener, padding, eigenvalues, scale, sizes, width)


def _layout(buckets: list[_Bucket], num_features: int) -> _Layout:
    columns = torch.cat([bucket.dims.flatten() for bucket in buckets])
    real = torch.cat([1 - bucket.padding.diagonal(dim1=1, dim2=2).flatten() for bucket in buckets]).bool()
    positions = torch.full((num_features,), len(columns))
    positions[columns[real]] = real.nonzero().squeeze(1)
    order = torch.tensor([number for bucket in buckets for number in bucket.numbers]).argsort()
    return _Layout(columns, positions, order)


def _source(like: Moments, count: Tensor) -> Moments:
    """Moments of the source itself, whitened: mean 0, covariance I."""
    eye = torch.eye(like.mean.shape[1], dtype=like.cov.dtype, device=like.cov.device)
    return Moments(count, torch.zeros_like(like.mean), eye.expand_as(like.cov))


class _WhitenedMoments(torch.autograd.Function):
    """Mean and covariance (divided by B) of whitened features, for one bucket after the other: w, C, w, C, …

    Written out, because autograd would go through the features some ten times, and this is most of what the loss costs.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, wide: torch.dtype, buckets: list[_Bucket], layout: _Layout
    ) -> tuple[Tensor, ...]:
        rows = features.T.contiguous().index_select(0, layout.columns).to(wide)  # (P, B)
        mean = rows.mean(1)
        centred = rows.sub_(mean[:, None])
        results: list[Tensor] = []
        start = 0
        for bucket in buckets:
            groups, width = bucket.dims.shape
            end = start + groups * width
            samples = centred[start:end].view(groups, width, -1)  # (K, d, B)
            cov = (samples @ samples.mT).div_(len(features))
            delta = mean[start:end].view(groups, width) - bucket.mean
            results.append((bucket.whitener @ delta[..., None]).squeeze(-1))
            results.append(torch.baddbmm(bucket.padding, bucket.whitener @ cov, bucket.whitener.mT))
            start = end
        # The gradient is linear in the features: their own precision is enough for it, and costs half.
        ctx.save_for_backward(centred.to(features.dtype))
        ctx.buckets, ctx.layout = buckets, layout
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_moments: Tensor) -> tuple[Tensor, None, None, None]:
        (centred,) = ctx.saved_tensors
        batch = centred.shape[1]
        by_columns = centred.new_empty(len(centred) + 1, batch)  # one more, for features in no group
        by_columns[-1] = 0
        start = 0
        for i, bucket in enumerate(ctx.buckets):
            groups, width = bucket.dims.shape
            end = start + groups * width
            by_mean, by_cov = by_moments[2 * i], by_moments[2 * i + 1]
            pulled = bucket.whitener.mT @ (by_cov + by_cov.mT) @ bucket.whitener
            pushed = bucket.whitener.mT @ by_mean[..., None]  # (K, d, 1)
            samples = centred[start:end].view(groups, width, batch)
            by_samples = by_columns[start:end].view(groups, width, batch)
            torch.baddbmm((pushed / batch).to(samples), (pulled / batch).to(samples), samples, out=by_samples)
            start = end
        by_features = by_columns.index_select(0, ctx.layout.positions)  # (D, B)
        return by_features.T, None, None, None


class _SymmetricKL(torch.autograd.Function):
    """¼ [tr C + tr C⁻¹ - 2d + wᵀ(I + C⁻¹)w] with its gradient in closed form: one Cholesky serves both.

    Degenerate groups get 0 and no gradient: the caller pads them. What is not finite stays NaN.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        factor, info = torch.linalg.cholesky_ex(cov)
        pivots = factor.diagonal(dim1=1, dim2=2).square()  # (K, d)
        smallest = SMALLEST_PIVOT * pivots.mean(1)
        degenerate = (info != 0) | ~(pivots.amin(1) > smallest) | ~smallest.isfinite()
        eye = torch.eye(cov.shape[1], dtype=cov.dtype, device=cov.device).expand_as(cov)
        factor = torch.where(degenerate[:, None, None], eye, factor)
        inverse = torch.cholesky_inverse(factor)  # (K, d, d): C⁻¹
        solved = (inverse @ mean[..., None]).squeeze(-1)  # (K, d): C⁻¹w
        trace = (cov + inverse).diagonal(dim1=1, dim2=2).sum(1) - 2 * cov.shape[1]
        values = (trace + (mean * (mean + solved)).sum(1)) / 4
        values = torch.where(degenerate, 0.0, values)
        values += 0 * (cov.sum((1, 2)) + mean.sum(1))  # NaN where something is not finite
        ctx.save_for_backward(mean, inverse, solved, degenerate)
        ctx.mark_non_differentiable(degenerate)
        return values, degenerate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        mean, inverse, solved, degenerate = ctx.saved_tensors
        grad = torch.where(degenerate, torch.zeros_like(grad), grad) / 4  # (K,)
        eye = torch.eye(inverse.shape[1], dtype=inverse.dtype, device=inverse.device)
        by_mean = 2 * (mean + solved)
        by_cov = eye - inverse @ inverse - solved[:, :, None] * solved[:, None, :]
        return grad[:, None] * by_mean, grad[:, None, None] * by_cov
