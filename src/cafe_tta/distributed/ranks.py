"""The ranks that adapt as one: a process alone, or all processes of an initialised process group.

A method sums what it computes from a batch over the ranks of its adapter, so that every rank holds the sums of the
whole batch. For a process alone these are its own values, and nothing is imported or communicated.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cafe_tta import channels

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

    from cafe_tta.distributed.synchronised import Lockstep
    from cafe_tta.gaussians import Moments, SourceGaussians

STEP_TIMEOUT = 120.0  # seconds that a rank waits for the others in a step

_apart = False  # read by `here`


class RankError(RuntimeError):
    """The ranks cannot continue together: one is lost, out of step, or has different weights.

    >>> issubclass(Diverged, RankError)
    True
    """


class Diverged(RankError):
    """The ranks do not hold the same weights, statistics or source. Raised on every rank at the same moment."""


class Ranks:
    """A process alone: its batch is the whole batch. `SynchronisedRanks` overrides all of this.

    >>> import torch
    >>> losses = torch.tensor([1.0, 3.0])
    >>> ALONE.mean(losses), ALONE.count(losses)
    ((tensor(2.),), 2)
    """

    size = 1
    in_step = False  # whether all ranks are adapting to a batch

    def __deepcopy__(self, memo: Any) -> "Ranks":
        return self  # copies of an adapter belong to the same ranks

    def lockstep(self, made_of: Any) -> "Lockstep | None":
        """Keeps an adapter in step with those of the other ranks; None for a process alone.

        `made_of` holds the tensors and values from which every rank has to make the same adapter.
        """
        return None

    def count(self, images: Tensor) -> int:
        """The number of images in the whole batch, of which these are a part."""
        return len(images)

    def smallest(self, images: Tensor) -> int:
        """The number of images on the rank that has the fewest, among those that have any."""
        return len(images)

    def stand_in(self, images: Tensor) -> Tensor:
        """Placeholder images for a rank whose part of the batch is empty. Nothing is learnt from them."""
        raise ValueError("expected at least one image, but got none")

    def sum(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Sums of tensors over the ranks; the gradient of each rank is that of its own part."""
        return parts

    def mean(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Means over the images of the whole batch, which are the first dimension."""
        return tuple(value.mean(0) for value in values)

    def share(self, value: Tensor) -> Tensor:
        """A term of the loss that does not depend on images: every rank has it, and its gradient counts once."""
        return value

    def moments(self, gaussians: "SourceGaussians", features: Tensor) -> "list[Moments]":
        """Moments of the features of the whole batch."""
        return gaussians.moments(features)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, concatenated in the order of the ranks."""
        return rows

    def own_rows(self, rows: Tensor) -> Tensor:
        """This rank's part of rows that `gather` concatenated."""
        return rows

    def own_part(self, rows: Tensor) -> Tensor:
        """Rows of this rank's images, without those of placeholders."""
        return rows

    def reduce(self, part: Tensor) -> Tensor:
        """The sum over the ranks of what each then uses for its own images: gradients are summed, too."""
        return part

    def any(self, condition: bool) -> bool:
        """Whether the condition holds on any rank."""
        return condition

    def agree(self, refusal: str, loss: Tensor | None = None) -> str:
        """Why a step is refused, if any rank refuses it; else empty. The loss has to be the same on every rank."""
        return refusal

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sums the gradients of the parameters over the ranks."""

    def synchronise(self, layers: "Sequence[_BatchNorm]") -> None:
        """Makes BatchNorm layers normalise with the whole batch."""

    def var_mean(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Variance and mean of each channel over the whole batch."""
        return channels.var_mean(activations)

    def average(self, statistics: Sequence[Tensor]) -> None:
        """Replaces the statistics of each rank by their average over the ranks, weighted by images."""


ALONE = Ranks()


def here() -> Ranks:
    """The ranks that an adapter made now belongs to: those of torch's process group, if one is initialised."""
    dist = torch.distributed
    if _apart or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    from cafe_tta.distributed import synchronised

    return synchronised.of_process_group()


@contextmanager
def apart() -> Iterator[None]:
    """Adapters made inside this block belong to this process alone, even if there is a process group."""
    global _apart
    before, _apart = _apart, True
    try:
        yield
    finally:
        _apart = before


@contextmanager
def joined(timeout: float = STEP_TIMEOUT, backend: str | None = None) -> Iterator[int]:
    """Joins the process group of `torchrun` for the block and gives the number of this rank: 0 without torchrun.

    A rank that waits for the others longer than `timeout` seconds ends with an error. The backend is NCCL where there
    are GPUs, and gloo elsewhere.
    """
    if not timeout > 0:
        raise ValueError(f"expected `timeout` to be above 0 seconds, but got {timeout}")
    if "RANK" not in os.environ:
        yield 0
        return
    from cafe_tta.distributed import synchronised

    with synchronised.process_group(timeout, backend) as rank:
        yield rank
