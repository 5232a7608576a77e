"""CAFe (dimwise): alignment of each feature dimension by itself, without correlations (Sec. 5.2)."""

from cafe_tta.methods.cafe import CAFe
from cafe_tta.source.stats import SourceStats


class CAFeDimwise(CAFe):
    """CAFe with every feature aligned by itself: mean and variance, no correlations.

    >>> import torch
    >>> from torch import nn
    >>> from cafe_tta import FeatureStats, split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3)))
    >>> source = FeatureStats.fit(classifier, [torch.rand(64, 3, 2, 2)]).group()
    >>> adapter = CAFeDimwise(classifier, source)
    >>> adapter(torch.rand(32, 3, 2, 2)).shape, adapter.reference.widest
    (torch.Size([32, 3]), 1)
    """

    name = "cafe-dimwise"

    def regrouped(self, source: SourceStats) -> SourceStats:
        return source.dimwise()
