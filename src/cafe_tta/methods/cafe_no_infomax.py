"""CAFe (w/o infomax): alignment alone (Sec. 5.2)."""

from torch import Tensor

from cafe_tta.methods.cafe import CAFe


class CAFeNoInfomax(CAFe):
    """CAFe's feature alignment alone, without the infomax term.

    >>> import torch
    >>> from torch import nn
    >>> from cafe_tta import FeatureStats, split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3)))
    >>> source = FeatureStats.fit(classifier, [torch.rand(64, 3, 2, 2)]).group()
    >>> adapter = CAFeNoInfomax(classifier, source)
    >>> logits = adapter(torch.rand(32, 3, 2, 2))
    >>> "alignment" in adapter.report.notes, "infomax" in adapter.report.notes
    (True, False)
    """

    name = "cafe-no-infomax"

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        self.check_gate()
        return self.alignment(features)
