"""How many classes the last images of a stream are spread over, as the answers tell.

Statistics of a few classes say more of their content than of how they are corrupted: images that come class by class
ruin a model that adapts to them. With the predictions p of the last images,

    k = 1 / mean of pᵢ · pⱼ over pairs of images less than 64 apart

is their effective number of classes: 1 where all answers are the same, C where the C classes come equally often and in
any order. It is the inverse Simpson index, of pairs that are near in time.
"""

import math

import torch
from torch import Tensor

REACH = 64  # images: pairs that are less apart are near
HORIZON = 128.0  # images of the stream after which one counts e times less
ENOUGH = 10  # classes: statistics of as many say little of the content, however many more the model knows
PRIOR = 16.0  # images that are taken to have come before the first, of all classes
EVIDENCE = 32  # images: nothing is doubted before as many have come
FEW, MANY = 0.45, 0.75  # on the way from one class to those expected: below, nothing is trusted; above, everything
TRUSTED = 0.5  # of 1: what is trusted less is not learnt from
EXPECTED = (  # the text of the option
    f"Effective number of classes to expect in any {REACH} consecutive images; by default those of the model, at most "
    f"{ENOUGH}. While the answers show far fewer, images are normalised as in training. 1 turns this off."
)


class Diversity:
    """Follows the answers to a stream. Everything that it remembers is in `memory`, which is replaced, never changed.

    >>> diversity = Diversity(4)
    >>> diversity.follow(torch.eye(4).repeat(50, 1))
    >>> round(diversity.classes, 1), diversity.trust
    (4.2, 1.0)
    >>> diversity.follow(torch.eye(4)[:1].repeat(200, 1))  # all of one class
    >>> round(diversity.classes, 1), diversity.trust
    (1.2, 0.0)
    """

    def __init__(self, num_classes: int, expected: float | None = None) -> None:
        self.num_classes = num_classes
        self.expected = min(num_classes, ENOUGH) if expected is None else expected
        self.memory = {
            "answers": torch.zeros(REACH - 1, num_classes, dtype=torch.float64),  # the last ones; zeros: none yet
            "collisions": torch.tensor(PRIOR / num_classes, dtype=torch.float64),  # Σ of mean pᵢ · pⱼ with those before
            "compared": torch.tensor(PRIOR, dtype=torch.float64),  # images in this sum, older ones counting for less
        }

    @property
    def classes(self) -> float:
        """The effective number of classes of the last images."""
        return (self.memory["compared"] / self.memory["collisions"]).item()

    @property
    def trust(self) -> float:
        """How far statistics of the last images can be trusted: 0 if they are of few classes, 1 if of enough."""
        if self.expected <= 1 or self.memory["answers"].any(1).sum() < EVIDENCE:
            return 1.0
        share = (self.classes - 1) / (self.expected - 1)
        return min(max((share - FEW) / (MANY - FEW), 0.0), 1.0)

    @property
    def trusted(self) -> bool:
        """Whether they can be learnt from."""
        return self.trust >= TRUSTED

    def follow(self, predictions: Tensor) -> None:
        """Follows the next predictions (n, C), in the order of the stream."""
        every = torch.cat([self.memory["answers"], predictions.detach().cpu().double()])
        new = torch.arange(REACH - 1, len(every))
        apart = new[:, None] - torch.arange(len(every))
        near = ((apart > 0) & (apart < REACH) & every.any(1)).double()  # (n, all)
        pairs = near.sum(1)
        collisions = ((every[new] @ every.T) * near).sum(1) / pairs.clamp(min=1)
        counts = torch.exp((new + 1 - len(every)).double() / HORIZON) * (pairs > 0)
        fade = math.exp(-len(new) / HORIZON)
        self.memory = {
            "answers": every[1 - REACH :],
            "collisions": self.memory["collisions"] * fade + collisions @ counts,
            "compared": self.memory["compared"] * fade + counts.sum(),
        }
