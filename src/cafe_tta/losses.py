"""The losses of the methods: pure functions of features and logits."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cafe_tta.gaussians import EIGENVALUE_FLOOR, GroupedStatistics, SourceGaussians


def entropy(logits: Tensor) -> Tensor:
    """Softmax entropy of each prediction, in nats. (B, C) -> (B,)

    >>> entropy(torch.zeros(1, 4)).exp().round().item()
    4.0
    """
    log_probs = logits.log_softmax(1)
    return -(log_probs.exp() * log_probs).sum(1)


def opinion_entropy(logits: Tensor) -> Tensor:
    """COME: entropy of a subjective opinion, whose mass of uncertainty is C / (Σ exp z + C). (B, C) -> (B,)

    It is the softmax entropy with a further logit ln C; the length of the logits gets no gradient, so that a
    prediction cannot become certain by growing alone. Zhang et al., COME, ICLR 2025. https://arxiv.org/abs/2410.10894

    >>> sure, unsure = torch.tensor([[9.0, 0, 0]]), torch.zeros(1, 3)
    >>> bool(opinion_entropy(sure) < opinion_entropy(unsure))
    True
    """
    length = torch.linalg.vector_norm(logits, dim=1, keepdim=True).clamp_min(torch.finfo(logits.dtype).tiny)
    fixed = logits / length * length.detach()
    unsure = fixed.new_full((len(fixed), 1), math.log(fixed.shape[1]))
    return entropy(torch.cat([fixed, unsure], 1))


def soft_likelihood_ratio(logits: Tensor) -> Tensor:
    """-Σ_c p̂_c ln(p̂_c / (1 - p̂_c) + 1e-5) with p̂ = min(p, 0.99): certain predictions still have a gradient (ROID).

    >>> losses = soft_likelihood_ratio(torch.tensor([[3.0, 0, 0], [0, 0, 0]]))
    >>> bool(losses[0] < losses[1])
    True
    """
    probs = logits.softmax(1).clamp(max=0.99)
    return -(probs * (probs / (1 - probs) + 1e-5).log()).sum(1)


def symmetric_cross_entropy(a: Tensor, b: Tensor) -> Tensor:
    """-½ Σ p_b ln p_a - ½ Σ p_a ln p_b of two sets of logits, with gradients of both. 2 × (B, C) -> (B,)

    >>> logits = torch.tensor([[1.0, 2.0, 3.0]])
    >>> torch.allclose(symmetric_cross_entropy(logits, logits), entropy(logits))
    True
    """
    log_a, log_b = a.log_softmax(1), b.log_softmax(1)
    return -(log_b.exp() * log_a + log_a.exp() * log_b).sum(1) / 2


def _mean(*values: Tensor) -> tuple[Tensor, ...]:
    return tuple(value.mean(0) for value in values)


def infomax(logits: Tensor, mean: Callable[..., tuple[Tensor, ...]] = _mean) -> Tensor:
    """Be confident on each image, diverse over the batch: mean entropy - entropy of the mean (Eq. 4).

    `mean` averages over the batch: over the parts of a batch that is spread over processes, if need be.

    >>> sure_and_diverse = 50 * torch.eye(4)
    >>> infomax(sure_and_diverse).exp().item()  # the least it can be: 1 / number of classes
    0.25
    """
    marginal, each = mean(logits.softmax(1), entropy(logits))  # (C,) and ()
    return each + (marginal * marginal.clamp_min(1e-12).log()).sum()


def alignment(
    features: Tensor,
    source: GroupedStatistics | SourceGaussians,
    eigenvalue_floor: float = EIGENVALUE_FLOOR,
    samples_per_dim: float = 1.0,
) -> Tensor:
    """L_a: the symmetrised KL divergence between batch and source features, averaged over the groups (Eq. 2-3).

    Exact as long as the batch has more images than the widest group has dimensions; a smaller one is padded with source
    moments (`SourceGaussians.divergence`), so that every batch gives a finite loss.
    """
    gaussians = source if isinstance(source, SourceGaussians) else SourceGaussians(source, eigenvalue_floor)
    divergence = gaussians.divergence(gaussians.moments(features), samples_per_dim)
    return divergence.values.mean().to(features.dtype)


def soft_histogram(values: Tensor, edges: Tensor, temperature: float) -> Tensor:
    """Soft counts of each unit's values in the bins between its edges and in the two open ends (FR).

    values (B, U), edges (U, E) ascending -> (U, E + 1): softmax over bins j of (j·x - Σ_{i<j} e_i) / τ, summed over B.

    >>> edges = torch.tensor([[0.0, 1.0]])
    >>> soft_histogram(torch.tensor([[-1.0], [0.5], [0.6]]), edges, temperature=0.01).round().tolist()
    [[1.0, 2.0, 0.0]]
    """
    numbers = torch.arange(1, edges.shape[1] + 2, dtype=values.dtype, device=values.device)  # (E + 1,)
    offsets = torch.nn.functional.pad(edges.cumsum(1), (1, 0))  # (U, E + 1)
    logits = values[:, :, None] * numbers - offsets  # (B, U, E + 1)
    return (logits / temperature).softmax(2).sum(0)


def histogram_divergence(counts: Tensor, source_counts: Tensor) -> Tensor:
    """Symmetrised KL divergence of each unit's histogram from the source's, in units of ln(bins). 2 × (U, J) -> (U,)"""
    p = counts / counts.sum(1, keepdim=True)
    q = source_counts / source_counts.sum(1, keepdim=True)
    log_ratio = (p + 1e-8).log() - (q + 1e-8).log()
    return ((p - q) * log_ratio).sum(1) / math.log(counts.shape[1])


def squared_distance(tensors: Sequence[Tensor], means: Sequence[Tensor], precisions: Sequence[Tensor]) -> Tensor:
    """½ Σ (θ - μ)² · precision: minus the log density of a diagonal Gaussian, but for a constant (BACS).

    >>> squared_distance([torch.tensor([3.0])], [torch.tensor([1.0])], [torch.tensor([0.5])]).item()
    1.0
    """
    terms = zip(tensors, means, precisions, strict=True)
    return torch.stack([_SquaredDistance.apply(t, mean, precision) for t, mean, precision in terms]).sum()


class _SquaredDistance(torch.autograd.Function):
    """½ Σ (θ - μ)² · precision of one tensor. Its gradient is ready after the forward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
        delta = tensor - mean
        pull = delta * precision
        ctx.save_for_backward(pull)
        return torch.dot(delta.flatten(), pull.flatten()) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (pull,) = ctx.saved_tensors
        return grad * pull, None, None
