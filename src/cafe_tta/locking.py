"""A file that one process at a time holds open, on every platform; the system releases it when the process dies."""

import math
import os
import time
from collections.abc import Callable
from typing import IO


def lock_file(
    path: str | os.PathLike[str], timeout: float = math.inf, waiting: Callable[[], None] = lambda: None
) -> IO[bytes]:
    """Opens a file to read and to append to, and locks it until it is closed.

    While another process has it, `waiting` is called every now and then; after `timeout` seconds, TimeoutError.
    """
    handle = open(path, "a+b")  # noqa: SIM115 - the caller closes it
    deadline = time.monotonic() + timeout
    while not _locked(handle):
        if time.monotonic() >= deadline:
            handle.close()
            raise TimeoutError(f"{path} has been locked by another process for {timeout:g} s")
        waiting()
        time.sleep(0.01)
    return handle


def _locked(handle: IO[bytes]) -> bool:
    try:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ModuleNotFoundError:  # Windows
            import msvcrt

            handle.seek(0)
            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError:
        return False
    return True
