"""Snapshots of the adapted model: the published one that answers, the earlier ones in memory, and the saved ones."""

import copy
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cafe_tta import storage
from cafe_tta.adapter import Adapter, copied
from cafe_tta.classifier import describe_difference
from cafe_tta.serve.events import OTHERS, Event
from cafe_tta.serve.settings import Settings
from cafe_tta.serve.store import FORMAT, KIND, AdapterMeta, Saved, SavedMeta, Store, read_files

SOURCE_VERSION = 0
CHUNK = 16  # images in one background pass: an answer has to wait for no more than these
CONTRIBUTORS = 2048  # cameras whose images are counted by name for a snapshot
GROWTH = 100  # factor by which the values of a tensor may exceed those of the source model
SMALL = 0.1  # root mean square of a tensor below which that factor is taken of this instead: zeros may become anything
_CLASSIFIER = re.compile(r"(\d+\.)?classifier\.")
_OPTIMIZER = re.compile(r"(\d+\.)?optimizer\.")  # of the adapter, or of the members of an ensemble


def for_answering(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of an adapter's state that answers depend on, without the optimiser's memory."""
    return {name: tensor for name, tensor in tensors.items() if not _OPTIMIZER.match(name)}


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether no value of a state is NaN or infinite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values() if tensor.is_floating_point())


def overgrown(tensors: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> str:
    """What has grown beyond all that adapting does, in words; empty where nothing has."""
    for name, tensor in tensors.items():
        before = source.get(name)
        if before is None or not _CLASSIFIER.match(name) or not before.is_floating_point() or not before.numel():
            continue
        factor = float(_size(tensor) / _size(before).clamp(min=SMALL))
        if factor > GROWTH:
            return f"`{name}` is {factor:.0f} times as large as in the source model"
    return ""


def _learnt(camera: str, contributions: Mapping[str, int]) -> bool:
    """Whether images of a camera may be among those that a model was adapted to."""
    return camera in contributions or OTHERS in contributions


def _size(tensor: Tensor) -> Tensor:
    """Root mean square."""
    return tensor.detach().double().square().mean().sqrt().cpu()


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
    contributions: Mapping[str, int] = field(default_factory=dict)  # images of each camera, in all steps that led here

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
class Restored:
    """What was restored of an earlier run of the service."""

    text: str = ""  # continues the sentence "started with …"
    events: Sequence[Event] = ()
    opted_out: Sequence[str] = ()
    trusted: Sequence[str] = ()
    steps: int = 0  # that were accepted


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
        self.contributions: dict[str, int] = {}  # of the published snapshot
        self.good = copied(adapter.state())  # of the published snapshot, with the optimiser's memory
        self._of_source = self.good  # constant
        self.run = secrets.token_hex(8)  # versions of another run may have the same numbers
        self._current = Snapshot(SOURCE_VERSION, time.time(), self.good)  # what is published, for any thread to read
        self._exported: tuple[Snapshot, bytes] | None = None
        # The best snapshot so far. Steps that are each a little worse than the one before add up; compared with this
        # one they do not go unnoticed.
        self.anchor = Replica(adapter)
        # A saved state that has yet to be judged: until then, the source model answers.
        self.candidate: Saved | None = None
        self._older: Iterator[Saved] = iter(())
        self._store = None if settings.state is None else Store(Path(settings.state), settings.history)
        self._save_every = settings.save_every
        self._next_save = time.monotonic() + settings.save_every
        self._saved: tuple[Any, ...] = ()  # version, highest version and opt-outs of the last file

    def publish(
        self, version: int, alignment: float | None = None, contributions: Mapping[str, int] | None = None
    ) -> None:
        """Lets the adapter as it is now answer. `contributions`: see `Snapshot`."""
        self.good = copied(self.adapter.state())
        self.published.swap_in(version, self.good)
        self.highest = max(self.highest, version)
        self.contributions = dict(contributions or {})
        self._current = Snapshot(version, time.time(), self.good, alignment, self.contributions)
        if version != SOURCE_VERSION:
            tensors = for_answering(self.good)
            self.history.add(Snapshot(version, time.time(), tensors, alignment, self.contributions))

    def with_step(self, cameras: Mapping[str, int]) -> dict[str, int]:
        """The published snapshot's contributions, and those of a step after it. Past a limit, names are dropped."""
        counts = Counter(self.contributions) + Counter(cameras)
        while len(counts) > CONTRIBUTORS:
            *_, (least, images) = Counter({n: c for n, c in counts.items() if n != OTHERS}).most_common()
            del counts[least]
            counts[OTHERS] += images
        return dict(counts)

    def take_without(self, camera: str) -> int:
        """Publishes the newest kept state that has not learnt from a camera, or the source model; its version."""
        while self.candidate is not None and _learnt(camera, self.candidate.meta.learnt_from):
            self.reject_candidate(f"it was adapted to images of {camera}")
        if not _learnt(camera, self.contributions):
            return self.published.version
        for snapshot in reversed(list(self.history)):
            if not _learnt(camera, snapshot.contributions):
                self.take(snapshot.version, snapshot.tensors, snapshot.contributions)
                return snapshot.version
        for saved in () if self._store is None else self._store.readable():
            meta = saved.meta
            if meta.version != SOURCE_VERSION and not _learnt(camera, meta.learnt_from) and not self._unfit(saved):
                self.take(meta.version, saved.tensors, meta.learnt_from)
                return meta.version
        self.back_to_source()
        return SOURCE_VERSION

    def restore_good(self) -> None:
        """Sets the adapter back to what was published last."""
        self.adapter.set_state(copied(self.good))

    def back_to_source(self) -> None:
        self.candidate = None
        self.adapter.reset()
        self.publish(SOURCE_VERSION)
        self.anchor.load(SOURCE_VERSION, self.good)

    def take(self, version: int, tensors: Mapping[str, Tensor], contributions: Mapping[str, int] | None = None) -> None:
        """Publishes a kept state, and goes on from it; one that does not fit is refused as a whole."""
        self._load(tensors)
        self.candidate = None
        self.publish(version, contributions=contributions)
        self.anchor.load(version, self.good)

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        """Lets the adapter continue from a state; refuses one that does not fit, or that no adapting can have made."""
        self.adapter.check_state(tensors)
        if not all_finite(tensors):
            raise ValueError("the state holds values that are NaN or infinite")
        if grown := overgrown(tensors, self._of_source):
            raise ValueError(f"the state is not one that adapting makes: {grown}")
        try:
            self.adapter.set_state(copied(tensors))
        except Exception as error:  # whatever a file holds: the adapter is as before
            self.restore_good()
            raise ValueError(f"the state cannot be taken up: {type(error).__name__}: {error}") from error

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
            self.take(version, snapshot.tensors, snapshot.contributions)
            return version
        saved = None if self._store is None else self._store.find(version)
        if saved is None:
            known = ", ".join(str(snapshot.version) for snapshot in self.history) or "none"
            raise ValueError(f"cannot roll back to version {version}: it is not kept; kept: {known}; 0 is the source")
        self._require_ours(saved.meta, saved.path.name)
        self.take(version, saved.tensors, saved.meta.learnt_from)
        return version

    # Of a leader, and for followers

    def export(self) -> bytes:
        """The published snapshot as a file of the store is, with the run that it belongs to. Any thread may ask."""
        current, exported = self._current, self._exported
        if exported is None or exported[0] is not current:
            meta = SavedMeta(
                time=current.time,
                version=current.version,
                highest=max(current.version, self.highest),
                adapter=AdapterMeta(**self.adapter._state_meta()),
                events=[],
                opted_out=[],
                contributions=dict(current.contributions),
            )
            tensors = for_answering(current.tensors)
            exported = self._exported = (current, storage.pack(KIND, FORMAT, tensors, asdict(meta) | {"run": self.run}))
        return exported[1]

    def num_bytes(self) -> int:
        """Size of the published state."""
        return self._current.num_bytes()

    def follow(self, exported: bytes, run: str) -> tuple[str, int]:
        """Publishes the snapshot of a leader, and returns its run and its version; `run` is the one before.

        One that is damaged, of another model or no state that adapting makes is refused, and changes nothing.
        """
        tensors, content = storage.unpack(exported, KIND, FORMAT, "the leader's snapshot")
        meta = SavedMeta.read(content)
        theirs = content.get("run")
        if not isinstance(theirs, str):
            raise ValueError("expected the leader's snapshot to name the `run` that it belongs to")
        self._require_ours(meta, "the leader's snapshot", "give this server the settings of its leader")
        if theirs != run:  # its versions may have the same numbers
            self.history.clear()
            self._saved = ()
        if meta.version == SOURCE_VERSION:
            self.back_to_source()
        else:
            self.take(meta.version, tensors, meta.learnt_from)
        return theirs, meta.version

    # On disk

    @property
    def on_disk(self) -> bool:
        return self._store is not None

    def save_due(self) -> bool:
        return self._store is not None and time.monotonic() >= self._next_save

    def save(self, events: Sequence[Event], opted_out: list[str], trusted: list[str]) -> Path | None:
        """Writes the published state, unless the last file holds it already. None where nothing was written."""
        self._next_save = time.monotonic() + self._save_every
        now = (self.published.version, self.highest, opted_out)
        # While a saved state waits to be judged, the source model must not be written over it.
        if self._store is None or self._saved == now or self.candidate is not None:
            return None
        meta = {
            "version": self.published.version,
            "highest": self.highest,
            "adapter": AdapterMeta(**self.adapter._state_meta()),
            "events": list(events),
            "opted_out": opted_out,
            "trusted": trusted,
            "contributions": self.contributions,
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
        passed_over: list[str] = []
        for saved in read_files(folder, passed_over.append):
            if why := self._unfit(saved):
                passed_over.append(why)
                continue
            damaged = f"; passed over: {'; '.join(passed_over)}" if passed_over else ""
            return f"continues with version {saved.meta.version} of {saved.path.name}{damaged}"
        return "; ".join(["nothing saved yet" if not passed_over else "nothing that can be used", *passed_over])

    def restore(self, judged: bool) -> Restored:
        """Takes up the newest state that is whole and fits. One of another classifier or method is an error.

        With `judged`, it becomes the `candidate`, and answers only once it was accepted.
        """
        if self._store is None:
            return Restored()
        self._older = self._store.readable()
        saved = self._next_candidate()
        if saved is None:
            return Restored()
        meta = saved.meta
        self.highest = max(self.highest, meta.highest)
        self._saved = (meta.version, self.highest, list(meta.opted_out))
        text = f", from version {meta.version} of {saved.path.name}"
        if meta.adapter.config != self.adapter._state_meta()["config"]:
            text += ", which was adapted with other options"
        if meta.version == SOURCE_VERSION:
            self.candidate = None
        elif not judged:
            self.take(meta.version, saved.tensors, meta.learnt_from)
        return Restored(text, meta.events, meta.opted_out, meta.trusted, meta.highest)

    def problems(self) -> list[str]:
        """Why saved states were passed over since this was last asked."""
        if self._store is None:
            return []
        found, self._store.damaged = self._store.damaged, []
        return [f"{text}; passed over for an older state" for text in found]

    def try_candidate(self) -> None:
        """Loads the candidate into the adapter, to be judged."""
        assert self.candidate is not None
        self._load(self.candidate.tensors)

    def accept_candidate(self) -> Saved:
        """Publishes the candidate."""
        saved = self.candidate
        assert saved is not None
        self.take(saved.meta.version, saved.tensors, saved.meta.learnt_from)
        self._older = iter(())
        return saved

    def reject_candidate(self, why: str) -> None:
        """Passes the candidate over for the next older state, if there is one."""
        assert self.candidate is not None and self._store is not None
        self._store.pass_over(f"version {self.candidate.meta.version} of {self.candidate.path.name}: {why}")
        self.restore_good()
        self._next_candidate()
        self._saved = ()  # what answers now is not in the newest file

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _next_candidate(self) -> Saved | None:
        assert self._store is not None
        self.candidate = None
        for saved in self._older:
            if why := self._unfit(saved):
                self._store.pass_over(why)
                continue
            self.candidate = saved
            break
        return self.candidate

    def _unfit(self, saved: Saved) -> str:
        """Why a state that is whole cannot be used; empty if it can. One of another model is an error."""
        self._require_ours(saved.meta, saved.path.name)
        if saved.meta.version == SOURCE_VERSION:
            return ""
        try:
            self._load(saved.tensors)
        except ValueError as error:
            return f"{saved.path.name}: {error}"
        self.restore_good()
        return ""

    def _require_ours(
        self, meta: SavedMeta, name: str, cure: str = "choose another folder for the state, or empty this one"
    ) -> None:
        theirs, ours = meta.adapter, self.adapter._state_meta()
        other = f"{name} cannot be used: it"
        if theirs.method != ours["method"]:
            asked = f"start with `method` {theirs.method!r} to go on from it, or {cure}"
            raise ValueError(f"{other} is a state of {theirs.method!r}, but this is {ours['method']!r}; {asked}")
        if difference := describe_difference(theirs.classifier, ours["classifier"]):
            raise ValueError(f"{other} does not belong to this classifier: {difference}; {cure}")
