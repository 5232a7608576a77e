"""CAFe (w/o infomax): alignment alone (Sec. 5.2)."""

from torch import Tensor

from cafe_tta.methods.cafe import CAFe


class CAFeNoInfomax(CAFe):
    """CAFe's feature alignment alone, without the infomax term."""

    name = "cafe-no-infomax"

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        return self.alignment(features)
