"""No adaptation: the source classifier, frozen. What every other method has to beat."""

from typing import ClassVar

import torch
from torch import Tensor

from cafe_tta.adapter import Adapter, AdapterConfig, Report


class SourceOnly(Adapter):
    """The source classifier as it is."""

    name = "source"
    adapts = False
    distributed = True
    presets: ClassVar = {"cifar": AdapterConfig(), "imagenet": AdapterConfig()}

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        with torch.no_grad():
            return self.predict(images), Report(
                self.ranks.count(images), stepped=False, reason="the source classifier never adapts"
            )
