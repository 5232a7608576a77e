"""No adaptation: the source classifier, frozen. What every other method has to beat."""

from typing import ClassVar

import torch
from torch import Tensor

from cafe_tta.adapter import Adapter, AdapterConfig, Report
from cafe_tta.traits import Traits


class SourceOnly(Adapter):
    """The source classifier as it is.

    >>> from torch import nn
    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    >>> images = torch.rand(8, 3, 2, 2)
    >>> torch.equal(SourceOnly(classifier)(images), classifier(images))
    True
    """

    name = "source"
    traits = Traits("nothing", backward=(0, 0), smallest=(1, 1, 1))
    adapts = False
    distributed = True
    presets: ClassVar = {"cifar": AdapterConfig(), "imagenet": AdapterConfig()}

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        with torch.no_grad():
            return self.predict(images), Report(
                self.ranks.count(images), stepped=False, reason="the source classifier never adapts"
            )
