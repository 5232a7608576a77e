"""Infomax: confident on each image, diverse over the batch (Eq. 4). CAFe without its alignment.

Bridle et al., Unsupervised classifiers, mutual information and phantom targets, NIPS 1991.
"""

from typing import ClassVar

from torch import Tensor

from cafe_tta import losses
from cafe_tta.gradient import GradientAdapter, StepConfig
from cafe_tta.traits import Traits


class Infomax(GradientAdapter):
    """Makes predictions confident on each image and diverse over the batch.

    >>> import torch
    >>> from torch import nn
    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3)))
    >>> adapter = Infomax(classifier)
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([8, 3]), True)
    """

    name = "infomax"
    traits = Traits("the backbone")
    distributed = True
    presets: ClassVar = {
        "cifar": StepConfig(),
        "cifar-online": StepConfig(answer="after-eval"),
        "imagenet": StepConfig(),
        "imagenet-online": StepConfig(answer="after-eval"),
    }

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        return losses.infomax(logits, self.ranks.mean)
