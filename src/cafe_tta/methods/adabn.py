"""AdaBN: the statistics of BatchNorm layers follow the test images.

Li et al., Revisiting batch normalization for practical domain adaptation, 2017. https://arxiv.org/abs/1603.04779
Schneider et al., Improving robustness against common corruptions, 2020. https://arxiv.org/abs/2006.16971
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cafe_tta.adapter import Adapter, AdapterConfig, Report
from cafe_tta.normalisation import Normalisation, Normaliser
from cafe_tta.options import option
from cafe_tta.traits import Traits


@dataclass(frozen=True)
class AdaBNConfig(AdapterConfig):
    """Options of AdaBN.

    >>> AdaBNConfig(prior=16).batch_size
    32
    """

    batch_size: int = 32  # Appendix A.2
    momentum: float | None = option(
        0.1, "Momentum of the running statistics; none averages over all batches since the reset.", least=0, most=1
    )
    prior: float | None = option(
        None,
        "N of Schneider et al.: normalises with N/(N+n) source + n/(N+n) batch; none uses the batch alone.",
        least=0,
    )
    min_batch: int = option(2, "A smaller batch is answered with the running statistics.", least=1)
    sync_batchnorm: bool = option(
        True, "With many ranks: whether BatchNorm normalises with the batch of all ranks, or each rank with its own."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior is not None and self.momentum is None:
            raise ValueError("expected a `momentum` with `prior`, but got None: a blend is not averaged from scratch")


class AdaBN(Adapter):
    """Normalises with the batch; the running statistics follow, for evaluation.

    >>> from torch import nn
    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = AdaBN(classifier)
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([8, 3]), True)
    """

    name = "adabn"
    traits = Traits("statistics of BatchNorm", backward=(0, 0), smallest=(2, None, None))
    distributed = True
    Config = AdaBNConfig
    config: AdaBNConfig
    presets: ClassVar = {"cifar": AdaBNConfig(), "imagenet": AdaBNConfig()}

    def prepare(self, source: Any) -> None:
        prior, shared = self.config.prior, self.config.sync_batchnorm
        kind: Normalisation = "batch" if prior is None else "blend"
        self.normaliser = Normaliser(self.classifier, kind, prior=prior, ranks=self.ranks, shared=shared)
        if not self.normaliser.layers:
            raise ValueError("adabn adapts the statistics of BatchNorm layers, but this classifier has none")
        for layer in self.normaliser.layers:
            layer.momentum = self.config.momentum

    def reset(self) -> None:
        super().reset()
        if self.config.momentum is None:
            for layer in self.normaliser.layers:
                layer.num_batches_tracked.zero_()  # type: ignore[union-attr] # the average begins anew

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        size = self.ranks.count(images)
        with torch.no_grad():
            if (found := self.normaliser.batch_size(images)) < self.config.min_batch:
                reason = f"a batch of {found} is too small to normalise with (min_batch={self.config.min_batch})"
                return self.predict(images), Report(size, stepped=False, reason=reason)
            self.normaliser.adapting()
            features, logits = self.run(images)
            self.normaliser.average_statistics()
            if reason := self.why_unusable(features):
                return logits, Report(size, stepped=False, refused=True, reason=reason)
            return logits, Report(size, stepped=True)
