"""LAME: the answers of a batch are corrected so that images with similar features agree. The network never changes.

Boudiaf et al., Parameter-free online test-time adaptation, CVPR 2022. https://arxiv.org/abs/2201.05718
Original: https://github.com/fiveai/LAME (CC BY-NC-SA 4.0, not for commercial use). Written from the formulas.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from cafe_tta.adapter import Adapter, AdapterConfig, Report
from cafe_tta.classifier import SplitClassifier
from cafe_tta.options import option
from cafe_tta.traits import Traits

ITERATIONS = 100
CHANGE = 1e-8  # of the objective, relative: then it has converged


@dataclass(frozen=True)
class LAMEConfig(AdapterConfig):
    """Options of LAME.

    >>> LAMEConfig().neighbours
    5
    """

    batch_size: int = 64
    affinity: Literal["rbf", "knn", "linear"] = option("rbf", "How similar two images are, by their features.")
    neighbours: int = option(5, "Neighbours that knn agrees with, and by whose distance rbf is scaled.", least=1)
    weight: float = option(1.0, "λ: weight of the agreement.", least=0)


class LAME(Adapter):
    """Answers with the Y that minimises Σ_i KL(y_i‖p_i) - λ/2 Σ_ij k_ij y_i·y_j over the batch.

    Y ← softmax(ln p + λ K Y) until it stays. K compares features of unit length: exp(-‖f_i - f_j‖² / 2σ²) with σ the
    mean distance to the fifth neighbour (rbf), 1 for the 5 nearest others (knn), or f_i·f_j (linear).

    Logits are the logarithms of Y. A single image is answered as it is, and identical images have k = 1: the original
    divides by σ = 0 there. `predict` corrects its batch too: nothing is remembered.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = LAME(classifier)
    >>> adapter(torch.rand(8, 3, 2, 2)).exp().sum(1).round().tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """

    name = "lame"
    traits = Traits("answers", backward=(0, 0), smallest=(2, 2, 2), licence="CC BY-NC-SA 4.0")
    in_tables = False
    Config = LAMEConfig
    config: LAMEConfig
    presets: ClassVar = {"cifar": LAMEConfig(), "imagenet": LAMEConfig()}

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        features, logits = super().features_and_logits(images)
        if reason := self.why_unusable(features):
            return logits, Report(len(images), stepped=False, refused=True, reason=reason)
        if len(images) == 1:
            return logits, Report(1, stepped=False, reason="a single image has no neighbours to agree with")
        answers, iterations = self._corrected(features, logits)
        return answers, Report(len(images), stepped=True, notes={"iterations": float(iterations)})

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features, logits = super().features_and_logits(images)
        if len(images) > 1 and torch.isfinite(features).all():
            logits, _ = self._corrected(features, logits)
        return features, logits

    def exported(self) -> SplitClassifier:
        raise ValueError(
            "lame corrects the answers of a batch together, which no ordinary model does: nothing to export, and the "
            "classifier is as it was"
        )

    def _corrected(self, features: Tensor, logits: Tensor) -> tuple[Tensor, int]:
        affinity = self.config.weight * self._affinity(nn.functional.normalize(features.detach(), dim=1))
        anchor = (logits.detach().softmax(1) + 1e-10).log()
        log_answers, before = anchor.log_softmax(1), float("inf")
        for iteration in range(1, ITERATIONS + 1):
            log_answers = (anchor + affinity @ log_answers.exp()).log_softmax(1)
            answers = log_answers.exp()
            objective = float((answers * (log_answers - anchor - affinity @ answers / 2)).sum())
            if iteration > 2 and abs(objective - before) <= CHANGE * abs(before):
                break
            before = objective
        return log_answers, iteration

    def _affinity(self, features: Tensor) -> Tensor:
        """K (B, B) of features of unit length."""
        if self.config.affinity == "linear":
            return features @ features.T
        distances = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
        distances.fill_diagonal_(0)
        count = len(features)
        if self.config.affinity == "rbf":
            near = distances.topk(min(self.config.neighbours, count), largest=False).values[:, -1]
            scale = near.mean()
            return (-0.5 * (distances / scale).square()).exp() if scale > 0 else (distances == 0).to(features)
        nearest = (
            distances.fill_diagonal_(torch.inf).topk(min(self.config.neighbours, count - 1), largest=False).indices
        )
        return torch.zeros_like(distances).scatter_(1, nearest, 1.0)
