"""EATA: ETA, and an elastic penalty that keeps weights near the source that matter to it.

Niu et al., Efficient test-time model adaptation without forgetting, ICML 2022. https://arxiv.org/abs/2204.02610
Original: https://github.com/mr-eggplant/EATA (MIT). Written from the formulas.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cafe_tta import losses
from cafe_tta.methods.eta import ETA, ETAConfig
from cafe_tta.options import option
from cafe_tta.source.fisher import FisherInformation


@dataclass(frozen=True)
class EATAConfig(ETAConfig):
    """Options of EATA.

    >>> EATAConfig().penalty
    2000.0
    """

    penalty: float = option(2000.0, "β: weight of the elastic penalty.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parameters != "norm":
            raise ValueError(
                "expected parameters='norm' for eata, whose Fisher information is that of the normalisation layers, "
                f"but got {self.parameters!r}"
            )


class EATA(ETA):
    """ETA's loss + β Σ F (θ - θ₀)², where F is the Fisher information of the source at its weights θ₀.

    >>> import torch
    >>> from torch import nn
    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> source = FisherInformation.fit(classifier, [torch.rand(64, 3, 2, 2)])
    >>> adapter = EATA(classifier, source, EATAConfig(max_entropy=1.0))
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([8, 3]), True)
    """

    name = "eata"
    needs = "fisher"
    Config = EATAConfig
    config: EATAConfig
    presets: ClassVar = {
        "cifar": EATAConfig(batch_size=200, lr=1e-3, optimizer="adam", max_similarity=0.4, penalty=1.0),
        "cifar100": EATAConfig(batch_size=200, lr=1e-3, optimizer="adam", max_similarity=0.1, penalty=1.0),
        "imagenet": EATAConfig(),
    }

    def prepare(self, source: Any) -> None:
        super().prepare(source)
        assert isinstance(source, FisherInformation)
        moving = {id(parameter) for parameter in self.moving()}
        self._names = [name for name, p in self.classifier.named_parameters() if id(p) in moving]
        parameters = dict(self.classifier.named_parameters())
        for number, name in enumerate(self._names):
            self.register_buffer(f"start_{number}", parameters[name].detach().clone(), persistent=False)
            self.register_buffer(f"fisher_{number}", source.fisher[name].to(parameters[name]), persistent=False)

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        entropy = super().loss(features, logits)
        parameters = dict(self.classifier.named_parameters())
        starts, fishers = ([self.get_buffer(f"{b}_{i}") for i in range(len(self._names))] for b in ("start", "fisher"))
        squares = losses.squared_distance([parameters[name] for name in self._names], starts, fishers)
        penalty = 2 * self.config.penalty * squares
        self.notes |= {"entropy": entropy.item(), "penalty": penalty.item()}
        return entropy + self.ranks.share(penalty)
