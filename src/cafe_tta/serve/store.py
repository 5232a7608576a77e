"""Snapshots on disk: a folder of numbered files, and what the metadata of each must be."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cafe_tta import storage
from cafe_tta.locking import lock_file
from cafe_tta.options import Options, option
from cafe_tta.serve.cameras import check_name
from cafe_tta.serve.events import EVENTS, MOST_VERSION, OTHERS, Event, from_json

KIND, FORMAT = "serve-snapshot", 1
MOST_OPTED_OUT = 10_000
_NAME = re.compile(r"snapshot-(\d{8,})\.safetensors")


@dataclass(frozen=True)
class AdapterMeta(Options):
    """What an adapter says of itself."""

    method: str = option(None, "Name of the method.")
    config: dict[str, Any] = option(None, "Its options.")
    classifier: dict[str, Any] = option(None, "Which classifier it adapts.")
    counters: dict[str, Any] = option(None, "What it did.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.classifier.get("weights"), dict):
            raise ValueError("expected `classifier` to name the weights of a classifier")


@dataclass(frozen=True)
class SavedMeta(Options):
    """The metadata of a saved state: written and read as declared here."""

    time: float = option(None, "When it was saved, in seconds since 1970.", least=0)
    version: int = option(None, "Of the snapshot.", least=0, most=MOST_VERSION)
    highest: int = option(None, "Highest version that was given out.", least=0, most=MOST_VERSION)
    adapter: AdapterMeta = option(None, "What the adapter says of itself.")
    events: list[Event] = option(None, "The last events.")
    opted_out: list[str] = option(None, "Cameras that are not adapted to.")
    trusted: list[str] = option([], "Cameras that need not earn their trust again.")
    contributions: dict[str, int] | None = option(None, "Images of each camera that this version was adapted to.")
    snapshots: list[Any] = option([], "Snapshots that were in memory, for people who read the file.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version > self.highest:
            raise ValueError(f"expected `version` to be at most `highest` = {self.highest}, but got {self.version}")
        if len(self.events) > EVENTS or len(self.opted_out) > MOST_OPTED_OUT:
            raise ValueError(f"expected at most {EVENTS} events and {MOST_OPTED_OUT} cameras that are opted out")
        for name in (*self.opted_out, *self.trusted, *self.learnt_from):
            check_name(name)
        if not all(type(count) is int and count > 0 for count in self.learnt_from.values()):
            raise ValueError("expected `contributions` to be numbers of images")

    @property
    def learnt_from(self) -> dict[str, int]:
        """The contributions; a file of an earlier release, which has none, may have learnt from any camera."""
        return {OTHERS: 1} if self.contributions is None else self.contributions

    @classmethod
    def read(cls, content: Any) -> "SavedMeta":
        """The metadata that the JSON of a file holds; raises ValueError where it is not as declared."""
        if isinstance(content, dict):
            adapter, events = content.get("adapter"), content.get("events")
            content = content | {"adapter": from_json(AdapterMeta, adapter, "`adapter`")}
            if isinstance(events, list):
                content |= {"events": [from_json(Event, event, "an event") for event in events]}
        meta: SavedMeta = from_json(cls, content, "the metadata")
        return meta


@dataclass(frozen=True)
class Saved:
    """The content of a file of the store."""

    path: Path
    tensors: dict[str, Tensor]
    meta: SavedMeta


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
        try:
            self._lock = lock_file(folder / ".lock", timeout=0)
        except OSError as error:
            raise ValueError(f"{folder} is in use by another server; choose another folder for the state") from error
        for left_over in folder.glob(".snapshot-*.tmp"):
            left_over.unlink(missing_ok=True)
        self._number = max((number for number, _ in numbered_files(folder)), default=0)

    def write(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Writes the next file, and removes the oldest where there are too many."""
        declared = SavedMeta(time=time.time(), **meta)
        self._number += 1
        path = self.folder / f"snapshot-{self._number:08d}.safetensors"
        storage.write(path, KIND, FORMAT, tensors, asdict(declared))
        for _, old in numbered_files(self.folder)[: -self._limit]:
            old.unlink(missing_ok=True)
        return path

    def find(self, version: int) -> Saved | None:
        """The newest file that holds a version."""
        return next((saved for saved in self.readable() if saved.meta.version == version), None)

    def close(self) -> None:
        self._lock.close()

    def readable(self) -> Iterator[Saved]:
        """The files that are whole, the newest first. Damaged ones are skipped, noted and left where they are."""
        return read_files(self.folder, self.pass_over)

    def pass_over(self, text: str) -> None:
        if text not in self.damaged:
            self.damaged.append(text)


def read_files(folder: Path, pass_over: Callable[[str], None] = lambda text: None) -> Iterator[Saved]:
    """The saved states of a folder that are whole, the newest first; why the others are not goes to `pass_over`."""
    for _, path in reversed(numbered_files(folder)):
        try:
            tensors, meta = storage.read(path, KIND, FORMAT)
            saved = Saved(path, tensors, SavedMeta.read(meta))
        except (ValueError, OSError, KeyError, TypeError) as error:
            text = str(error).replace(f"{folder}{os.sep}", "")
            pass_over(text if path.name in text else f"{path.name}: {text}")
            continue
        yield saved


def numbered_files(folder: Path) -> list[tuple[int, Path]]:
    """The saved states of a folder with their numbers, the oldest first."""
    matches = ((_NAME.fullmatch(name), folder / name) for name in os.listdir(folder))
    return sorted((int(match[1]), path) for match, path in matches if match)
