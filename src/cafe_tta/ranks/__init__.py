"""The ranks that adapt as one: one process alone, or all processes of an initialised process group.

A method adds up what it knows of a batch through the ranks of its adapter, and every rank then holds the sums of the
whole batch. Alone, nothing is added, nothing is imported, and nothing is paid. `cafe_tta.ranks.together` is the rest.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cafe_tta import channels

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

    from cafe_tta.gaussians import Moments, SourceGaussians

TIMEOUT = 120.0  # seconds that a rank waits for the others

_apart = False  # read by `here`


class RankError(RuntimeError):
    """The ranks of a process group cannot go on together: one is lost, out of step, or has other weights."""


class Diverged(RankError):
    """The ranks do not hold the same weights, statistics or source. Raised on every rank at the same moment."""


class Ranks:
    """A process by itself: its batch is the whole batch. `Together` overrides all of this."""

    size = 1
    acting = False  # whether a batch of all ranks is being adapted to

    def __deepcopy__(self, memo: Any) -> "Ranks":
        return self  # copies of an adapter belong to the same ranks

    def fingerprint(self, made_of: Any) -> str:
        """A hash of what an adapter is made of, which every rank has to have from the same files."""
        return ""

    def step(self, adapter: Any, images: Tensor) -> AbstractContextManager[Any]:
        """What goes around adapting to a batch: every rank has to bring a good part of it, or none adapts."""
        adapter.check(images)
        return nullcontext()

    def count(self, images: Tensor) -> int:
        """Images of the whole batch that these images are a part of."""
        return len(images)

    def stand_in(self, images: Tensor) -> Tensor:
        """Images of which nothing is learnt, for an empty part of a batch."""
        raise ValueError("expected at least one image, but got none")

    def smallest(self, images: Tensor) -> int:
        """Images of the rank that has the fewest, but any."""
        return len(images)

    def sum(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Tensors added up over the ranks; each rank's gradient is that of its own part."""
        return parts

    def mean(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Means over the images, the first dimension, of the whole batch."""
        return tuple(value.mean(0) for value in values)

    def share(self, value: Tensor) -> Tensor:
        """A part of the loss that does not come from images: every rank has it, and its gradient counts once."""
        return value

    def moments(self, gaussians: "SourceGaussians", features: Tensor) -> "list[Moments]":
        """Moments of the features of the whole batch."""
        return gaussians.moments(features)

    def rows(self, rows: Tensor) -> Tensor:
        """Rows of all ranks, one under the other."""
        return rows

    def any(self, found: bool) -> bool:
        """Whether any rank found so."""
        return found

    def agree(self, refusal: str, loss: Tensor | None = None) -> str:
        """Why a step is refused, if any rank refuses it. A loss has to be the same on every rank."""
        return refusal

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Adds the gradients of the parameters up over the ranks."""

    def synchronise(self, layers: "Sequence[_BatchNorm]") -> None:
        """Makes BatchNorm layers normalise with the whole batch."""

    def var_mean(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Variance and mean of each channel over the whole batch."""
        return channels.var_mean(activations)

    def average(self, statistics: Sequence[Tensor]) -> None:
        """Replaces statistics that each rank has by their average, weighted by images."""

    def notes(self) -> dict[str, float]:
        """What adapting as one did for this batch."""
        return {}


ALONE = Ranks()


def here() -> Ranks:
    """The ranks that an adapter made now belongs to: of torch's process group, where one is initialised."""
    distributed = torch.distributed
    if _apart or not distributed.is_available() or not distributed.is_initialized():
        return ALONE
    if distributed.get_world_size() == 1:
        return ALONE
    from cafe_tta.ranks import together

    return together.of_process_group()


@contextmanager
def apart() -> Iterator[None]:
    """Adapters made inside belong to this process alone, whatever process group there is."""
    global _apart
    before, _apart = _apart, True
    try:
        yield
    finally:
        _apart = before


@contextmanager
def joined(timeout: float = TIMEOUT, backend: str | None = None) -> Iterator[int]:
    """The process group of `torchrun`, from beginning to end; gives the number of this rank. 0 without torchrun.

    A rank that waits for the others longer than `timeout` seconds ends with an error. The backend is NCCL where there
    are GPUs, and gloo elsewhere.
    """
    if not timeout > 0:
        raise ValueError(f"expected `timeout` to be above 0 seconds, but got {timeout}")
    if "RANK" not in os.environ:
        yield 0
        return
    from cafe_tta.ranks import together

    with together.process_group(timeout, backend) as rank:
        yield rank
