"""What is measured: the Fréchet distance between Gaussians (Appendix A.3), accuracy and calibration error."""

import torch
from torch import Tensor


def frechet_distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    """‖μa - μb‖² + tr(Σa + Σb - 2 (Σa Σb)^½), in float64.

    >>> one = torch.eye(2)
    >>> round(frechet_distance(torch.zeros(2), one, torch.tensor([3.0, 0.0]), 4 * one), 6)
    11.0
    """
    return FrechetReference(mean_a, cov_a).distance(mean_b, cov_b)


class FrechetReference:
    """One of the two Gaussians, with half of the work done: for many distances from the same one."""

    def __init__(self, mean: Tensor, cov: Tensor) -> None:
        self.mean, self.cov = _plain(mean), _plain(cov)
        if self.mean.dim() != 1 or self.cov.shape != (len(self.mean),) * 2:
            raise ValueError(
                "expected a mean (D,) and a covariance (D, D), "
                f"but got {tuple(self.mean.shape)} and {tuple(self.cov.shape)}"
            )
        values, vectors = torch.linalg.eigh(self.cov)
        self._root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T

    def distance(self, mean: Tensor, cov: Tensor) -> float:
        mean, cov = _plain(mean), _plain(cov)
        if mean.shape != self.mean.shape or cov.shape != self.cov.shape:
            raise ValueError(
                f"expected a mean {tuple(self.mean.shape)} and a covariance {tuple(self.cov.shape)}, "
                f"but got {tuple(mean.shape)} and {tuple(cov.shape)}"
            )
        # tr (Σa Σb)^½ = tr (Ra Σb Ra)^½ with Ra the symmetric root of Σa: symmetric matrices have real eigenvalues ≥ 0,
        # and no matrix square root of a product is needed.
        cross = torch.linalg.eigvalsh(self._root @ cov @ self._root).clamp(min=0).sqrt().sum()
        distance = (self.mean - mean).square().sum() + self.cov.trace() + cov.trace() - 2 * cross
        return max(0.0, float(distance))


def _plain(tensor: Tensor) -> Tensor:
    return torch.as_tensor(tensor).detach().cpu().double()


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of images whose largest logit is that of their label."""
    return (logits.argmax(1) == labels).double().mean().item()


def calibration_error(confidences: Tensor, right: Tensor, bins: int = 15) -> float:
    """Expected calibration error: how far confidence and accuracy lie apart, in `bins` equally wide bins.

    Σ n_b / n · |accuracy_b - mean confidence_b|, with (0, 1/bins] as the first bin (Guo et al., ICML 2017).
    A confidence is the largest probability of an answer; `right` says whether it is the answer of the label.

    >>> round(calibration_error(torch.tensor([0.9, 0.9, 0.9, 0.9]), torch.tensor([True, True, False, True])), 6)
    0.15
    """
    if confidences.dim() != 1 or confidences.shape != right.shape or not len(right):
        raise ValueError(
            "expected as many confidences as answers, and at least one, "
            f"but got shapes {tuple(confidences.shape)} and {tuple(right.shape)}"
        )
    values, hits = _plain(confidences), _plain(right)
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise ValueError("expected confidences between 0 and 1; take the largest value of a softmax")
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    number = torch.bucketize(values, edges[1:-1])  # (n,) of 0 .. bins - 1; an edge belongs to the bin below it
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, number, hits - values)
    return float(gaps.abs().sum() / len(values))
