"""What the ranks say to each other. A rank that is lost becomes an error that says which, never a hang."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from cafe_tta.ranks import RankError

TEXT = 512  # bytes of an error message that the other ranks are told
LISTENING = 5.0  # seconds to find out who is lost


class Wire:
    """Collectives of torch's process group."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.bytes = 0  # that this rank gave to collectives since somebody set it to 0
        self.lost = ""  # why this rank can no longer speak to the others
        # Small messages travel from where the backend takes them.
        self._place = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"

    def add_up(self, tensor: Tensor) -> Tensor:
        """Adds a tensor up over the ranks, in place. Every rank gets the same bits."""
        self._call("all_reduce", tensor, lambda: dist.all_reduce(tensor))
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of every rank, which are of one shape."""
        own = tensor.contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._call("all_gather", own, lambda: dist.all_gather(found, own))
        return found

    def numbers(self, *values: float) -> list[list[float]]:
        """A few numbers of every rank."""
        own = torch.tensor(values, dtype=torch.float64, device=self._place)
        return [row.tolist() for row in self.gather(own)]

    def texts(self, text: str) -> list[str]:
        """A short text of every rank: for errors."""
        content = text.encode()[:TEXT].ljust(TEXT, b"\0")
        own = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._place)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in self.gather(own)]

    def _call(self, name: str, tensor: Tensor, collective: Callable[[], object]) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        started = time.monotonic()
        try:
            collective()
        except RuntimeError as error:
            waited = time.monotonic() - started
            self.lost = self.lost or f"{name} failed"
            raise RankError(
                f"{self._who_is_lost()} ({name} failed after {waited:.0f} s); no rank can go on; "
                "start again from the last saved state, on as many ranks as you like"
            ) from error

    def _who_is_lost(self) -> str:
        """Those who are left sign in where torchrun introduced the ranks to each other; who does not, is lost."""
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"cafe-tta/alive/{self.rank}", "yes")
            until = time.monotonic() + LISTENING
            silent = [rank for rank in range(self.size) if rank != self.rank]
            while silent and time.monotonic() < until:
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
