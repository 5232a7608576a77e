"""ZeroSiam: entropy minimisation behind a small predictor, which is tied to the answers without it.

Chen et al., ZeroSiam: an efficient asymmetry for test-time entropy optimization without collapse, ICLR 2026.
https://arxiv.org/abs/2509.23183. Original: https://github.com/Cascol-Chen/ZeroSiam (no licence stated; built on SAR).
Written from the formulas.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cafe_tta.gradient import GradientAdapter
from cafe_tta.methods.selective import NormConfig
from cafe_tta.options import option
from cafe_tta.traits import NORM, Traits


@dataclass(frozen=True)
class ZeroSiamConfig(NormConfig):
    """Options of ZeroSiam.

    >>> ZeroSiamConfig().tie
    1.0
    """

    lr: float = 2.5e-3
    predictor_lr: float = option(2.5e-2, "Learning rate of the predictor.", least=0)
    tie: float = option(1.0, "α: weight of the divergence between both answers.", least=0)


class ZeroSiam(GradientAdapter):
    """Minimises H(p_o) + α (KL(p_r‖p_o) + KL(p_o‖p_r)): p_o is answered behind a predictor, p_r without it.

    p_r = softmax(head(f)) gets no gradient, p_o = softmax(head(W f)) does. The predictor W begins as the identity and
    moves with the normalisation layers. A constant certain answer is then no minimum.

    A reset restores the weights, the predictor and both momenta; until a late version, the original's did not.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = ZeroSiam(classifier)
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, torch.equal(adapter.predictor, torch.eye(12))
    (torch.Size([8, 3]), False)
    """

    name = "zerosiam"
    traits = Traits(f"{NORM}, a predictor", licence="none stated")
    in_tables = False
    Config = ZeroSiamConfig
    config: ZeroSiamConfig
    presets: ClassVar = {
        "cifar": ZeroSiamConfig(batch_size=200),  # none are published: those of a ResNet-50
        "imagenet": ZeroSiamConfig(),
        "imagenet-vit": ZeroSiamConfig(lr=5e-3, predictor_lr=5e-3),
    }

    def prepare(self, source: Any) -> None:
        weight = self.classifier.head.weight
        self.predictor = nn.Parameter(torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device))
        super().prepare(source)

    def changing(self) -> dict[str, Tensor]:
        return super().changing() | {"predictor": self.predictor}

    def moving(self) -> list[nn.Parameter]:
        return [*super().moving(), self.predictor]

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": super().moving()}, {"params": [self.predictor], "lr": self.config.predictor_lr}]

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        online = self.classifier.head(features @ self.predictor.T).log_softmax(1)
        plain = logits.detach().log_softmax(1)
        entropy = -(online.exp() * online).sum(1).mean()
        tie = ((plain.exp() - online.exp()) * (plain - online)).sum(1).mean()
        self.notes |= {"entropy": entropy.item(), "tie": tie.item()}
        return entropy + self.config.tie * tie
