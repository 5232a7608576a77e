"""CAFe+: unmixing, and CAFe's steps on top of it, where the images need them. Not in the paper; docs/unmix.md has more.

BatchNorm normalises each image with the images of the stream that are corrupted like it. Steps are clipped, and none is
taken while the images look like the source's. Up to version 0.2, CAFe+ was CAFe(normalisation="blend", blend=0.25,
lr=2e-3, max_change=1e-3).
"""

from dataclasses import dataclass
from typing import ClassVar

from cafe_tta.methods.cafe import CAFe, CAFeConfig
from cafe_tta.normalisation import Normalisation
from cafe_tta.traits import Traits


@dataclass(frozen=True)
class CAFePlusConfig(CAFeConfig):
    """Options of CAFe+: those of CAFe, with other defaults.

    >>> CAFePlusConfig().normalisation
    'unmix'
    """

    normalisation: Normalisation = "unmix"
    lr: float = 2e-3
    max_change: float | None = 5e-4
    gate: bool = True


class CAFePlus(CAFe):
    """CAFe that normalises each image with the images of the stream that are corrupted like it: for mixed streams.

    >>> import torch
    >>> from torch import nn
    >>> from cafe_tta import FeatureStats, split_classifier
    >>> pool = nn.AdaptiveAvgPool2d(1)
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), pool, nn.Flatten(), nn.Linear(3, 3)))
    >>> source = FeatureStats.fit(classifier, [torch.rand(64, 3, 16, 16)]).group()
    >>> adapter = CAFePlus(classifier, source)
    >>> adapter(torch.rand(32, 3, 16, 16) / 9).shape, adapter.report.notes["clusters"]
    (torch.Size([32, 3]), 1.0)
    """

    name = "cafe-plus"
    traits = Traits("the backbone", smallest=(1, 1, 1), keeps="moments of earlier batches, clusters of statistics")
    Config = CAFePlusConfig
    config: CAFePlusConfig
    presets: ClassVar = {"cifar": CAFePlusConfig(), "imagenet": CAFePlusConfig()}
