"""A memory of images that is balanced over their predicted classes (RoTTA's category-balanced sampling)."""

import math
from collections import Counter

from torch import Tensor

Item = tuple[Tensor, int, float, float]  # image, predicted class, entropy, age in images


class BalancedMemory:
    """At most `capacity` images, at most about capacity / classes of each predicted class.

    An image is removed for its score λ_t / (1 + e^(-age / capacity)) + λ_u entropy / ln C: the old and the uncertain.

    >>> import torch
    >>> memory = BalancedMemory(4, classes=2)
    >>> for predicted in (0, 0, 0, 1):
    ...     memory.add(torch.zeros(3), predicted, entropy=0.1)
    >>> [item[1] for item in memory.items]
    [0, 0, 1]
    """

    def __init__(self, capacity: int, classes: int, age_weight: float = 1.0, entropy_weight: float = 1.0) -> None:
        self.capacity, self.classes = capacity, classes
        self.age_weight, self.entropy_weight = age_weight, entropy_weight
        self.items: list[Item] = []

    def score(self, entropy: float, age: float) -> float:
        share = entropy / math.log(self.classes) if self.classes > 1 else 0.0
        return self.age_weight / (1 + math.exp(-age / self.capacity)) + self.entropy_weight * share

    def add(self, image: Tensor, predicted: int, entropy: float) -> None:
        """Adds an image where there is room for its class, or in place of one with a higher score; all grow older."""
        counts = Counter(item[1] for item in self.items)
        if counts[predicted] < self.capacity / self.classes:
            full = len(self.items) >= self.capacity
            most = max(counts.values(), default=0)
            crowded = {label for label, count in counts.items() if count == most} if full else None
        else:
            crowded = {predicted}
        if crowded is None or self._removed(crowded, self.score(entropy, 0)):
            self.items.append((image, predicted, entropy, 0.0))
        self.items = [(*item[:3], item[3] + 1) for item in self.items]

    def _removed(self, labels: set[int], score: float) -> bool:
        """Removes the item with the highest score of these classes, the last of equals, if it is above `score`."""
        scores = [(self.score(item[2], item[3]), i) for i, item in enumerate(self.items) if item[1] in labels]
        highest, index = max(scores)
        if highest <= score:
            return False
        del self.items[index]
        return True
