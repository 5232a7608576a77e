"""Under torchrun: which rank this is, what the ranks tell each other, and whether all of them are still alive.

The ranks talk through the key-value store that torchrun starts: what one rank has done, and counters that are added to
in one step, so that no work is done twice. That needs no process group, in which adapters would synchronise; a group is
made only where one is wanted. Every forward pass is a sign of life; every rank watches the next one, the last rank the
first.
"""

import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from cafe_tta.cli.console import Interrupted

TIMEOUT = 1800.0  # seconds; longer than any step without a forward pass, such as grouping thousands of features
JOINING = 600.0  # at least so long for all ranks to start: machines do not start at once
PAUSE = 0.05  # seconds between two looks
_jobs = itertools.count()  # of this process
_LOST = ("imed out", "imeout", "onnection")  # what errors of PyTorch say when another rank does not answer
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

PANEL = "Many processes, started by torchrun"

TimeoutOption = Annotated[
    float,
    typer.Option(
        min=1,
        help="Under torchrun: a rank that gives no sign of life for so many seconds ends the job.",
        rich_help_panel=PANEL,
    ),
]


class RankLost(TimeoutError):
    """A rank has not been heard of for too long."""


@dataclass(frozen=True)
class Rank:
    """One of several processes that torchrun started."""

    number: int
    of: int


def rank() -> Rank | None:
    """Which rank this process is; None where it is the only one.

    >>> rank() is None
    True
    """
    if any(name not in os.environ for name in _VARIABLES):
        return None
    found = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return found if found.of > 1 else None


@contextmanager
def only_the_first_speaks() -> Iterator[None]:
    """Rank 0 prints; the others are quiet, until an error of theirs has left this block."""
    found = rank()
    if found is None or not found.number:
        yield
        return
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def name_of_rank() -> str:
    """What an error begins with: whose it is."""
    found = rank()
    return "" if found is None else f"rank {found.number}: "


def tell_torchrun(message: str) -> None:
    """Hands an error to torchrun, whose last words then say what happened and not only where."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and rank() is not None and not Path(path).exists():
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))


class Job:
    """The ranks of a job, as one of them sees them."""

    def __init__(self, own: Rank, store: Any, timeout: float = TIMEOUT) -> None:
        self.rank, self.world, self.timeout = own.number, own.of, timeout
        self.bar: Callable[[int], None] | None = None  # told how many images all the ranks have dealt with
        self._store = store
        self._beats = self._pending = self._shown = 0
        self._next = 0.0
        self._seen, self._seen_at = b"", time.monotonic()

    # What ranks tell each other

    def tell(self, name: str, value: Any = None) -> None:
        """Says something to all ranks, once."""
        with self._talking():
            self._store.set(name, json.dumps(value))

    def hear(self, name: str) -> Any:
        """Waits until some rank has said it."""
        while not self._said(name):
            self._pause()
        with self._talking():
            return json.loads(self._store.get(name))

    def claim(self, name: str) -> bool:
        """Whether this rank is the first to ask for it."""
        return self._add(f"claim {name}", 1) == 1

    def meet(self, name: str) -> None:
        """Waits until every rank has come here."""
        self._count()
        self._add(f"meet {name}", 1)
        while self._add(f"meet {name}", 0) < self.world:
            self._pause()
        self._count()  # what the others have done before they came

    def advance(self, amount: int) -> None:
        """So many images more were dealt with."""
        self._pending += amount
        self.beat()

    # Signs of life

    def beat(self, *_: Any) -> None:
        """Gives a sign of life, and looks for the next rank's; once in a while, however often it is called."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + min(1.0, self.timeout / 10)
        self._beats += 1
        with self._talking():
            self._store.set(f"alive {self.rank}", str(self._beats))
        self._count()
        self._watch(now)

    def _watch(self, now: float) -> None:
        other = (self.rank + 1) % self.world
        with self._talking():
            found = self._store.get(f"alive {other}") if self._said(f"alive {other}") else b""
        if found != self._seen:
            self._seen, self._seen_at = found, now
        elif now - self._seen_at > self.timeout:
            who = f" ({json.loads(self._store.get(f'who {other}'))})" if self._said(f"who {other}") else ""
            raise RankLost(
                f"rank {other}{who} has given no sign of life for {self.timeout:g} s: it hangs, or its machine "
                "is gone; see --timeout"
            )

    def _count(self) -> None:
        pending, self._pending = self._pending, 0
        done = self._add("images", pending)
        if self.bar is not None:
            self.bar(done - self._shown)
            self._shown = done

    def _pause(self) -> None:
        time.sleep(PAUSE)
        self.beat()

    def _said(self, name: str) -> bool:
        with self._talking():
            return bool(self._store.check([name]))

    def _add(self, name: str, amount: int) -> int:
        with self._talking():
            return int(self._store.add(name, amount))

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ConnectionError(f"lost the other ranks: nobody answers at {where} ({_first_line(error)})") from error

    # From first to last

    def begin(self) -> None:
        """Waits until all ranks are there."""
        self.tell(f"who {self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        timeout, self.timeout = self.timeout, max(self.timeout, JOINING)
        self.meet("begin")
        self.timeout = timeout
        self._seen_at = time.monotonic()

    def end(self) -> None:
        """Waits until all ranks have done their work. Rank 0, whose store it may be, leaves last."""
        self.meet("end")
        if self.rank:
            self._add("left", 1)
            return
        while self._add("left", 0) < self.world - 1:
            self._pause()

    @contextmanager
    def group(self, backend: str) -> Iterator[None]:
        """All ranks in a process group, to which they have come before: what is in this block may synchronise."""
        import torch.distributed as dist

        self.meet("group")
        dist.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.world, timeout=timedelta(seconds=self.timeout)
        )
        try:
            yield
        except RuntimeError as error:
            if type(error).__module__.startswith("cafe_tta") or not any(sign in str(error) for sign in _LOST):
                raise
            raise RankLost(
                f"the ranks lost each other: another rank has ended or hung ({_first_line(error)})"
            ) from error
        finally:
            dist.destroy_process_group()  # without it, processes now and then abort at their end


@contextmanager
def joined(timeout: float) -> Iterator[Job]:
    """The job that this process is a rank of. Left without an error only when all ranks have done their work."""
    import torch
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous
    from torch.nn.modules.module import register_module_forward_hook

    own = rank()
    if own is None:
        raise ValueError("expected several processes, started by torchrun, but this one is alone")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", own.number)) % torch.cuda.device_count())
    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=max(timeout, JOINING)))))
    # When torchrun starts the ranks again after an error, what was said before does not count; nor in another job.
    prefix = f"cafe-tta {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {next(_jobs)}"
    job = Job(own, PrefixStore(prefix, store), timeout)
    job.begin()
    alive = register_module_forward_hook(job.beat)
    try:
        yield job
    finally:
        alive.remove()
    job.end()


@contextmanager
def told_to_stop(job: Job) -> Iterator[None]:
    """Rank 0 does not simply die when torchrun ends the job, because of another rank: it can say how far things are."""

    def stop(number: int, frame: Any) -> None:
        raise Interrupted("", number)

    before = signal.signal(signal.SIGTERM, stop) if job.rank == 0 else None
    try:
        yield
    finally:
        if job.rank == 0:
            signal.signal(signal.SIGTERM, before)


def best_backend() -> str:
    """What synchronises tensors wherever they are: gloo on CPUs, NCCL on GPUs."""
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
