"""Unmix: every image is normalised with the images of the stream that are corrupted like it. No gradient step.

Not in the paper. Related: Tomar et al., Un-mixing test-time normalization statistics, ICLR 2024
(https://arxiv.org/abs/2401.08328); Schneider et al., Improving robustness against common corruptions, 2020
(https://arxiv.org/abs/2006.16971), for the source as a prior of the statistics.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cafe_tta.adapter import Adapter, AdapterConfig, Report
from cafe_tta.clusters import THRESHOLD
from cafe_tta.diversity import EXPECTED
from cafe_tta.normalisation import Normaliser, batchnorm_layers
from cafe_tta.options import option
from cafe_tta.traits import Traits
from cafe_tta.unmixing import PRIOR, WINDOW


@dataclass(frozen=True)
class UnmixConfig(AdapterConfig):
    """Options of Unmix.

    >>> UnmixConfig().window
    1000
    """

    window: int = option(
        WINDOW, "Images of the stream after which one counts e times less in its cluster's statistics.", least=1
    )
    prior: float = option(PRIOR, "N: images of the source in the statistics of every cluster.", above=0)
    threshold: float = option(
        THRESHOLD,
        "Two clusters are told apart if their means are farther apart than this multiple of the sum of their standard "
        "deviations along the line between them.",
        above=0,
    )
    classes: float | None = option(None, EXPECTED, least=1)

    @property
    def unmixes(self) -> bool:
        return True


class NormalisingAdapter(Adapter):
    """A method that adapts by what BatchNorm normalises each image with, in one pass and without a step."""

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        with torch.no_grad():
            self.normaliser.adapting()
            features, logits = self.run(images)
            if reason := self.why_unusable(features):
                return logits, Report(self.ranks.count(images), stepped=False, refused=True, reason=reason)
            return logits, Report(self.ranks.count(images), stepped=True)


class Unmix(NormalisingAdapter):
    """Clusters the images by how they are corrupted, and normalises each with its own cluster: no gradient step.

    >>> from torch import nn
    >>> from cafe_tta import FeatureStats, split_classifier
    >>> pool = nn.AdaptiveAvgPool2d(1)
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), pool, nn.Flatten(), nn.Linear(3, 3)))
    >>> source = FeatureStats.fit(classifier, [torch.rand(64, 3, 16, 16)]).group()
    >>> adapter = Unmix(classifier, source)
    >>> adapter(torch.rand(8, 3, 16, 16)).shape, adapter.report.notes["clusters"] >= 1
    (torch.Size([8, 3]), True)
    """

    name = "unmix"
    distributed = True
    traits = Traits(
        "statistics of BatchNorm", backward=(0, 0), smallest=(1, None, None), keeps="clusters of statistics"
    )
    needs = "stats"
    Config = UnmixConfig
    config: UnmixConfig
    presets: ClassVar = {"cifar": UnmixConfig(), "imagenet": UnmixConfig(batch_size=64)}

    def prepare(self, source: Any) -> None:
        config = self.config
        if not batchnorm_layers(self.classifier):
            raise ValueError(
                "unmix changes what BatchNorm layers normalise with, but this classifier has none; use a method with "
                "gradient steps"
            )
        unmixer = self.unmixer(source, config.window, config.classes, config.prior, config.threshold)
        self.normaliser = Normaliser(self.classifier, "unmix", ranks=self.ranks, unmixer=unmixer)
