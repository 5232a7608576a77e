"""The source features as one Gaussian per group, and how far a batch is from them (Sec. 4.2, Appendix A.2).

With the source eigenpairs (λ, V) of a group, λ floored at ε, whiten the features with Λ^(-½) Vᵀ, and let w, C be mean
and covariance of the whitened batch. The log-determinants of the two directions cancel, and

    ½ [KL(t‖s) + KL(s‖t)] = ¼ [ tr C + tr C⁻¹ - 2d + wᵀ(I + C⁻¹)w ]

exactly. The batch enters only through its moments n, w, C of each group, and moments of several batches (or machines,
or of the source itself: 0 and I) merge exactly: see `merge`. Groups of similar width are padded and worked on together;
the D×D covariance of the batch is never formed. All of it is in float64, where the device has it: the cost is nothing
beside the network's, and a float32 Cholesky of a nearly singular C does fail on real features.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# A group counts as degenerate when a pivot of C is below this share of the mean pivot: C⁻¹ would be noise.
SMALLEST_PIVOT = 1e-10


class GroupedStatistics(Protocol):
    """What is needed of the source: `stats.SourceStats` has it."""

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
    completed: Tensor  # (K,) bool: the batch was too small for this group, and was completed


@dataclass(frozen=True)
class _Bucket:
    """Groups of similar width, padded to the widest. A padded dimension is standard normal on both sides: it adds 0."""

    numbers: Tensor  # (K,) which groups these are
    dims: Tensor  # (K, d) feature dimensions, 0 where padded
    mean: Tensor  # (K, d)
    whitener: Tensor  # (K, d, d): Λ^(-½) Vᵀ, rows and columns of zeros where padded
    padding: Tensor  # (K, d): 1 where padded
    sizes: Tensor  # (K,)

    def to(self, device: torch.device, dtype: torch.dtype) -> "_Bucket":
        floats = {name: getattr(self, name).to(device, dtype) for name in ("mean", "whitener", "padding", "sizes")}
        return _Bucket(self.numbers.to(device), self.dims.to(device), **floats)


class SourceGaussians:
    """The source's Gaussians, with eigenvalues floored, ready to compare batches with."""

    def __init__(self, source: GroupedStatistics, eigenvalue_floor: float) -> None:
        if not eigenvalue_floor > 0:
            raise ValueError(f"expected `eigenvalue_floor` to be above 0, but got {eigenvalue_floor}")
        self.num_features = len(source.mean)
        self.eigenvalue_floor = eigenvalue_floor
        groups, covs = list(source.groups), list(source.covs)
        self.num_groups = len(groups)
        widths: dict[int, list[int]] = {}
        for number, dims in enumerate(groups):
            widths.setdefault(_padded_width(len(dims)), []).append(number)
        self._buckets = [
            _bucket(numbers, source.mean, groups, covs, eigenvalue_floor) for _, numbers in sorted(widths.items())
        ]

    def moments(self, features: Tensor) -> list[Moments]:
        """Count, mean and covariance of a batch of whitened features: one `Moments` for each bucket of groups."""
        if features.dim() != 2 or features.shape[1] != self.num_features or not len(features):
            raise ValueError(
                f"expected features of shape (batch, {self.num_features}) with at least one row, "
                f"but got {tuple(features.shape)}"
            )
        self._move(features)
        batch = len(features)
        # One gather for all buckets: its backward pass writes a gradient of all the features, and once is enough.
        rows = features.T.contiguous().index_select(0, torch.cat([bucket.dims.flatten() for bucket in self._buckets]))
        parts = rows.to(_wide(features)).split([bucket.dims.numel() for bucket in self._buckets])
        moments = []
        for bucket, part in zip(self._buckets, parts, strict=True):
            mean, cov = _MeanAndCovariance.apply(part.view(*bucket.dims.shape, batch))
            whitened_mean = (bucket.whitener @ (mean - bucket.mean)[..., None]).squeeze(-1)
            whitened_cov = bucket.whitener @ cov @ bucket.whitener.mT
            moments.append(Moments(torch.full_like(bucket.sizes, batch), whitened_mean, whitened_cov))
        return moments

    def divergence(
        self,
        moments: list[Moments],
        samples_per_dim: float = 1.0,
        memory: list[Moments] | None = None,
        at_least: float = 0,
    ) -> Divergence:
        """Symmetrised KL divergence of each group from the source.

        A group of d dimensions wants `samples_per_dim` · d samples, and `at_least` so many. What a batch lacks is made
        up from `memory`, the moments of earlier batches, and the rest by samples of the source itself (mean 0,
        covariance I). Groups that are degenerate for another reason (constant features) are completed by d + 1 samples
        of the source. Never fails, and never gives NaN for finite features.
        """
        values, completed, numbers = [], [], []
        for i, bucket in enumerate(self._buckets):
            own = moments[i]
            wanted = (samples_per_dim * bucket.sizes).clamp(min=at_least)  # (K,)
            missing = (wanted - own.count).clamp(min=0)
            total = own
            if memory is not None:
                taken = torch.minimum(missing, memory[i].count)
                total = _merge_some(total, memory[i].with_count(taken))
                missing = missing - taken
            total = _merge_some(total, _source(total, missing))
            kl, degenerate = _symmetric_kl(total, bucket.padding)
            if degenerate.any():
                more = torch.where(degenerate, bucket.sizes + 1, torch.zeros_like(bucket.sizes))
                total = merge(total, _source(total, more))
                kl, _ = _symmetric_kl(total, bucket.padding)
            values.append(kl)
            completed.append(total.count > own.count)
            numbers.append(bucket.numbers)
        order = torch.cat(numbers).argsort()
        return Divergence(torch.cat(values)[order], torch.cat(completed)[order])

    def pack(self, moments: list[Moments]) -> tuple[Tensor, Tensor]:
        """Moments of one batch as two plain tensors: the count, and all the rest. The inverse of `unpack`."""
        if not moments:
            return torch.zeros((), dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        return moments[0].count[0], torch.cat([part.flatten() for m in moments for part in (m.mean, m.cov)])

    def unpack(self, count: Tensor, values: Tensor) -> list[Moments]:
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


def _wide(features: Tensor) -> torch.dtype:
    return torch.float32 if features.device.type == "mps" else torch.float64  # MPS has no float64


def _padded_width(width: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, …: at most half as much again, and few buckets."""
    power = 1 << (width - 1).bit_length()
    return power * 3 // 4 if width <= power * 3 // 4 and power >= 4 else power


def _bucket(
    numbers: list[int], mean: Tensor, groups: list[Tensor], covs: list[Tensor], eigenvalue_floor: float
) -> _Bucket:
    width = max(len(groups[number]) for number in numbers)
    shape = (len(numbers), width)
    dims = torch.zeros(shape, dtype=torch.long)
    means = torch.zeros(shape, dtype=torch.float64)
    whitener = torch.zeros(*shape, width, dtype=torch.float64)
    padding = torch.ones(shape, dtype=torch.float64)
    for row, number in enumerate(numbers):
        group = groups[number].cpu()
        size = len(group)
        values, vectors = torch.linalg.eigh(covs[number].cpu().double())
        dims[row, :size] = group
        means[row, :size] = mean.cpu().double()[group]
        whitener[row, :size, :size] = vectors.T / values.clamp(min=eigenvalue_floor).sqrt()[:, None]
        padding[row, :size] = 0
    sizes = torch.tensor([len(groups[number]) for number in numbers], dtype=torch.float64)
    return _Bucket(torch.tensor(numbers), dims, means, whitener, padding, sizes)


def _source(like: Moments, count: Tensor) -> Moments:
    """Moments of samples of the source itself, whitened."""
    eye = torch.eye(like.mean.shape[1], dtype=like.cov.dtype, device=like.cov.device)
    return Moments(count, torch.zeros_like(like.mean), eye.expand_as(like.cov))


def _merge_some(a: Moments, b: Moments) -> Moments:
    return merge(a, b) if bool((b.count > 0).any()) else a


def _symmetric_kl(moments: Moments, padding: Tensor) -> tuple[Tensor, Tensor]:
    cov = moments.cov + torch.diag_embed(padding * (1 - moments.cov.diagonal(dim1=1, dim2=2)))
    return _SymmetricKL.apply(moments.mean, cov)


class _MeanAndCovariance(torch.autograd.Function):
    """Mean and covariance (divided by B) over the last dimension. Its gradient is one product; autograd's is three."""

    @staticmethod
    def forward(ctx: Any, samples: Tensor) -> tuple[Tensor, Tensor]:
        mean = samples.mean(-1)  # (K, d)
        centred = samples - mean[..., None]  # (K, d, B)
        ctx.save_for_backward(centred)
        return mean, centred @ centred.mT / samples.shape[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_mean: Tensor, by_cov: Tensor) -> Tensor:
        (centred,) = ctx.saved_tensors
        by_samples = torch.baddbmm(by_mean[..., None], by_cov + by_cov.mT, centred)
        return by_samples.div_(centred.shape[-1])


class _SymmetricKL(torch.autograd.Function):
    """¼ [tr C + tr C⁻¹ - 2d + wᵀ(I + C⁻¹)w] with its gradient in closed form: one Cholesky serves both.

    Degenerate groups get 0 and no gradient: the caller completes them. What is not finite stays NaN.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        factor, info = torch.linalg.cholesky_ex(cov)
        pivots = factor.diagonal(dim1=1, dim2=2).square()  # (K, d)
        degenerate = (info != 0) | ~(pivots.amin(1) > SMALLEST_PIVOT * pivots.mean(1)) | ~torch.isfinite(pivots).all(1)
        eye = torch.eye(cov.shape[1], dtype=cov.dtype, device=cov.device).expand_as(cov)
        factor = torch.where(degenerate[:, None, None], eye, factor)
        inverse = torch.cholesky_inverse(factor)  # (K, d, d): C⁻¹
        solved = (inverse @ mean[..., None]).squeeze(-1)  # (K, d): C⁻¹w
        trace = (cov + inverse).diagonal(dim1=1, dim2=2).sum(1) - 2 * cov.shape[1]
        values = (trace + (mean * (mean + solved)).sum(1)) / 4
        unusable = ~torch.isfinite(mean).all(1) | ~torch.isfinite(cov).flatten(1).all(1)
        values = torch.where(unusable, torch.full_like(values, torch.nan), torch.where(degenerate, 0.0, values))
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
