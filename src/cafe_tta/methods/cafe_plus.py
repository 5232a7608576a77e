"""CAFe+: CAFe for mixed streams, whose batches describe no single image's corruption. Not in the paper.

BatchNorm normalises with the source's statistics and a little of the batch's; docs/choices.md says how that was chosen.
"""

from dataclasses import dataclass
from typing import ClassVar

from cafe_tta.methods.cafe import CAFe, CAFeConfig
from cafe_tta.normalisation import Normalisation


@dataclass(frozen=True)
class CAFePlusConfig(CAFeConfig):
    """Options of CAFe+: those of CAFe, with other defaults.

    >>> CAFePlusConfig().normalisation
    'blend'
    """

    normalisation: Normalisation = "blend"
    blend: float = 0.25
    lr: float = 2e-3
    max_change: float | None = 1e-3


class CAFePlus(CAFe):
    """CAFe that keeps three quarters of the source's BatchNorm statistics: for streams of mixed corruptions."""

    name = "cafe-plus"
    Config = CAFePlusConfig
    config: CAFePlusConfig
    presets: ClassVar = {
        "cifar": CAFePlusConfig(),
        "cifar-online": CAFePlusConfig(answer="after-eval"),
        "imagenet": CAFePlusConfig(),
        "imagenet-online": CAFePlusConfig(answer="after-eval"),
    }
