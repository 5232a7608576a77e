"""UnMix-TNS: every image moves a mixture of channel statistics, and is normalised with it. No gradient step.

Tomar et al., Un-mixing test-time normalization statistics: combatting label temporal correlation, ICLR 2024.
https://arxiv.org/abs/2401.08328. Original: https://github.com/devavratTomar/unmixtns (no licence stated). Written from
the formulas.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from cafe_tta.adapter import AdapterConfig
from cafe_tta.classifier import SplitClassifier
from cafe_tta.methods.unmix import NormalisingAdapter
from cafe_tta.mixture import NO_MIXTURE, Mixture
from cafe_tta.normalisation import Normaliser, batchnorm_layers
from cafe_tta.options import option
from cafe_tta.traits import Traits


@dataclass(frozen=True)
class UnMixTNSConfig(AdapterConfig):
    """Options of UnMix-TNS.

    >>> UnMixTNSConfig().components
    16
    """

    batch_size: int = 64
    components: int = option(16, "K: components of each layer's mixture; the paper has 128 for mixed domains.", least=1)
    seed: int = option(0, "Seed of the first components.", least=0)


class UnMixTNS(NormalisingAdapter):
    """Normalises each image with a mixture of channel statistics that every image moves; see `cafe_tta.mixture`.

    The mixture follows the images that are answered, not those of `predict`: the original's moves in every pass.
    Methods with gradient steps can normalise in this way too: normalisation="unmix-tns".

    >>> import torch
    >>> from torch import nn
    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = UnMixTNS(classifier)
    >>> adapter(torch.rand(1, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([1, 3]), True)
    """

    name = "unmix-tns"
    traits = Traits(
        "statistics of BatchNorm",
        backward=(0, 0),
        smallest=(1, None, None),
        keeps="K components a layer",
        licence="none stated",
    )
    in_tables = False
    Config = UnMixTNSConfig
    config: UnMixTNSConfig
    presets: ClassVar = {
        "cifar": UnMixTNSConfig(),
        "cifar-mixed": UnMixTNSConfig(components=128),
        "imagenet": UnMixTNSConfig(batch_size=16),
        "imagenet-mixed": UnMixTNSConfig(batch_size=16, components=128),
    }

    def prepare(self, source: Any) -> None:
        layers = batchnorm_layers(self.classifier)
        if not layers:
            raise ValueError("unmix-tns replaces the statistics of BatchNorm layers, but this classifier has none")
        mixture = Mixture(layers, self.config.components, self.config.batch_size, self.config.seed)
        self.normaliser = Normaliser(self.classifier, "unmix-tns", mixture=mixture)

    def exported(self) -> SplitClassifier:
        raise ValueError(NO_MIXTURE.format(self.name))
