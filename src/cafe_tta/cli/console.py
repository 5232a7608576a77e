"""Results go to stdout; progress, notes and errors to stderr, and progress only where somebody watches."""

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cafe_tta.data import Unreadable
from cafe_tta.distributed import Share, torchrun_share
from cafe_tta.source import SourceWarning

Advance = Callable[[int], None]


class Interrupted(KeyboardInterrupt):
    """The user or the system asked to stop, and all that is needed to go on was saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StopRequest:
    """Turns Ctrl-C and a polite kill into a question, asked between two batches. A second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal_number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number:
            raise KeyboardInterrupt
        self.signal_number = number


def say(text: str) -> None:
    """One line for the user's eyes, beside the results."""
    print(" ".join(text.split()), file=sys.stderr, flush=True)


@contextmanager
def said_warnings() -> Iterator[None]:
    """Prints warnings about source values as one line each, without the line of code that they come from."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, SourceWarning):
                say(f"warning: {message}")
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        warnings.simplefilter("always", SourceWarning)
        yield


def show_table(table: Table) -> None:
    # A file or a pipe has no width: nothing is cut or folded there.
    width = None if sys.stdout.isatty() else 200
    Console(file=sys.stdout, highlight=False, markup=False, width=width).print(table)


def show_facts(facts: list[tuple[str, str]]) -> None:
    """Names and values, one a line."""
    width = max(len(name) for name, _ in facts) + 2
    for name, value in facts:
        print(f"{name:<{width}}{value}".rstrip())


@contextmanager
def progress(description: str, total: int) -> Iterator[Advance]:
    """A bar on stderr, if that is a terminal, else a line every now and then. Gives the function that moves it on."""
    if not sys.stderr.isatty():
        yield _Lines(description, total).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)


class _Lines:
    """Progress where nobody watches, such as a log: a line every `EVERY` seconds; none for what is quick."""

    EVERY = 30.0

    def __init__(self, description: str, total: int) -> None:
        self._description, self._total, self._done = description, total, 0
        self._began = self._said = time.monotonic()
        self._start: int | None = None  # what an earlier run had done

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if self._start is None:
            self._start = self._done if now - self._began < 0.1 else 0
        if now - self._said < self.EVERY:
            return
        self._said = now
        made = self._done - self._start
        left = f", about {duration((now - self._began) / made * (self._total - self._done))} left" if made else ""
        say(f"{self._description}: {self._done} of {self._total}{left}")


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> duration(41.2), duration(320), duration(9000)
    ('41 s', '5 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def counted(number: int, name: str, plural: str = "") -> str:
    """A number of things.

    >>> counted(1, "image"), counted(2, "image"), counted(0, "batch", "batches")
    ('1 image', '2 images', '0 batches')
    """
    return f"{number} {name if number == 1 else plural or name + 's'}"


def readable_bytes(size: int) -> str:
    """A size in the unit that suits it.

    >>> readable_bytes(900), readable_bytes(14_230), readable_bytes(98_000_000)
    ('900 bytes', '14.2 kB', '98.0 MB')
    """
    if size < 1000:
        return f"{size} bytes"
    power = min(len(str(size)) // 3 if len(str(size)) % 3 else len(str(size)) // 3 - 1, 3)
    return f"{size / 1000**power:.1f} {('kB', 'MB', 'GB')[power - 1]}"


# Under torchrun


@contextmanager
def only_rank_0_prints() -> Iterator[None]:
    """Silences the other ranks inside the block; an error that leaves it can be printed."""
    if not (torchrun_share() or Share()).rank:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Lets rank 0 say how far it got when torchrun ends the job because of another rank."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted("", number)

    if (torchrun_share() or Share()).rank:
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say_error(message: str) -> None:
    """Prints an error, and hands it to torchrun, whose summary then says what happened on this rank."""
    share = torchrun_share()
    say(f"{'' if share is None else f'rank {share.rank}: '}error: {message}")
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and share is not None and not Path(path).exists():
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))


def say_unreadable(unreadable: Sequence[Unreadable]) -> None:
    """Names the first few images that were left out."""
    for item in unreadable[:5]:
        say(f"note: left out {item.name}: {item.why}")
    if len(unreadable) > 5:
        say(f"note: left out {len(unreadable) - 5} more")
