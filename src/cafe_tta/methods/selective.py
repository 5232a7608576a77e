"""Entropy minimisation on selected images: what ETA, EATA, RDumb, SAR, DeYO and MoETTA share."""

import re
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from cafe_tta import losses
from cafe_tta.gradient import GradientAdapter, StepConfig
from cafe_tta.normalisation import norm_parameters
from cafe_tta.options import option

Entropy = Literal["softmax", "come"]
ENTROPIES = {"softmax": losses.entropy, "come": losses.opinion_entropy}
ENTROPY_MEANING = "Which entropy is minimised, and filtered by: that of the softmax, or COME's of an opinion."
# The last stage of ResNets and vision transformers, as torchvision and timm name their layers.
LAST_STAGE = re.compile(r"layer4|blocks\.(9|10|11)|norm\.|^norm$")


@dataclass(frozen=True)
class NormConfig(StepConfig):
    """Options of methods that move weight and bias of the normalisation layers, with the momentum they all have."""

    batch_size: int = 64
    momentum: float = 0.9
    parameters: Literal["all", "norm"] = "norm"


@dataclass(frozen=True)
class SelectiveConfig(NormConfig):
    """Options of entropy minimisation on selected images."""

    lr: float = 2.5e-4
    max_entropy: float | None = 0.4
    entropy: Entropy = option("softmax", ENTROPY_MEANING)
    margin: float = option(0.4, "E₀ as a share of ln C, in the weights exp(E₀ - entropy).", least=0, most=1)
    skip_last_stage: bool = option(
        False,
        "Whether the normalisation layers of the last stage stay fixed: those with layer4, blocks.9, blocks.10, "
        "blocks.11 or a final norm in their name.",
    )


class SelectiveAdapter(GradientAdapter):
    """Moves the normalisation layers by the entropy of the images that pass a filter. Subclasses write the `loss`."""

    in_tables = False
    config: SelectiveConfig

    def moving(self) -> list[nn.Parameter]:
        chosen = super().moving()
        if self.config.parameters == "all" or not self.config.skip_last_stage:
            return chosen
        early = {id(parameter) for parameter in norm_parameters(self.classifier.backbone, LAST_STAGE)}
        return [parameter for parameter in chosen if id(parameter) in early]

    def uncertainty(self, logits: Tensor) -> Tensor:
        return ENTROPIES[self.config.entropy](logits)

    def certainty(self, entropies: Tensor) -> Tensor:
        """exp(E₀ - entropy), without gradient: certain images count more."""
        return (self.largest_entropy(self.config.margin) - entropies.detach()).exp()
