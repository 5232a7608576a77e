"""ETA: entropy minimisation on images that are certain and unlike those before.

Niu et al., Efficient test-time model adaptation without forgetting, ICML 2022. https://arxiv.org/abs/2204.02610
Original: https://github.com/mr-eggplant/EATA (MIT). Written from the formulas.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from cafe_tta.gradient import NothingToLearn
from cafe_tta.methods.selective import SelectiveAdapter, SelectiveConfig
from cafe_tta.options import option
from cafe_tta.traits import NORM, Traits


@dataclass(frozen=True)
class ETAConfig(SelectiveConfig):
    """Options of ETA.

    >>> ETAConfig().max_entropy
    0.4
    """

    max_similarity: float = option(
        0.05,
        "ε: images whose prediction has at least this cosine with the running mean prediction are redundant.",
        above=0,
    )


class ETA(SelectiveAdapter):
    """Minimises exp(E₀ - H)·H over the images that are certain, H < E₀, and whose prediction p is not redundant.

    Redundant: |cos(m, p)| ≥ ε, where m is a running mean of the predictions learnt from: 0.9 m + 0.1 mean p.

    A reset also forgets m, which the original keeps. E₀ follows the number of classes.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = ETA(classifier, config=ETAConfig(max_entropy=1.0, max_similarity=1.0))
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([8, 3]), True)
    """

    name = "eta"
    traits = Traits(NORM, keeps="the mean prediction", licence="MIT")
    distributed = filters_as_one = True
    Config = ETAConfig
    config: ETAConfig
    presets: ClassVar = {
        "cifar": ETAConfig(batch_size=200, lr=1e-3, optimizer="adam", max_similarity=0.4),
        "cifar100": ETAConfig(batch_size=200, lr=1e-3, optimizer="adam", max_similarity=0.1),
        "imagenet": ETAConfig(),
    }

    def reset(self) -> None:
        super().reset()
        self.mean_prediction = nn.Buffer(torch.zeros(0))  # (C,), once there is one

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        entropies = self.uncertainty(logits)
        probs = logits.detach().softmax(1)
        new = self._unlike_the_mean(probs).to(logits)  # (B,): 0 or 1
        weighted = (new * self.certainty(entropies) * entropies).sum()
        count, total, predicted = self.ranks.sum(new.sum(), weighted, new @ probs)
        self.notes["selected"] = count.item()
        if not count:
            raise NothingToLearn(
                f"every image that is certain is like those before (max_similarity={self.config.max_similarity:g})"
            )
        mean = predicted.detach() / count
        self.mean_prediction = nn.Buffer(torch.lerp(self.mean_prediction, mean, 0.1) if self._has_mean else mean)
        return total / count

    @property
    def _has_mean(self) -> bool:
        return len(self.mean_prediction) > 0

    def _unlike_the_mean(self, probs: Tensor) -> Tensor:
        if not self._has_mean:
            return torch.ones(len(probs), dtype=torch.bool, device=probs.device)
        cosines = nn.functional.cosine_similarity(self.mean_prediction[None], probs, dim=1)
        return cosines.abs() < self.config.max_similarity
