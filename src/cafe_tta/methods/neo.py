"""NEO: the mean feature of the stream is subtracted in front of the head. No gradient step.

Murphy et al., NEO: no-optimization test-time adaptation through latent re-centering, ICLR 2026.
https://arxiv.org/abs/2510.05635. Written from the formula.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from cafe_tta.adapter import Adapter, AdapterConfig, Report
from cafe_tta.classifier import SplitClassifier
from cafe_tta.options import option
from cafe_tta.traits import Traits


@dataclass(frozen=True)
class NEOConfig(AdapterConfig):
    """Options of NEO.

    >>> NEOConfig().momentum is None
    True
    """

    batch_size: int = 64
    momentum: float | None = option(
        None, "Weight of a batch in the mean; none averages over all images since the reset.", above=0, most=1
    )


class NEO(Adapter):
    """Answers with head(f - m), where m is the running mean of the features f, the batch's included.

    The mean of a single image is the image itself: until there are two, nothing is subtracted.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3, bias=False)))
    >>> adapter = NEO(classifier)
    >>> adapter(torch.rand(8, 3, 2, 2)).mean(0).abs().max().item() < 1e-5
    True
    """

    name = "neo"
    traits = Traits("features", backward=(0, 0), smallest=(1, 1, 1), keeps="the mean feature")
    in_tables = False
    distributed = True
    Config = NEOConfig
    config: NEOConfig
    presets: ClassVar = {"cifar": NEOConfig(), "imagenet": NEOConfig()}

    def reset(self) -> None:
        super().reset()
        weight = self.classifier.head.weight
        self.mean = nn.Buffer(torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.long, device=weight.device))

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        size = self.ranks.count(images)
        with torch.no_grad():
            self.normaliser.evaluating()
            features, logits = self.run(images)
            if reason := self.why_unusable(features):
                return logits, Report(size, stepped=False, refused=True, reason=reason)
            (batch,) = self.ranks.mean(features.double())
            share = self.config.momentum if self.config.momentum and self.count else size / (size + self.count.item())
            self.mean = nn.Buffer(torch.lerp(self.mean.to(batch), batch, share))
            self.count = nn.Buffer(self.count + size)
            return self._centred(features, logits), Report(size, stepped=True)

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features, logits = super().features_and_logits(images)
        with torch.no_grad():
            return features, self._centred(features, logits)

    def exported(self) -> SplitClassifier:
        """The mean is subtracted by the head's bias: W (f - m) + b = W f + (b - W m)."""
        old = self.classifier.head
        head = nn.Linear(old.in_features, old.out_features).to(old.weight)
        head.weight.copy_(old.weight)
        origin = torch.zeros_like(old.weight[:1])
        head.bias.copy_(self._centred(origin, old(origin))[0])
        return SplitClassifier(self.classifier.backbone, head, self.classifier.feature_layer)

    def _centred(self, features: Tensor, logits: Tensor) -> Tensor:
        return logits if self.count < 2 else self.classifier.head(features - self.mean.to(features))
