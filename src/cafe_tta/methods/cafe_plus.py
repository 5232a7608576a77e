"""CAFe+: unmixing, and CAFe's alignment on top of it, where the images need it. Not in the paper; see docs/unmix.md.

BatchNorm normalises each image with the images of the stream that are corrupted like it. Steps align the features with
the source's and move the normalisation layers alone; they are clipped, and none is taken while the images look like the
source's. There is no infomax: alignment has an end, the source's statistics, and infomax has none.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from cafe_tta.methods.cafe import CAFeConfig
from cafe_tta.methods.cafe_no_infomax import CAFeNoInfomax
from cafe_tta.normalisation import Normalisation
from cafe_tta.traits import Traits

STEP_IMAGES = 64  # at most one step for as many images: steps on fewer are too noisy
WHOLE = 0.1  # share of the learning rate where there are no normalisation layers, and the whole backbone moves


@dataclass(frozen=True)
class CAFePlusConfig(CAFeConfig):
    """Options of CAFe+: those of CAFe, with other defaults.

    >>> CAFePlusConfig().normalisation
    'unmix'
    """

    normalisation: Normalisation = "unmix"
    parameters: Literal["all", "norm"] = "norm"
    lr: float = 2e-2
    max_change: float | None = 2e-3
    gate: bool = True


class CAFePlus(CAFeNoInfomax):
    """Normalises each image with the images that are corrupted like it, and aligns the features: for mixed streams.

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
    traits = Traits(
        "weight and bias of normalisation layers",
        smallest=(1, 1, 1),
        keeps="moments of earlier batches, clusters of statistics",
    )
    Config = CAFePlusConfig
    config: CAFePlusConfig
    presets: ClassVar = {"cifar": CAFePlusConfig(), "imagenet": CAFePlusConfig()}

    def every(self, size: int) -> int:
        """Small batches have one step for several of them; a short last batch has its own, padded."""
        usual = max(size, int(self.largest_batch), 1)
        return max(super().every(size), math.ceil(STEP_IMAGES / usual))

    def candidates(self) -> list[nn.Parameter]:
        """A backbone without normalisation layers moves as a whole."""
        return super().candidates() or list(self.classifier.backbone.parameters())

    def parameter_groups(self) -> list[dict[str, Any]]:
        whole = self.config.parameters == "norm" and not super().candidates()
        return [{"params": self.moving(), "lr": self.config.lr * (WHOLE if whole else 1)}]
