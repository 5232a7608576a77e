"""RDumb: ETA that forgets everything after every 1000 batches.

Press et al., RDumb: a simple approach that questions our progress in continual test-time adaptation, NeurIPS 2023.
https://arxiv.org/abs/2306.05401. Original: https://github.com/oripress/CCC (MIT). Written from the formulas.
"""

from dataclasses import dataclass
from typing import ClassVar

from cafe_tta.methods.eta import ETA, ETAConfig


@dataclass(frozen=True)
class RDumbConfig(ETAConfig):
    """Options of RDumb: those of ETA, with `reset_every` set.

    >>> RDumbConfig().reset_every
    1000
    """

    reset_every: int | None = 1000


class RDumb(ETA):
    """ETA that goes back to the source classifier after every 1000 batches: weights, optimiser and mean prediction.

    Every method with gradient steps has the option `reset_every`; this is a name for the published combination.

    >>> import torch
    >>> from torch import nn
    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = RDumb(classifier, config=RDumbConfig(reset_every=1))
    >>> first, second = (adapter(torch.ones(8, 3, 2, 2).cumsum(0)) for _ in range(2))
    >>> torch.equal(first, second), adapter.counters.batches
    (True, 2)
    """

    name = "rdumb"
    Config = RDumbConfig
    config: RDumbConfig
    presets: ClassVar = {
        "cifar": RDumbConfig(batch_size=200, lr=1e-3, optimizer="adam", max_similarity=0.4),
        "cifar100": RDumbConfig(batch_size=200, lr=1e-3, optimizer="adam", max_similarity=0.1),
        "imagenet": RDumbConfig(),
    }
