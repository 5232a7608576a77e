"""Several processes in one run: each sees its part of every batch, and all know what came of the whole."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """What of every batch this process sees: all of it, or the part of one rank of a process group.

    >>> [Share(rank, 3).part(2, 10, 15) for rank in range(3)]
    [slice(10, 11, None), slice(11, 13, None), slice(13, 15, None)]
    """

    rank: int = 0
    ranks: int = 1

    def part(self, number: int, start: int, stop: int) -> slice:
        """Where this rank's images lie in a batch that goes from `start` to `stop`. May be empty."""
        edges = (start + (stop - start) * number // self.ranks for number in (self.rank, self.rank + 1))
        return slice(*edges)

    def turn(self, number: int, start: int, stop: int) -> slice:
        """The whole batch, if it is this rank's turn, or nothing of it: where an answer may depend on its batch."""
        return slice(start, stop if number % self.ranks == self.rank else start)

    def all(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self.ranks == 1:
            return [value]
        import torch.distributed as dist

        values = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def whole(self, parts: list[Tensor]) -> Tensor:
        """Values of all images in the order of the stream, from this rank's values, batch by batch."""
        return torch.cat([part for batch in zip(*self.all(parts), strict=True) for part in batch])
