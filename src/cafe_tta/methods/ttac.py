"""TTAC: features get back the Gaussians of the source, of all images and of each class. Without its queue of images.

Su, Xu, Jia, Revisiting realistic test-time training: sequential inference and adaptation by anchored clustering,
NeurIPS 2022. https://arxiv.org/abs/2206.02721. Original: https://github.com/Gorilla-Lab-SCUT/TTAC (MIT). Written from
the formulas.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from cafe_tta.gradient import GradientAdapter, NothingToLearn, StepConfig
from cafe_tta.options import option
from cafe_tta.source.class_moments import ClassMoments
from cafe_tta.traits import Traits

MOMENTS = ("mean", "cov", "class_mean", "class_cov")
RIDGE = 30  # the largest source covariance divided by this is added to the diagonal of both


@dataclass(frozen=True)
class TTACConfig(StepConfig):
    """Options of TTAC.

    >>> TTACConfig().scale
    0.05
    """

    momentum: float = 0.9
    answer: Literal["before", "after", "after-eval"] = "after-eval"
    scale: float = option(0.05, "Weight of the divergence of all features.", least=0)
    class_scale: float | None = option(None, "Weight of a class's divergence; none is `scale` / classes.", least=0)
    min_confidence: float = option(0.9, "Images of a lower confidence belong to no class.", least=0, most=1)
    min_images: int = option(16, "Confident images after which a class is aligned.", least=1)
    window: int = option(1280, "Images that the moments of all features average over.", least=1)
    class_window: int = option(128, "Images that the moments of a class average over.", least=1)
    class_covariance: Literal["as-source", "diagonal"] = option(
        "as-source", "Whether a class has the source value's kind of covariance, or variances alone."
    )


class TTAC(GradientAdapter):
    """Minimises KL(N_s‖N_t) + KL(N_t‖N_s) between source and target features, of all and of each predicted class.

    The target's mean μ and covariance Σ are running ones, with a = max(1/n, 1/window) after n images:
    δ = a Σ(f - μ), μ ← μ + δ, Σ ← Σ + a Σ((f - μ)(f - μ)ᵀ - Σ) - δδᵀ; only the batch at hand gets a gradient. To both
    covariances max(Σ_s)/30 is added on the diagonal. Without the original's queue of images and its filter over time
    (TTAC-NQ). Where a batch has more images than the window, a = 1/B: the original's covariance is then indefinite, and
    its failure passed over in silence.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3)))
    >>> source = ClassMoments.fit(classifier, [torch.rand(64, 3, 2, 2)])
    >>> adapter = TTAC(classifier, source)
    >>> adapter(torch.rand(32, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([32, 3]), True)
    """

    name = "ttac"
    traits = Traits("the backbone", (2, 2), keeps="moments of all features and of each class", licence="MIT")
    in_tables = False
    needs = "class-moments"
    Config = TTACConfig
    config: TTACConfig
    presets: ClassVar = {
        "cifar": TTACConfig(lr=0.01),
        "cifar100": TTACConfig(scale=0.5, class_window=64),
        "imagenet": TTACConfig(batch_size=128, class_scale=0.05, class_window=64, class_covariance="diagonal"),
    }

    def prepare(self, source: Any) -> None:
        super().prepare(source)
        assert isinstance(source, ClassMoments)
        class_cov = source.class_cov
        if self.config.class_covariance == "diagonal" and class_cov.dim() == 3:
            class_cov = class_cov.diagonal(dim1=1, dim2=2).clone()
        for name, value in zip(MOMENTS, (source.mean, source.cov, source.class_mean, class_cov), strict=True):
            self.register_buffer(f"source_{name}", value.clone(), persistent=False)
        self._usable = source.class_counts >= 2  # a class that the source has not cannot be aligned
        self._ridges = _ridge(source.cov), [_ridge(cov) for cov in class_cov]

    def reset(self) -> None:
        super().reset()
        for name in MOMENTS:
            setattr(self, f"target_{name}", nn.Buffer(torch.zeros_like(self.get_buffer(f"source_{name}"))))
        self.counts = nn.Buffer(torch.zeros(1 + self.classifier.num_classes, dtype=torch.long))  # all, then classes

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        source, target = self._moments("source"), self._moments("target")
        counts = self.counts.clone()
        counts[0] += len(features)
        mean, cov = _moved(features, target[0], target[1], int(counts[0]), self.config.window)
        if not torch.isfinite(cov).all():
            raise NothingToLearn("the covariance of its features is not finite")
        overall = _divergence(source[0], source[1], mean, cov, self._ridges[0])
        class_mean, class_cov = target[2].clone(), target[3].clone()
        of_classes = self._class_divergence(features, logits.detach(), counts[1:], class_mean, class_cov)
        self.notes["divergence"] = overall.item()
        self.counts = nn.Buffer(counts)
        for name, value in zip(MOMENTS, (mean, cov, class_mean, class_cov), strict=True):
            setattr(self, f"target_{name}", nn.Buffer(value.detach().to(target[0])))
        return (self.config.scale * overall + of_classes).to(features.dtype)

    def _class_divergence(
        self, features: Tensor, logits: Tensor, counts: Tensor, means: Tensor, covs: Tensor
    ) -> Tensor:
        """The divergence of the classes in the batch; counts and moments of the target are brought up to date."""
        _, _, source_means, source_covs = self._moments("source")
        config = self.config
        scale = config.scale / len(means) if config.class_scale is None else config.class_scale
        confidence, labels = logits.softmax(1).max(1)
        labels = torch.where(confidence > config.min_confidence, labels, -1)
        divergences = []
        for label in labels[labels >= 0].unique().tolist():
            own = features[labels == label]
            counts[label] += len(own)
            mean, cov = _moved(own, means[label], covs[label], int(counts[label]), config.class_window)
            if counts[label] >= config.min_images and self._usable[label]:
                ridge = self._ridges[1][label]
                divergences.append(_divergence(source_means[label], source_covs[label], mean, cov, ridge))
            means[label], covs[label] = mean.detach(), cov.detach()
        self.notes["classes"] = float(len(divergences))
        return scale * torch.stack(divergences).sum() if divergences else means.new_zeros((), dtype=torch.float64)

    def _moments(self, whose: str) -> list[Tensor]:
        return [self.get_buffer(f"{whose}_{name}") for name in MOMENTS]


def _ridge(cov: Tensor) -> float:
    return max(float(cov.max()), 1e-6) / RIDGE


def _moved(features: Tensor, mean: Tensor, cov: Tensor, seen: int, window: int) -> tuple[Tensor, Tensor]:
    """Running mean and covariance (a vector: variances) after these features, the last of `seen`."""
    share = 1 / min(seen, max(window, len(features)))
    centred = features - mean
    step = share * centred.sum(0)
    whole = cov.dim() == 2
    products = centred.T @ centred if whole else centred.square().sum(0)
    away = torch.outer(step, step) if whole else step.square()
    return mean + step, cov + share * (products - len(features) * cov) - away


def _divergence(mean: Tensor, cov: Tensor, other_mean: Tensor, other_cov: Tensor, ridge: float) -> Tensor:
    """KL(p‖q) + KL(q‖p) of two Gaussians with `ridge` added to their variances, in float64.

    ½ [tr(Q⁻¹P) + tr(P⁻¹Q) - 2D + δᵀ(P⁻¹ + Q⁻¹)δ]: the logarithms of the determinants cancel.
    """
    delta = (other_mean - mean).double()
    p, q = cov.double(), other_cov.double()
    if p.dim() == 1:
        p, q = p + ridge, q + ridge
        return (p / q + q / p - 2 + delta.square() * (1 / p + 1 / q)).sum() / 2
    eye = torch.eye(len(p), dtype=p.dtype, device=p.device)
    p, q = p + ridge * eye, q + ridge * eye
    both = torch.cat([p, delta[:, None]], 1), torch.cat([q, delta[:, None]], 1)
    by_q, by_p = torch.linalg.solve(q, both[0]), torch.linalg.solve(p, both[1])
    traces = by_q[:, :-1].trace() + by_p[:, :-1].trace()
    return (traces - 2 * len(p) + delta @ (by_q[:, -1] + by_p[:, -1])) / 2
