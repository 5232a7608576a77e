"""A file that one process at a time holds open, on every platform; the system releases it when the process dies."""

import os
import time
from typing import IO


def lock_file(path: str | os.PathLike[str], *, wait: bool) -> IO[str]:
    """Opens a file and locks it until it is closed. Where another process has it: waits, or raises OSError."""
    handle = open(path, "a")  # noqa: SIM115 - the caller closes it
    try:
        while not _locked(handle, wait):
            time.sleep(0.1)
    except OSError:
        handle.close()
        raise
    return handle


def _locked(handle: IO[str], wait: bool) -> bool:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return _locked_on_windows(handle, wait)
    fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def _locked_on_windows(handle: IO[str], wait: bool) -> bool:
    import msvcrt

    handle.seek(0)
    try:
        msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError:
        if wait:
            return False
        raise
    return True
