"""The processes that `torchrun` started: who takes which part of the work, and whether all of them are still alive.

The ranks communicate through the key-value store that torchrun starts: they publish values, and they claim work by
counters that are incremented atomically, so that nothing is done twice. That needs no process group, in which adapters
would synchronise; `Job.process_group` makes one where it is wanted. Every forward pass sends a heartbeat, and every
rank watches the next one, the last rank the first.
"""

import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from cafe_tta.distributed.ranks import RankError

HEARTBEAT_TIMEOUT = 1800.0  # seconds; longer than any work without a forward pass, such as grouping many features
START_TIMEOUT = 600.0  # seconds that ranks have at least to start: machines do not start at the same time
POLL_INTERVAL = 0.05  # seconds
_jobs = itertools.count()  # of this process
_LOST = ("imed out", "imeout", "onnection")  # in the errors of PyTorch when another rank does not answer
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankLost(RankError):
    """Another rank, or the store of the job, does not answer."""


@dataclass(frozen=True)
class Share:
    """What one of several processes does: the number of this rank, and how many ranks there are.

    >>> [Share(rank, 3).part(2, 10, 15) for rank in range(3)]
    [slice(10, 11, None), slice(11, 13, None), slice(13, 15, None)]
    """

    rank: int = 0
    ranks: int = 1

    def part(self, number: int, start: int, stop: int) -> slice:
        """Where the images of this rank lie in a batch that goes from `start` to `stop`. May be empty."""
        edges = (start + (stop - start) * rank // self.ranks for rank in (self.rank, self.rank + 1))
        return slice(*edges)

    def turn(self, number: int, start: int, stop: int) -> slice:
        """The whole batch if it is the turn of this rank, else nothing: for answers that depend on the batch."""
        return slice(start, stop if number % self.ranks == self.rank else start)

    def all(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order. Needs a process group if there are several."""
        if self.ranks == 1:
            return [value]
        values = [None] * self.ranks
        torch.distributed.all_gather_object(values, value)
        return values

    def whole(self, parts: list[Tensor]) -> Tensor:
        """The values of all images in the order of the stream, from this rank's values for each batch."""
        return torch.cat([part for batch in zip(*self.all(parts), strict=True) for part in batch])


def torchrun_share() -> Share | None:
    """The share of this process; None unless torchrun started several processes.

    >>> torchrun_share() is None
    True
    """
    if any(name not in os.environ for name in _VARIABLES):
        return None
    share = Share(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return share if share.ranks > 1 else None


class Job:
    """Work that several ranks divide between them, as one of them sees it.

    >>> job = Job(Share(), torch.distributed.HashStore())
    >>> job.claim("first half"), job.claim("first half")
    (True, False)
    >>> job.publish("images", 3)
    >>> job.wait_for("images")
    3
    """

    def __init__(self, share: Share, store: Any, timeout: float = HEARTBEAT_TIMEOUT) -> None:
        self.rank, self.world, self.timeout = share.rank, share.ranks, timeout
        self.on_progress: Callable[[int], None] | None = None  # called with the images that any rank has processed
        self._store = store
        self._heartbeats = self._unreported = self._shown = 0
        self._next_heartbeat = 0.0
        self._seen, self._seen_at = b"", time.monotonic()  # the last heartbeat of the next rank

    # Communication

    def publish(self, name: str, value: Any = None) -> None:
        """Gives all ranks a value, under a name that is used once."""
        with self._store_errors():
            self._store.set(name, json.dumps(value))

    def wait_for(self, name: str) -> Any:
        """Waits until some rank has published the value."""
        while not self._is_published(name):
            self._poll()
        with self._store_errors():
            return json.loads(self._store.get(name))

    def claim(self, name: str) -> bool:
        """Whether this rank is the first to claim the work of that name."""
        return self._add(f"claim {name}", 1) == 1

    def barrier(self, name: str) -> None:
        """Waits until every rank has reached the barrier of that name."""
        self._report_progress()
        self._add(f"barrier {name}", 1)
        while self._add(f"barrier {name}", 0) < self.world:
            self._poll()
        self._report_progress()  # what the others did before they came

    def advance(self, images: int) -> None:
        """Counts images as processed."""
        self._unreported += images
        self.heartbeat()

    # Heartbeats

    def heartbeat(self, *_: Any) -> None:
        """Sends a heartbeat and looks for that of the next rank; at most once a second, however often it is called."""
        now = time.monotonic()
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + min(1.0, self.timeout / 10)
        self._heartbeats += 1
        with self._store_errors():
            self._store.set(f"alive {self.rank}", str(self._heartbeats))
        self._report_progress()
        self._watch(now)

    def _watch(self, now: float) -> None:
        other = (self.rank + 1) % self.world
        with self._store_errors():
            latest = self._store.get(f"alive {other}") if self._is_published(f"alive {other}") else b""
        if latest != self._seen:
            self._seen, self._seen_at = latest, now
        elif now - self._seen_at > self.timeout:
            who = f" ({json.loads(self._store.get(f'who {other}'))})" if self._is_published(f"who {other}") else ""
            raise RankLost(
                f"rank {other}{who} has sent no heartbeat for {self.timeout:g} s, the `timeout`: "
                "it hangs, or its machine is gone"
            )

    def _report_progress(self) -> None:
        images, self._unreported = self._unreported, 0
        done = self._add("images", images)
        if self.on_progress is not None:
            self.on_progress(done - self._shown)
            self._shown = done

    def _poll(self) -> None:
        time.sleep(POLL_INTERVAL)
        self.heartbeat()

    def _is_published(self, name: str) -> bool:
        with self._store_errors():
            return bool(self._store.check([name]))

    def _add(self, name: str, amount: int) -> int:
        with self._store_errors():
            return int(self._store.add(name, amount))

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RankLost(f"lost the other ranks: no answer at {address} ({_first_line(error)})") from error

    # From beginning to end

    def begin(self) -> None:
        """Waits until all ranks have started."""
        self.publish(f"who {self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        timeout, self.timeout = self.timeout, max(self.timeout, START_TIMEOUT)
        self.barrier("begin")
        self.timeout = timeout
        self._seen_at = time.monotonic()

    def end(self) -> None:
        """Waits until all ranks have done their work. Rank 0, which may host the store, leaves last."""
        self.barrier("end")
        if self.rank:
            self._add("left", 1)
            return
        while self._add("left", 0) < self.world - 1:
            self._poll()

    @contextmanager
    def process_group(self, backend: str | None = None) -> Iterator[None]:
        """Waits for all ranks and joins them in a process group for the block, inside which adapters synchronise.

        The default backend works wherever the tensors are: gloo on CPUs, NCCL on GPUs.
        """
        dist = torch.distributed
        backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self.barrier("process group")
        dist.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.world, timeout=timedelta(seconds=self.timeout)
        )
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError) or not any(sign in str(error) for sign in _LOST):
                raise
            raise RankLost(
                f"the ranks lost each other: another rank has ended or hung ({_first_line(error)})"
            ) from error
        finally:
            dist.destroy_process_group()  # without it, processes occasionally abort at exit


@contextmanager
def torchrun_job(timeout: float = HEARTBEAT_TIMEOUT) -> Iterator[Job]:
    """The job of the processes that torchrun started. The block is left without an error only if all ranks finish.

    A rank that sends no heartbeat for `timeout` seconds ends the job with an error.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous
    from torch.nn.modules.module import register_module_forward_hook

    share = torchrun_share()
    if share is None:
        raise ValueError("expected several processes, started by torchrun, but there is only this one")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", share.rank)) % torch.cuda.device_count())
    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=max(timeout, START_TIMEOUT)))))
    # The prefix separates this job from others, and from an attempt that torchrun started again after an error.
    prefix = f"cafe-tta {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {next(_jobs)}"
    job = Job(share, PrefixStore(prefix, store), timeout)
    job.begin()
    hook = register_module_forward_hook(job.heartbeat)
    try:
        yield job
    finally:
        hook.remove()
    job.end()


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
