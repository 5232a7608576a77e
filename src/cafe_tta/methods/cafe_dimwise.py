"""CAFe (dimwise): alignment of each feature dimension by itself, without correlations (Sec. 5.2)."""

from cafe_tta.methods.cafe import CAFe
from cafe_tta.source.stats import SourceStats


class CAFeDimwise(CAFe):
    """CAFe with every feature aligned by itself: mean and variance, no correlations."""

    name = "cafe-dimwise"

    def grouping(self, source: SourceStats) -> SourceStats:
        return source.dimwise()
