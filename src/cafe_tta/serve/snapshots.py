"""Snapshots: kept in memory to roll back to, and on disk so that a killed server goes on where it was."""

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cafe_tta import storage

KIND, FORMAT = "serve-snapshot", 1
_NAME = re.compile(r"snapshot-(\d{8})\.safetensors")


@dataclass(frozen=True)
class Snapshot:
    """All that answers depend on, at one moment."""

    version: int
    time: float
    tensors: Mapping[str, Tensor]
    alignment: float | None = None

    def describe(self) -> dict[str, Any]:
        return {"version": self.version, "time": self.time, "alignment": self.alignment}

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class History:
    """The last snapshots, at most `limit` of them and `max_bytes` in all; one is always kept."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self._limit, self._max_bytes = limit, max_bytes
        self._snapshots: dict[int, Snapshot] = {}  # in the order of their versions

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(list(self._snapshots.values()))

    def __len__(self) -> int:
        return len(self._snapshots)

    def add(self, snapshot: Snapshot) -> None:
        self._snapshots[snapshot.version] = snapshot
        while len(self) > 1 and (len(self) > self._limit or sum(s.num_bytes() for s in self) > self._max_bytes):
            del self._snapshots[next(iter(self._snapshots))]

    def get(self, version: int) -> Snapshot | None:
        return self._snapshots.get(version)

    def before(self, version: int) -> list[Snapshot]:
        """Older ones than that version, the newest first."""
        return [snapshot for snapshot in reversed(list(self)) if snapshot.version < version]

    def forget(self, version: int) -> None:
        self._snapshots.pop(version, None)

    def clear(self) -> None:
        self._snapshots.clear()


@dataclass(frozen=True)
class Saved:
    """What a file of the store holds."""

    path: Path
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


class Store:
    """A folder of numbered files, each whole and with a checksum, the last of them the newest.

    A file is written under another name, brought to disk and then renamed: a kill at any moment leaves the files as
    they were, and at worst a temporary one, which the next start removes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.damaged: list[str] = []  # files that could not be used, in words
        self._limit = limit
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot use {folder} as the folder of the state: {error}") from error
        self._lock = open(folder / ".lock", "a")  # noqa: SIM115 - held until close
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(f"{folder} is in use by another server; choose another folder for the state") from error
        for left_over in folder.glob(".snapshot-*.tmp"):
            left_over.unlink(missing_ok=True)
        self._number = max((number for number, _ in self._files()), default=0)

    def write(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Writes the next file, and removes the oldest where there are too many."""
        self._number += 1
        path = self.folder / f"snapshot-{self._number:08d}.safetensors"
        storage.write(path, KIND, FORMAT, tensors, {"time": time.time(), **meta})
        for _, old in self._files()[: -self._limit]:
            old.unlink(missing_ok=True)
        return path

    def find(self, version: int) -> Saved | None:
        """The newest file that holds a version."""
        return next((saved for saved in self.readable() if saved.meta.get("version") == version), None)

    def close(self) -> None:
        self._lock.close()

    def readable(self) -> Iterator[Saved]:
        """The files that are whole, the newest first. Damaged ones are passed over, noted and left where they are."""
        for _, path in reversed(self._files()):
            try:
                tensors, meta = storage.read(path, KIND, FORMAT)
            except (ValueError, OSError, KeyError) as error:
                text = str(error)
                if text not in self.damaged:
                    self.damaged.append(text)
                continue
            yield Saved(path, tensors, meta)

    def _files(self) -> list[tuple[int, Path]]:
        found = []
        for name in os.listdir(self.folder):
            if match := _NAME.fullmatch(name):
                found.append((int(match[1]), self.folder / name))
        return sorted(found)
