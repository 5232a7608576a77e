"""What is measured: the Fréchet distance between Gaussians (Appendix A.3) and accuracy."""

import torch
from torch import Tensor


def frechet_distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    """‖μa - μb‖² + tr(Σa + Σb - 2 (Σa Σb)^½), in float64.

    >>> one = torch.eye(2)
    >>> round(frechet_distance(torch.zeros(2), one, torch.tensor([3.0, 0.0]), 4 * one), 6)
    11.0
    """
    mean_a, mean_b = (torch.as_tensor(mean).detach().cpu().double() for mean in (mean_a, mean_b))
    cov_a, cov_b = (torch.as_tensor(cov).detach().cpu().double() for cov in (cov_a, cov_b))
    if mean_a.dim() != 1 or mean_a.shape != mean_b.shape or not cov_a.shape == cov_b.shape == (len(mean_a),) * 2:
        raise ValueError(
            f"expected means (D,) and covariances (D, D), but got {tuple(mean_a.shape)}, {tuple(cov_a.shape)}, "
            f"{tuple(mean_b.shape)}, {tuple(cov_b.shape)}"
        )
    # tr (Σa Σb)^½ = tr (Ra Σb Ra)^½ with Ra the symmetric root of Σa: symmetric matrices have real eigenvalues ≥ 0,
    # and no matrix square root of a product is needed.
    values, vectors = torch.linalg.eigh(cov_a)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    distance = (mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross
    return max(0.0, float(distance))


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of images whose largest logit is that of their label."""
    return (logits.argmax(1) == labels).double().mean().item()
