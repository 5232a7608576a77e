"""CAFe+: CAFe for mixed streams, whose batches describe no single image's corruption. Not in the paper.

BatchNorm normalises with the source's statistics and a little of the batch's; docs/choices.md says how that was chosen.
"""

from dataclasses import dataclass
from typing import ClassVar

from cafe_tta.methods.cafe import CAFe, CAFeConfig
from cafe_tta.normalisation import Normalisation


@dataclass(frozen=True)
class CAFePlusConfig(CAFeConfig):
    """Options of CAFe+: those of CAFe, with other defaults.

    >>> CAFePlusConfig().normalisation
    'blend'
    """

    normalisation: Normalisation = "blend"
    blend: float = 0.25
    lr: float = 2e-3
    max_change: float | None = 1e-3


class CAFePlus(CAFe):
    """CAFe that keeps three quarters of the source's BatchNorm statistics: for streams of mixed corruptions.

    >>> import torch
    >>> from torch import nn
    >>> from cafe_tta import FeatureStats, split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3)))
    >>> source = FeatureStats.fit(classifier, [torch.rand(64, 3, 2, 2)]).group()
    >>> adapter = CAFePlus(classifier, source)
    >>> adapter(torch.rand(32, 3, 2, 2)).shape, adapter.config.blend
    (torch.Size([32, 3]), 0.25)
    """

    name = "cafe-plus"
    Config = CAFePlusConfig
    config: CAFePlusConfig
    presets: ClassVar = {
        "cifar": CAFePlusConfig(),
        "cifar-online": CAFePlusConfig(answer="after-eval"),
        "imagenet": CAFePlusConfig(),
        "imagenet-online": CAFePlusConfig(answer="after-eval"),
    }
