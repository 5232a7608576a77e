"""Records: one JSON line for every finished run, with all that decided its number. Nothing is lost, nothing is mixed.

A folder of results holds `settings.json`, which says what its runs have in common, and `records.jsonl`. A line is
written at once and put on disk before the next run begins; a line that was cut off by a crash is dropped, and its run
is done again. Several processes may write to the same folder: they lock the file for the moment of writing.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cafe_tta import storage

FORMAT = 1
SETTINGS, RECORDS = "settings.json", "records.jsonl"
LOCKED = 60.0  # seconds to wait for a file that another process writes to; it takes milliseconds


class Results:
    """A folder of records that belong together."""

    def __init__(self, folder: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.waiting: Callable[[], None] = lambda: None  # called again and again while another process has the file
        self.folder.mkdir(parents=True, exist_ok=True)
        self.settings = json.loads(json.dumps(settings))  # as it comes back from the file
        path = self.folder / SETTINGS
        if path.exists():
            _require_same(json.loads(path.read_text()), self.settings, path)
        elif (self.folder / RECORDS).exists():
            raise ValueError(f"{self.folder} has {RECORDS} but no {SETTINGS}: choose another folder for new results")
        else:
            storage.write_bytes(path, json.dumps(self.settings, indent=1, sort_keys=True).encode())
        self.dropped = False
        self._done: dict[tuple[Any, ...], dict[str, Any]] = {}
        if (self.folder / RECORDS).exists():
            with _locked(self.folder / RECORDS, self.waiting) as handle:
                self.dropped = _drop_unfinished_line(handle)
                self._done = {key_of(record): record for record in read(self.folder / RECORDS)}

    def __len__(self) -> int:
        return len(self._done)

    def find(self, key: tuple[Any, ...], config: Any) -> dict[str, Any] | None:
        """The record of a run that is done already, made with the same options.

        An option that the record does not have did not exist then: it is as it is by default.
        """
        record = self._done.get(key)
        if record is not None:
            theirs, ours = asdict(type(config)()) | record["config"], json.loads(json.dumps(asdict(config)))
            _require_same({"config": theirs}, {"config": ours}, self.folder / RECORDS)
        return record

    def add(self, record: Mapping[str, Any]) -> None:
        """Writes a record down, at once and for good."""
        line = json.dumps(record, sort_keys=True).encode() + b"\n"
        with _locked(self.folder / RECORDS, self.waiting) as handle:
            _drop_unfinished_line(handle)  # of a process that has crashed since
            rest = line
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        loaded = json.loads(line)
        self._done[key_of(loaded)] = loaded

    def records(self) -> list[dict[str, Any]]:
        return list(self._done.values())


def key_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a run is, within a folder: two records with the same key are of the same run."""
    return (record["protocol"], record["mode"], record["label"], record["seed"], record["episode"]["name"])


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a file. A line that is not JSON in the middle of it is an error."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}: line {number} is not a record ({error}); restore it or delete the line"
            ) from error
    return records


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[int]:
    """A file that no other process reads or writes meanwhile, as a handle that writes at its end."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + LOCKED
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} has been locked by another process for {LOCKED:g} s") from None
                waiting()
                time.sleep(0.01)
        yield handle
    finally:
        os.close(handle)  # and gives the lock back


def _drop_unfinished_line(handle: int) -> bool:
    """Removes what a crash left of a line. Only a whole line ends in a line break."""
    size = os.fstat(handle).st_size
    if not size or os.pread(handle, 1, size - 1) == b"\n":
        return False
    content = os.pread(handle, size, 0)
    os.ftruncate(handle, content.rfind(b"\n") + 1)
    return True


def _require_same(theirs: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> None:
    if differences := list(_differences(theirs, ours)):
        shown = "; ".join(f"{name} is {a!r} there, {b!r} now" for name, a, b in differences[:5])
        raise ValueError(f"{path} belongs to other settings: {shown}; choose another folder for these results")


def _differences(a: Any, b: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = []
        for key in sorted(a.keys() | b.keys()):
            found += _differences(a.get(key), b.get(key), f"{name}.{key}" if name else key)
        return found
    return [] if a == b else [(name, a, b)]
