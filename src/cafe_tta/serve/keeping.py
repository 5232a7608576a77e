"""Keeps the state: saves it on a schedule, takes up the last good one, rolls back to an earlier one."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cafe_tta.classifier import describe_difference
from cafe_tta.serve.adaptation import Adaptation
from cafe_tta.serve.config import ServiceConfig
from cafe_tta.serve.replica import SOURCE_VERSION
from cafe_tta.serve.snapshots import Saved, Store


@dataclass(frozen=True)
class Restored:
    """What was taken up of an earlier life of the service."""

    text: str = ""  # goes on the sentence "started with …"
    events: Sequence[dict[str, Any]] = ()
    opted_out: Sequence[str] = ()
    problems: list[str] = field(default_factory=list)


class Keeping:
    """The folder of the state, where there is one, and the snapshots in memory."""

    def __init__(self, adaptation: Adaptation, config: ServiceConfig) -> None:
        self._adaptation = adaptation
        self._config = config
        self._store = None if config.state is None else Store(Path(config.state), config.history)
        self._saved: tuple[int, int] | None = None  # version, and the highest given out, of the last file
        self._kept_opt_outs: list[str] = []
        self._next = time.monotonic() + config.save_every

    @property
    def open(self) -> bool:
        return self._store is not None

    def due(self) -> bool:
        return self._store is not None and time.monotonic() >= self._next

    def save(self, events: list[dict[str, Any]], opted_out: list[str]) -> Path | None:
        """Writes the published state, unless the last file holds it already. None where nothing was written."""
        self._next = time.monotonic() + self._config.save_every
        now = (self._adaptation.published.version, self._adaptation.highest)
        if self._store is None:
            return None
        meta = {
            "version": now[0],
            "highest": now[1],
            "adapter": self._adaptation.state_meta(),
            "events": events,
            "opted_out": opted_out,
            "snapshots": [snapshot.describe() for snapshot in self._adaptation.history],
        }
        if self._saved == now and self._kept_opt_outs == opted_out:
            return None
        path = self._store.write(self._adaptation.good, meta)
        self._saved, self._kept_opt_outs = now, opted_out
        return path

    def restore(self) -> Restored:
        """Publishes the newest state that is whole and fits. One of another classifier or method is an error."""
        if self._store is None:
            return Restored()
        saved = next(filter(self._taken_up, self._store.readable()), None)
        problems = [f"{text}; an older state was used" for text in self._store.damaged]
        if saved is None:
            return Restored(problems=problems)
        version = int(saved.meta["version"])
        self._adaptation.highest = max(self._adaptation.highest, int(saved.meta["highest"]))
        self._saved = (version, self._adaptation.highest)
        self._kept_opt_outs = list(saved.meta["opted_out"])
        text = f", from version {version} of {saved.path.name}"
        if saved.meta["adapter"]["config"] != self._adaptation.state_meta()["config"]:
            text += ", which was adapted with other options"
        return Restored(text, saved.meta["events"], saved.meta["opted_out"], problems)

    def _taken_up(self, saved: Saved) -> bool:
        """Publishes a saved state; False where it is whole and yet no good."""
        self._require_ours(saved)
        version = int(saved.meta["version"])
        if version == SOURCE_VERSION:
            return True
        try:
            self._adaptation.take(version, saved.tensors)
        except ValueError as error:
            assert self._store is not None
            self._store.damaged.append(f"{saved.path}: {error}")
            return False
        return True

    def roll_back(self, version: int | None) -> int:
        """Publishes an earlier snapshot, from memory or from disk, and returns its version."""
        now = self._adaptation.published.version
        if version is None:
            earlier = self._adaptation.history.before(now)
            if now == SOURCE_VERSION:
                raise ValueError("cannot roll back: the source model answers already")
            version = earlier[0].version if earlier else SOURCE_VERSION
        if version == now:
            raise ValueError(f"cannot roll back to version {version}: it is the one that answers now")
        if version == SOURCE_VERSION:
            self._adaptation.back_to_source()
            return version
        if snapshot := self._adaptation.history.get(version):
            self._adaptation.take(version, snapshot.tensors)
            return version
        saved = None if self._store is None else self._store.find(version)
        if saved is None:
            known = ", ".join(str(snapshot.version) for snapshot in self._adaptation.history) or "none"
            raise ValueError(f"cannot roll back to version {version}: it is not kept; kept: {known}; 0 is the source")
        self._require_ours(saved)
        self._adaptation.take(version, saved.tensors)
        return version

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _require_ours(self, saved: Saved) -> None:
        theirs, ours = saved.meta["adapter"], self._adaptation.state_meta()
        other = f"{saved.path} cannot be used: it"
        cure = "choose another folder for the state, or empty this one"
        if theirs["method"] != ours["method"]:
            raise ValueError(f"{other} is a state of {theirs['method']!r}, but this is {ours['method']!r}; {cure}")
        if difference := describe_difference(theirs["classifier"], ours["classifier"]):
            raise ValueError(f"{other} does not belong to this classifier: {difference}; {cure}")
