"""Snapshots of the adapted model: the published one that answers, the earlier ones in memory, and the saved ones."""

import copy
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cafe_tta import storage
from cafe_tta.adapter import Adapter, copied
from cafe_tta.classifier import describe_difference
from cafe_tta.locking import lock_file
from cafe_tta.serve.settings import Settings

SOURCE_VERSION = 0
CHUNK = 16  # images in one background pass: an answer has to wait for no more than these
KIND, FORMAT = "serve-snapshot", 1
_NAME = re.compile(r"snapshot-(\d{8})\.safetensors")
_OPTIMIZER = re.compile(r"(\d+\.)?optimizer\.")  # of the adapter, or of the members of an ensemble


def for_answering(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of an adapter's state that answers depend on, without the optimiser's memory."""
    return {name: tensor for name, tensor in tensors.items() if not _OPTIMIZER.match(name)}


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether no value of a state is NaN or infinite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values() if tensor.is_floating_point())


# Models that answer


@dataclass(frozen=True)
class Pass:
    """A batch after its forward pass."""

    version: int  # of the snapshot
    features: Tensor  # (B, D)
    logits: Tensor  # (B, C)
    clusters: list[int]  # number of each image's cluster; -1: in none, or the method does not unmix


class Replica:
    """A copy of the adapter that only answers. Its weights change between two passes, never during one.

    With `unmixing` off, its images are normalised as in training, and fall into no cluster.
    """

    def __init__(self, adapter: Adapter, unmixing: bool = True) -> None:
        source_state = adapter._source_state
        adapter._source_state = {}  # constant: shared, not copied
        try:
            self._adapter = copy.deepcopy(adapter)
        finally:
            adapter._source_state = source_state
        self._adapter._source_state = source_state
        self._adapter.reset()
        for part in self._adapter.modules():
            if isinstance(part, Adapter) and part.normaliser.by_image is not None:  # itself, or members of an ensemble
                part.normaliser.by_image.enabled = unmixing
        self._lock = threading.Lock()
        self.version = SOURCE_VERSION

    def load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Takes the weights of a snapshot, once a running pass has ended."""
        with self._lock:
            self._adapter.set_state(copied(for_answering(tensors)))
            self.version = version

    @property
    def clusters(self) -> dict[int, int] | None:
        """Images of every cluster by its number, the largest first; None where the method does not unmix."""
        return None if self._adapter.clusters is None else self._adapter.clusters.counts

    def __call__(self, images: Tensor) -> Pass:
        """Answers a batch."""
        with self._lock:  # the layers keep what they received during a pass: one at a time
            features, logits = self._adapter.features_and_logits(images)
            unmixer = self._adapter.clusters
            if unmixer is None or not unmixer.enabled:
                return Pass(self.version, features, logits, [-1] * len(images))
            return Pass(self.version, features, logits, unmixer.numbers.tolist())

    def in_chunks(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits, computed a few images at a time, so that answers can be given in between."""
        parts = [self(part) for part in images.split(CHUNK)]
        return torch.cat([part.features for part in parts]), torch.cat([part.logits for part in parts])


class Published:
    """The snapshot that answers, and a second copy to load the next one into. No reader ever gets a mixture."""

    def __init__(self, adapter: Adapter) -> None:
        self._front, self._back = Replica(adapter), Replica(adapter)

    @property
    def version(self) -> int:
        return self._front.version

    @property
    def front(self) -> Replica:
        return self._front

    def swap_in(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Loads the back buffer, and swaps it with the front one in a single assignment."""
        self._back.load(version, tensors)
        self._front, self._back = self._back, self._front


# Snapshots in memory


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


# Snapshots on disk


@dataclass(frozen=True)
class Saved:
    """The content of a file of the store."""

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
        try:
            self._lock = lock_file(folder / ".lock", timeout=0)
        except OSError as error:
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
        """The files that are whole, the newest first. Damaged ones are skipped, noted and left where they are."""
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
        return numbered_files(self.folder)


def numbered_files(folder: Path) -> list[tuple[int, Path]]:
    """The saved states of a folder with their numbers, the oldest first."""
    matches = ((_NAME.fullmatch(name), folder / name) for name in os.listdir(folder))
    return sorted((int(match[1]), path) for match, path in matches if match)


@dataclass(frozen=True)
class Restored:
    """What was restored of an earlier run of the service."""

    text: str = ""  # continues the sentence "started with …"
    events: Sequence[dict[str, Any]] = ()
    opted_out: Sequence[str] = ()
    problems: list[str] = field(default_factory=list)


# All of them together


class Snapshots:
    """The adapter, and its snapshots: published, in memory and on disk."""

    def __init__(self, adapter: Adapter, settings: Settings) -> None:
        adapter.reset()
        self.adapter = adapter
        self.source = Replica(adapter, unmixing=False)
        self.published = Published(adapter)
        self.history = History(settings.history, int(settings.history_megabytes * 2**20))
        self.highest = SOURCE_VERSION  # version that was given out
        self.good = copied(adapter.state())  # of the published snapshot, with the optimiser's memory
        # The best snapshot so far. Steps that are each a little worse than the one before add up; compared with this
        # one they do not go unnoticed.
        self.anchor = Replica(adapter)
        self._store = None if settings.state is None else Store(Path(settings.state), settings.history)
        self._save_every = settings.save_every
        self._next_save = time.monotonic() + settings.save_every
        self._saved: tuple[Any, ...] = ()  # version, highest version and opt-outs of the last file

    def publish(self, version: int, alignment: float | None = None) -> None:
        """Lets the adapter as it is now answer."""
        self.good = copied(self.adapter.state())
        self.published.swap_in(version, self.good)
        self.highest = max(self.highest, version)
        if version != SOURCE_VERSION:
            self.history.add(Snapshot(version, time.time(), for_answering(self.good), alignment))

    def restore_good(self) -> None:
        """Sets the adapter back to what was published last."""
        self.adapter.set_state(copied(self.good))

    def back_to_source(self) -> None:
        self.adapter.reset()
        self.publish(SOURCE_VERSION)
        self.anchor.load(SOURCE_VERSION, self.good)

    def take(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Publishes a kept state, and goes on from it; one that does not fit is refused as a whole."""
        self.adapter.check_state(tensors)
        if not all_finite(tensors):
            raise ValueError("the state holds values that are NaN or infinite")
        self.adapter.set_state(copied(tensors))
        self.publish(version)
        self.anchor.load(version, self.good)

    def roll_back(self, version: int | None) -> int:
        """Publishes an earlier snapshot, from memory or from disk, and returns its version."""
        now = self.published.version
        if version is None:
            if now == SOURCE_VERSION:
                raise ValueError("cannot roll back: the source model answers already")
            earlier = self.history.before(now)
            version = earlier[0].version if earlier else SOURCE_VERSION
        if version == now:
            raise ValueError(f"cannot roll back to version {version}: it is the one that answers now")
        if version == SOURCE_VERSION:
            self.back_to_source()
            return version
        if snapshot := self.history.get(version):
            self.take(version, snapshot.tensors)
            return version
        saved = None if self._store is None else self._store.find(version)
        if saved is None:
            known = ", ".join(str(snapshot.version) for snapshot in self.history) or "none"
            raise ValueError(f"cannot roll back to version {version}: it is not kept; kept: {known}; 0 is the source")
        self._require_ours(saved)
        self.take(version, saved.tensors)
        return version

    # On disk

    @property
    def on_disk(self) -> bool:
        return self._store is not None

    def save_due(self) -> bool:
        return self._store is not None and time.monotonic() >= self._next_save

    def save(self, events: list[dict[str, Any]], opted_out: list[str]) -> Path | None:
        """Writes the published state, unless the last file holds it already. None where nothing was written."""
        self._next_save = time.monotonic() + self._save_every
        now = (self.published.version, self.highest, opted_out)
        if self._store is None or self._saved == now:
            return None
        meta = {
            "version": self.published.version,
            "highest": self.highest,
            "adapter": self.adapter._state_meta(),
            "events": events,
            "opted_out": opted_out,
            "snapshots": [snapshot.describe() for snapshot in self.history],
        }
        path = self._store.write(self.good, meta)
        self._saved = now
        return path

    def require_usable(self, folder: Path) -> str:
        """What a start with this folder would go on from, in words; raises where it would fail. Locks nothing."""
        if not folder.is_dir():
            if folder.exists():
                raise ValueError(f"cannot use {folder} as the folder of the state: it is a file")
            return "a new folder"
        for path in reversed([path for _, path in numbered_files(folder)]):
            try:
                tensors, meta = storage.read(path, KIND, FORMAT)
            except (ValueError, OSError, KeyError):
                continue  # damaged: a start would use an older one
            self._require_ours(Saved(path, tensors, meta))
            return f"continues with version {int(meta['version'])} of {path.name}"
        return "nothing saved yet"

    def restore(self) -> Restored:
        """Publishes the newest state that is whole and fits. One of another classifier or method is an error."""
        if self._store is None:
            return Restored()
        saved = next(filter(self._publish_saved, self._store.readable()), None)
        problems = [f"{text}; an older state was used" for text in self._store.damaged]
        if saved is None:
            return Restored(problems=problems)
        version = int(saved.meta["version"])
        self.highest = max(self.highest, int(saved.meta["highest"]))
        self._saved = (version, self.highest, list(saved.meta["opted_out"]))
        text = f", from version {version} of {saved.path.name}"
        if saved.meta["adapter"]["config"] != self.adapter._state_meta()["config"]:
            text += ", which was adapted with other options"
        return Restored(text, saved.meta["events"], saved.meta["opted_out"], problems)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _publish_saved(self, saved: Saved) -> bool:
        """Publishes a saved state; False where it is whole but cannot be used."""
        self._require_ours(saved)
        version = int(saved.meta["version"])
        if version == SOURCE_VERSION:
            return True
        try:
            self.take(version, saved.tensors)
        except ValueError as error:
            assert self._store is not None
            self._store.damaged.append(f"{saved.path}: {error}")
            return False
        return True

    def _require_ours(self, saved: Saved) -> None:
        theirs, ours = saved.meta["adapter"], self.adapter._state_meta()
        other = f"{saved.path} cannot be used: it"
        cure = "choose another folder for the state, or empty this one"
        if theirs["method"] != ours["method"]:
            raise ValueError(f"{other} is a state of {theirs['method']!r}, but this is {ours['method']!r}; {cure}")
        if difference := describe_difference(theirs["classifier"], ours["classifier"]):
            raise ValueError(f"{other} does not belong to this classifier: {difference}; {cure}")
