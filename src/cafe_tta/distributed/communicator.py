"""Collectives between ranks. A rank that is lost becomes an error that names it, never a hang."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from cafe_tta.distributed.ranks import RankError

TEXT_BYTES = 512  # of an error message that is sent to the other ranks
ROLL_CALL = 5.0  # seconds to find out which rank is lost


class Communicator:
    """The collectives of torch's process group; counts their bytes and remembers when they broke."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.bytes = 0  # that this rank passed to collectives since it was last set to 0
        self.broken = ""  # why this rank can no longer communicate with the others
        # Small messages are sent from the device that the backend supports.
        self._device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place. Every rank gets the same bits."""
        self._call("all_reduce", tensor, lambda: dist.all_reduce(tensor))
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have to be of one shape."""
        own = tensor.contiguous()
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        self._call("all_gather", own, lambda: dist.all_gather(gathered, own))
        return gathered

    def gather_numbers(self, *values: float) -> list[list[float]]:
        """A few numbers from every rank."""
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        return [row.tolist() for row in self.all_gather(own)]

    def gather_texts(self, text: str) -> list[str]:
        """A short text from every rank, for error messages."""
        content = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        own = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in self.all_gather(own)]

    def _call(self, name: str, tensor: Tensor, collective: Callable[[], object]) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        started = time.monotonic()
        try:
            collective()
        except RuntimeError as error:
            waited = time.monotonic() - started
            self.broken = self.broken or f"{name} failed"
            raise RankError(
                f"{self._who_is_lost()} ({name} failed after {waited:.0f} s); no rank can go on; "
                "start again from the last saved state, on as many ranks as you like"
            ) from error

    def _who_is_lost(self) -> str:
        """Takes a roll call in the key-value store that torchrun started: a rank that does not answer is lost."""
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"cafe-tta/alive/{self.rank}", "yes")
            deadline = time.monotonic() + ROLL_CALL
            silent = [rank for rank in range(self.size) if rank != self.rank]
            while silent and time.monotonic() < deadline:
                silent = [rank for rank in silent if not store.check([f"cafe-tta/alive/{rank}"])]
                time.sleep(0.05)
        except (RuntimeError, ValueError):
            return "the other ranks cannot be reached"
        if not silent:
            return "the connection between the ranks broke"
        return f"{named(silent)} died or did not answer in time"


def named(ranks: list[int]) -> str:
    """
    >>> named([1]), named([1, 3])
    ('rank 1', 'ranks 1, 3')
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
