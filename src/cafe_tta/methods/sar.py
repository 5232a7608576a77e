"""SAR: entropy minimisation on certain images by sharpness-aware steps, and a way back from collapse.

Niu et al., Towards stable test-time adaptation in dynamic wild world, ICLR 2023. https://arxiv.org/abs/2302.12400
Original: https://github.com/mr-eggplant/SAR (BSD-3-Clause). Written from the formulas.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from cafe_tta.gradient import NothingToLearn, climbed
from cafe_tta.methods.selective import SelectiveAdapter, SelectiveConfig
from cafe_tta.options import option
from cafe_tta.traits import NORM, Traits

OFFICIAL_RESET = 0.2  # which the original writes out, whatever its option says


@dataclass(frozen=True)
class SARConfig(SelectiveConfig):
    """Options of SAR.

    >>> SARConfig().radius
    0.05
    """

    skip_last_stage: bool = True
    radius: float = option(0.05, "ρ: length of the way up before the gradient of a step is taken.", above=0)
    reset_below: float = option(
        0.2, "The source classifier is restored when the running mean of the loss falls below this, e_m.", least=0
    )
    quirks: Literal["repaired", "official"] = option(
        "repaired", "Whether the errors of the published code are repaired, or kept to reproduce its numbers."
    )


class SAR(SelectiveAdapter):
    """Steps along the entropy's gradient at θ + ρ g/‖g‖; where the entropy becomes suspiciously small, starts anew.

    g is the gradient of the mean entropy of the images with H < E₀; at θ + ρ g/‖g‖, those of them that still have
    H < E₀ give the gradient of the step. e ← 0.9 e + 0.1 loss; below `reset_below`, all is restored.

    Repaired, unless quirks="official": a recovery also forgets e and the optimiser's momentum; `reset_below` is
    honoured (0.2 is literal in the original); where no image passes the filter, nothing moves (there, the momentum
    moves the weights on).

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = SAR(classifier, config=SARConfig(max_entropy=1.0))
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([8, 3]), True)
    """

    name = "sar"
    traits = Traits(NORM, (2, 2), (2, 2), keeps="the mean loss", licence="BSD-3-Clause")
    Config = SARConfig
    config: SARConfig
    presets: ClassVar = {
        # 0.2 is a number for 1000 classes: it is scaled like the largest entropy, ln C.
        "cifar": SARConfig(batch_size=200, lr=1e-3, reset_below=0.2 * math.log(10) / math.log(1000)),
        "imagenet": SARConfig(),
        "imagenet-vit": SARConfig(lr=1e-3),
    }

    def reset(self) -> None:
        super().reset()
        self.mean_loss = nn.Buffer(torch.zeros(0))  # e, once there is one

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        return self.uncertainty(logits).mean()

    def _filtered(self, features: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return super()._filtered(features, logits)
        except NothingToLearn:
            self._drift_on(features)
            raise

    def _backward(self, features: Tensor, loss: Tensor) -> str:
        if refusal := super()._backward(features, loss):
            return refusal
        with climbed(self.moving(), self.config.radius):
            self.optimizer.zero_grad(set_to_none=True)
            self.normaliser.adapting(update=False)
            above, logits = self.run(self.batch)
            entropies = self.uncertainty(logits[self.kept])
            still = entropies.detach() < self.largest_entropy(self.config.max_entropy or math.inf)
            self.notes["selected"] = float(still.sum())
            if still.any():
                second = entropies[still].mean()
                refusal = super()._backward(above, second)
        if not still.any():
            self._drift_on(features)
            raise NothingToLearn("no image that passes the entropy filter still does so uphill")
        if not refusal:
            new = second.detach().reshape(1)
            self.mean_loss = nn.Buffer(0.9 * self.mean_loss + 0.1 * new if len(self.mean_loss) else new)
        return refusal

    def after_step(self) -> None:
        official = self.config.quirks == "official"
        if self.mean_loss >= (OFFICIAL_RESET if official else self.config.reset_below):
            return
        if official:
            with torch.no_grad():
                for name, tensor in self.changing().items():
                    tensor.copy_(self._source_state[name])
        else:
            self.forget()
        self.notes["recovered"] = 1.0

    def _drift_on(self, features: Tensor) -> None:
        """In the original, an empty selection is a gradient of 0: the momentum moves the weights on."""
        if self.config.quirks == "official" and not self.why_unusable(features):
            for parameter in self.moving():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
            self.notes["drifted"] = 1.0
