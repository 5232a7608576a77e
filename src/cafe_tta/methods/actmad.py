"""ActMAD: activations get back the mean and variance that they have on source images, at every location.

Mirza et al., ActMAD: activation matching to align distributions for test-time-training, CVPR 2023.
https://arxiv.org/abs/2211.12870. Original: https://github.com/jmiemirza/ActMAD (no licence stated). Written from the
formulas.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cafe_tta.adapter import Report
from cafe_tta.gradient import GradientAdapter, NothingToLearn, StepConfig
from cafe_tta.normalisation import Normalisation
from cafe_tta.source.activations import ActivationStats, Recorder, observed_layers
from cafe_tta.traits import Traits


@dataclass(frozen=True)
class ActMADConfig(StepConfig):
    """Options of ActMAD.

    >>> ActMADConfig().weight_decay
    0.0005
    """

    batch_size: int = 128
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    normalisation: Normalisation = "source"


class ActMAD(GradientAdapter):
    """Minimises ½ Σ_layers mean |μ - μ_source| + mean |σ² - σ²_source| over the outputs of BatchNorm layers.

    μ and σ² (unbiased) are those of the batch at each channel and pixel. BatchNorm normalises with the source's
    statistics, and everything moves, the head too. A classifier without BatchNorm has its other normalisation layers
    observed. Answers are those before the step, of the images as they are: the original augments them, and reports the
    best of all evaluations. A single image has no variance, and is answered without a step.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> source = ActivationStats.fit(classifier, [torch.rand(64, 3, 2, 2)])
    >>> adapter = ActMAD(classifier, source)
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([8, 3]), True)
    """

    name = "actmad"
    traits = Traits("everything", smallest=(2, 2, 2), licence="none stated")
    in_tables = False
    needs = "activations"
    Config = ActMADConfig
    config: ActMADConfig
    presets: ClassVar = {
        "cifar": ActMADConfig(lr=1e-2),
        "cifar100": ActMADConfig(),
        "imagenet": ActMADConfig(lr=2.5e-4),
    }

    def prepare(self, source: Any) -> None:
        super().prepare(source)
        assert isinstance(source, ActivationStats)
        self._recorder = Recorder(observed_layers(self.classifier))
        self._layers = len(source.means)
        for number, (mean, variance) in enumerate(zip(source.means, source.variances, strict=True)):
            self.register_buffer(f"mean_{number}", mean.clone(), persistent=False)
            self.register_buffer(f"variance_{number}", variance.clone(), persistent=False)

    def moving(self) -> list[nn.Parameter]:
        """Everything, unless options say less."""
        if self.config.parameters == "norm" or self.config.adapt_from is not None:
            return super().moving()
        return list(self.classifier.parameters())

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        with self._recorder.recording():
            return super().answer(images)

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        if len(logits) < 2:
            raise NothingToLearn("a single image has no variance to compare with the source's")
        distances = [self._distance(number, self._recorder.outputs[number]) for number in range(self._layers)]
        return torch.stack(distances).sum() / 2

    def _distance(self, number: int, output: Tensor) -> Tensor:
        mean, variance = (self.get_buffer(f"{name}_{number}").to(output) for name in ("mean", "variance"))
        if output.shape[1:] != mean.shape:
            raise ValueError(
                f"expected images as large as the source's, whose activations have shape {tuple(mean.shape)} in "
                f"normalisation layer {number}, but got {tuple(output.shape[1:])}; resize them"
            )
        found_variance, found_mean = torch.var_mean(output[self.kept], 0)
        return (found_mean - mean).abs().mean() + (found_variance - variance).abs().mean()
