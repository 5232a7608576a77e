"""How far features are from the source's: `Reference`, with the drift of a known alignment loss."""

from torch import Tensor

from cafe_tta.source import Reference, SourceStats
from cafe_tta.source.reference import MIN_IMAGES

FEWEST = MIN_IMAGES


class Yardstick(Reference):
    """Measures features against the source statistics."""

    def __init__(self, source: SourceStats, gate_margin: float) -> None:
        super().__init__(source, margin=gate_margin)

    def drift(self, alignment: float, images: int) -> float | None:  # type: ignore[override]
        """Alignment beside the largest that still looks like the source: at most 1 does. None where nobody knows."""
        if not self.calibrated or images < FEWEST:
            return None
        return alignment / self.threshold(images)

    def drift_of(self, features: Tensor) -> float | None:
        return super().drift(features)
