"""ROID: weighted soft likelihood ratios, consistency under augmentation, and weights that are pulled to the source.

Marsden, Döbler, Yang, Universal test-time adaptation through weight ensembling, diversity weighting, and prior
correction, WACV 2024. https://arxiv.org/abs/2306.00650
Original: https://github.com/mariodoebler/test-time-adaptation (MIT). Written from the formulas.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from cafe_tta import losses
from cafe_tta.adapter import Report
from cafe_tta.augmentation import Augmentation
from cafe_tta.gradient import GradientAdapter, NothingToLearn
from cafe_tta.methods.selective import NormConfig
from cafe_tta.options import option
from cafe_tta.traits import NORM, Traits

TEMPERATURE = 1 / 3


@dataclass(frozen=True)
class AugmentConfig(NormConfig):
    """Options of methods that augment images."""

    pixel_mean: list[float] | None = option(
        None,
        "What was subtracted from the pixels of each channel, which augmentation must know; the commands fill it in. "
        "None: each batch's lowest and highest values count as black and white.",
    )
    pixel_std: list[float] | None = option(None, "What the pixels of each channel were then divided by.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.pixel_mean is None) != (self.pixel_std is None):
            raise ValueError("expected `pixel_mean` and `pixel_std` together, but got one of them")


@dataclass(frozen=True)
class ROIDConfig(AugmentConfig):
    """Options of ROID.

    >>> ROIDConfig().keep
    0.99
    """

    lr: float = 2.5e-4
    weighting: bool = option(True, "Whether images count by certainty and diversity, and the less diverse do not.")
    consistency: bool = option(True, "Whether predictions of augmented images are made to agree.")
    keep: float = option(0.99, "Share of the weights that a step leaves; the rest is the source's.", least=0, most=1)
    prior_correction: bool = option(True, "Whether answers are corrected by the mean prediction of their batch.")
    quirks: Literal["repaired", "official"] = option(
        "repaired", "Whether the errors of the published code are repaired, or kept to reproduce its numbers."
    )


class ROID(GradientAdapter):
    """Minimises Σ w (SLR(p) + SCE(p, p of the augmented image)) / B over the more diverse images of the batch.

    With d = 1 - cos(q, p), q a running mean of predictions, and u = -H(p), both scaled to [0, 1] over the batch,
    w = exp(3 d u), and images with d below its mean are left out. SLR: `losses.soft_likelihood_ratio`; SCE: symmetric
    cross-entropy. After a step, θ ← 0.99 θ + 0.01 θ₀. Answers are corrected by their batch's smoothed mean prediction.

    Repaired, unless quirks="official": the correction multiplies probabilities, as in the paper (the original
    multiplies logits, so that negative ones prefer rare classes); the loss is divided by the images of the batch, not
    by `batch_size`. A batch whose predictions are all alike, such as one image, is answered without a step: the
    original's weights are then NaN. Where one image is left, BatchNorm cannot normalise its copy, and consistency is
    left out.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = ROID(classifier)
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([8, 3]), True)
    """

    name = "roid"
    traits = Traits(
        NORM,
        (1, 2),
        (1, 2),
        smallest=(2, 2, 2),
        keeps="the mean prediction",
        licence="MIT",
    )
    in_tables = False
    Config = ROIDConfig
    config: ROIDConfig
    presets: ClassVar = {
        "cifar": ROIDConfig(batch_size=200, lr=1e-3, optimizer="adam"),
        "imagenet": ROIDConfig(nesterov=True),
    }

    def reset(self) -> None:
        super().reset()
        classes = self.classifier.num_classes
        self.mean_prediction = nn.Buffer(self.classifier.head.weight.new_full((classes,), 1 / classes))

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        logits, report = super().answer(images)
        if self.config.prior_correction and len(images) > 1:
            logits = self._corrected(logits.detach())
        return logits, report

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        weights = self._weights(logits.detach())  # (B,): 0 for images that are left out
        chosen = weights > 0
        size = self.config.batch_size if self.config.quirks == "official" else len(logits)
        self.notes["selected"] = float(chosen.sum())
        loss = (weights[chosen] * losses.soft_likelihood_ratio(logits[chosen])).sum() / size
        self.notes["likelihood"] = loss.item()
        if self.config.consistency:
            loss = loss + self._consistency(logits[chosen], weights[chosen], chosen) / size
        return loss

    def after_step(self) -> None:
        """The pull to the source."""
        with torch.no_grad():
            for name, parameter in self.classifier.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.lerp(self._source_state[name].to(parameter), parameter, self.config.keep))

    def _weights(self, logits: Tensor) -> Tensor:
        """Certainty × diversity of each image; the running mean then follows the batch."""
        probs = logits.softmax(1)
        diversity = 1 - nn.functional.cosine_similarity(self.mean_prediction[None], probs, dim=1)
        self.mean_prediction = nn.Buffer(torch.lerp(self.mean_prediction, probs.mean(0), 0.1))
        if not self.config.weighting:
            return torch.ones_like(diversity)
        certainty = -losses.entropy(logits)
        if not (_varies(diversity) and _varies(certainty)):
            raise NothingToLearn("its predictions are all alike, so that none can be weighed against another")
        diversity, certainty = _scaled(diversity), _scaled(certainty)
        return (diversity * certainty / TEMPERATURE).exp() * (diversity >= diversity.mean())

    def _consistency(self, logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Σ w SCE between the chosen images and augmented copies, which BatchNorm normalises among themselves."""
        images = self.batch[self.kept][chosen]
        if self.normaliser.needs_many and len(images) < self.config.min_batch:
            return logits.new_zeros(())
        augment = Augmentation(self.config.pixel_mean, self.config.pixel_std, "reflection", blur=False, noise=0.0)
        self.normaliser.adapting(update=False)
        _, augmented = self.run(augment(images, self.generator()))
        return (weights * losses.symmetric_cross_entropy(augmented, logits)).sum()

    def _corrected(self, logits: Tensor) -> Tensor:
        """Answers times π̂ = (π + s) / (1 + s C): the mean prediction π, smoothed with s = max(1/B, 1/C) / max π."""
        count, classes = logits.shape
        prior = logits.softmax(1).mean(0)
        smoothing = max(1 / count, 1 / classes) / prior.max()
        prior = (prior + smoothing) / (1 + smoothing * classes)
        return logits * prior if self.config.quirks == "official" else logits + prior.log()


def _varies(values: Tensor) -> bool:
    return bool(values.max() - values.min() > torch.finfo(values.dtype).eps)


def _scaled(values: Tensor) -> Tensor:
    return (values - values.min()) / (values.max() - values.min())
