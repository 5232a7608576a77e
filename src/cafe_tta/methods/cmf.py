"""CMF: ROID, pulled to a hidden model that is filtered between the source and the current weights.

Lee and Chang, Continual momentum filtering on parameter space for online test-time adaptation, ICLR 2024.
https://openreview.net/forum?id=BllUWdpIOA. Original: https://github.com/j-pong/test-time-adaptation (MIT). Written from
the formulas.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from cafe_tta.methods.roid import ROID, ROIDConfig
from cafe_tta.methods.second import SecondWeights
from cafe_tta.options import option
from cafe_tta.traits import NORM, Traits

PER = 38_400  # parameters: those of the LayerNorms of a ViT-B/16
LEAST_GAIN, MOST_GAIN = 0.89, 0.9999


@dataclass(frozen=True)
class CMFConfig(ROIDConfig):
    """Options of CMF: those of ROID, and of the filter.

    >>> CMFConfig().source_share
    0.01
    """

    source_share: float = option(0.01, "How far the hidden model goes to the source in a step, 1 - α.", least=0, most=1)
    noise: float = option(0.005, "Variance q of a step, for each 38,400 parameters that move.", above=0)


class CMF(SecondWeights, ROID):
    """ROID's loss and answers; after a step, θ ← γ θ + (1 - γ) φ with a hidden model φ, where γ is the option `keep`.

    φ ← α φ + (1 - α) θ₀ and v ← α² v + q; then the gain β = r / (v + r), r = 1 - q, at least 0.89, weighs in the
    current weights: φ ← β φ + (1 - β) θ and v ← β v. A reset also forgets v, which the original keeps.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = CMF(classifier)
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([8, 3]), True)
    """

    name = "cmf"
    traits = Traits(
        NORM,
        (1, 2),
        (1, 2),
        (2, 2, 2),
        "the mean prediction, a hidden copy of what moves",
        "MIT",
    )
    Config = CMFConfig
    config: CMFConfig
    presets: ClassVar = {
        "cifar": CMFConfig(batch_size=200, lr=1e-3, optimizer="adam"),
        "imagenet": CMFConfig(nesterov=True),
    }

    def prepare(self, source: Any) -> None:
        super().prepare(source)
        if self._step_noise() >= 1:
            raise ValueError(
                f"cmf's filter needs q below 1, but {self.config.noise:g} for each {PER} parameters makes "
                f"{self._step_noise():.3g}; lower `noise`, or move fewer parameters"
            )

    def reset(self) -> None:
        super().reset()
        self.variance = nn.Buffer(torch.zeros((), dtype=torch.float64))  # v

    def after_step(self) -> None:
        alpha, noise = 1 - self.config.source_share, self._step_noise()
        predicted = alpha**2 * self.variance.item() + noise
        gain = max((1 - noise) / (predicted + 1 - noise), LEAST_GAIN)
        gain = 1.0 if gain > MOST_GAIN else gain
        self.variance = nn.Buffer(torch.full_like(self.variance, gain * predicted))
        self.notes["gain"] = gain
        ours, hidden = self.changing(), {}
        with torch.no_grad():
            for name, value in self.second().items():
                drawn = alpha * value + (1 - alpha) * self._source_state[name].to(value)
                hidden[name] = gain * drawn + (1 - gain) * ours[name]
                ours[name].copy_(self.config.keep * ours[name] + (1 - self.config.keep) * hidden[name])
        self.set_second(hidden)

    def _step_noise(self) -> float:
        return self.config.noise * sum(parameter.numel() for parameter in self.moving()) / PER
