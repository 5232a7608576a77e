"""Tent: makes predictions confident by moving the weight and bias of the BatchNorm layers.

Wang et al., Tent: fully test-time adaptation by entropy minimization, ICLR 2021. https://arxiv.org/abs/2006.10726
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cafe_tta.gradient import GradientAdapter, StepConfig
from cafe_tta.methods.selective import ENTROPIES, ENTROPY_MEANING, Entropy
from cafe_tta.normalisation import batchnorm_layers, norm_parameters
from cafe_tta.options import option
from cafe_tta.traits import Traits


@dataclass(frozen=True)
class TentConfig(StepConfig):
    """Options of Tent.

    >>> TentConfig(lr=2.5e-4).batch_size
    128
    """

    batch_size: int = 128  # Appendix A.2
    entropy: Entropy = option("softmax", ENTROPY_MEANING)


class Tent(GradientAdapter):
    """Makes predictions confident by moving BatchNorm's weights and biases only.

    With normalisation="batch", BatchNorm layers forget their running statistics and normalise with the batch in every
    mode, as the original does: an evaluation of Tent depends on its batches. Only batches smaller than `min_batch`
    are answered with the source's statistics. A classifier without BatchNorm has the weights and biases of its other
    normalisation layers moved.

    >>> import torch
    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = Tent(classifier)
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, len(adapter.moving())
    (torch.Size([8, 3]), 2)
    """

    name = "tent"
    traits = Traits("weight and bias of BatchNorm, else of other normalisation layers", licence="MIT")
    distributed = True
    remark = "Tent keeps no running statistics: it normalises with the batch that it answers."
    Config = TentConfig
    config: TentConfig
    presets: ClassVar = {
        "cifar": TentConfig(),
        "cifar-online": TentConfig(answer="after"),
        "imagenet": TentConfig(batch_size=64, lr=2.5e-4),
        "imagenet-online": TentConfig(batch_size=64, lr=2.5e-4, answer="after"),
        "original": TentConfig(batch_size=200, optimizer="adam"),
    }

    def moving(self) -> list[nn.Parameter]:
        layers = batchnorm_layers(self.classifier.backbone)
        affine = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]
        return affine or norm_parameters(self.classifier.backbone)

    def prepare(self, source: Any) -> None:
        super().prepare(source)
        self._statistics: list[tuple[_BatchNorm, Tensor, Tensor]] = []
        if self.config.normalisation == "batch":
            for layer in self.normaliser.layers:
                if layer.running_mean is not None and layer.running_var is not None:
                    self._statistics.append((layer, layer.running_mean, layer.running_var))
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if self.normaliser.batch_size(images) >= self.config.min_batch:
            return super().features_and_logits(images)
        # Too few to normalise with: a single image has no variance where its feature map is one pixel.
        for layer, mean, var in self._statistics:
            layer.running_mean, layer.running_var = mean.to(layer.weight), var.to(layer.weight)
        try:
            return super().features_and_logits(images)
        finally:
            for layer, _, _ in self._statistics:
                layer.running_mean = layer.running_var = None

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        return self.ranks.mean(self.uncertainty(logits))[0]

    def uncertainty(self, logits: Tensor) -> Tensor:
        return ENTROPIES[self.config.entropy](logits)
