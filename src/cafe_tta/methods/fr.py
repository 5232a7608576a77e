"""FR: feature restoration. Soft histograms of features and logits are moved back to the source's, unit by unit.

Eastwood et al., Source-free adaptation to measurement shift via bottom-up feature restoration, ICLR 2022.
https://arxiv.org/abs/2107.05446 (without its bottom-up training, as in the paper)
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cafe_tta import losses
from cafe_tta.gradient import GradientAdapter, StepConfig
from cafe_tta.options import option
from cafe_tta.source.histograms import SourceHistograms, UnitHistograms
from cafe_tta.traits import Traits


@dataclass(frozen=True)
class FRConfig(StepConfig):
    """Options of FR.

    >>> FRConfig(temperature=0.05).momentum
    0.9
    """

    momentum: float = 0.9  # Appendix A.2
    temperature: float = option(0.01, "τ of the soft binning: 0.01 offline, 0.05 online (Appendix A.2).", above=0)


class FR(GradientAdapter):
    """Moves the histograms of features and logits back to the source's, unit by unit.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 3)))
    >>> adapter = FR(classifier, SourceHistograms.fit(classifier, [torch.rand(64, 3, 2, 2)]))
    >>> adapter(torch.rand(32, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([32, 3]), True)
    """

    name = "fr"
    traits = Traits("all but linear layers")
    distributed = True
    needs = "histograms"
    Config = FRConfig
    config: FRConfig
    presets: ClassVar = {
        "cifar": FRConfig(),
        "cifar-online": FRConfig(temperature=0.05, answer="after-eval"),
        "imagenet": FRConfig(),
        "imagenet-online": FRConfig(temperature=0.05, answer="after-eval"),
    }

    def prepare(self, source: Any) -> None:
        assert isinstance(source, SourceHistograms)
        if self.config.temperature not in source.features.counts:
            known = ", ".join(map(str, sorted(source.features.counts)))
            raise ValueError(
                f"expected `temperature` to be one that the histograms were made with ({known}), "
                f"but got {self.config.temperature}; make them with temperatures=[{self.config.temperature}]"
            )
        super().prepare(source)
        self._keep_layer("feature", source.features, source.num_bins)
        self._keep_layer("logit", source.logits, source.num_bins)

    def moving(self) -> list[nn.Parameter]:
        """Everything but linear layers."""
        linear = [layer for layer in self.classifier.modules() if isinstance(layer, nn.Linear)]
        fixed = {id(parameter) for layer in linear for parameter in layer.parameters()}
        return [parameter for parameter in super().moving() if id(parameter) not in fixed]

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        counts = self.ranks.sum(self._soft_counts("feature", features), self._soft_counts("logit", logits))
        divergences = [self._divergence(*pair) for pair in zip(("feature", "logit"), counts, strict=True)]
        return (divergences[0] + divergences[1]).to(features.dtype)

    def _keep_layer(self, layer: str, histograms: UnitHistograms, num_bins: int) -> None:
        live = histograms.live
        values = (live.nonzero().flatten(), histograms.scale[live], histograms.edges(num_bins)[live])
        for name, value in zip(("units", "scale", "edges"), values, strict=True):
            self.register_buffer(f"{layer}_{name}", value, persistent=False)
        self.register_buffer(f"{layer}_counts", histograms.counts[self.config.temperature][live], persistent=False)

    def _soft_counts(self, layer: str, values: Tensor) -> Tensor:
        units, scale, edges = (self.get_buffer(f"{layer}_{name}") for name in ("units", "scale", "edges"))
        scaled = values[:, units] / scale.to(values.dtype)
        return losses.soft_histogram(scaled, edges.to(values.dtype), self.config.temperature)  # (U, J)

    def _divergence(self, layer: str, soft: Tensor) -> Tensor:
        counts = self.get_buffer(f"{layer}_counts")
        if not len(counts):
            return torch.zeros((), dtype=counts.dtype, device=counts.device)
        return losses.histogram_divergence(soft.to(counts.dtype), counts).mean()
