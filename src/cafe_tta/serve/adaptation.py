"""One adaptation step after the other: judged before it is published, and again when more images have come.

No threads in here: the service calls `cycle` from its own, and holds a lock while it does.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cafe_tta.adapter import Adapter, StepRefused
from cafe_tta.serve.buffer import Item
from cafe_tta.serve.config import ServiceConfig
from cafe_tta.serve.guard import PANEL, Figures, Guard, all_finite, log_ratio, panels
from cafe_tta.serve.replica import SOURCE_VERSION, Published, Replica, copied, for_answering
from cafe_tta.serve.snapshots import History, Snapshot
from cafe_tta.serve.yardstick import Yardstick

SAME_FEATURES = 1e-3  # a method that leaves the features as they are cannot be judged by them
LOOK_BACK = 3  # earlier snapshots that are tried before the source model when the published one got worse


@dataclass(frozen=True)
class Outcome:
    """What a cycle did, in words and figures."""

    kind: str  # accepted | refused | rolled_back | skipped
    text: str
    figures: Mapping[str, float | None] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)  # of each camera: see `Camera.gain`
    source_features: Mapping[str, list[Tensor]] = field(default_factory=dict)  # that became known, by camera


class _Held:
    """Images that are held back, and how the models look on them."""

    def __init__(self, items: list[Item], guard: Guard, source: Replica) -> None:
        self.items = items
        self.images = torch.stack([item.image for item in items])
        self.panels = panels(items)
        self.anchor: Figures | None = None
        self.new: dict[str, list[Tensor]] = {}
        unknown = [i for i, item in enumerate(items) if item.source is None]
        if unknown:
            features, logits = source.in_the_background(self.images[unknown])
            for row, i in enumerate(unknown):
                items[i].source = (features[row].clone(), logits[row].clone())
                self.new.setdefault(items[i].camera, []).append(features[row].float().cpu())
        known = [item.source for item in items if item.source is not None]
        self.source_features = torch.stack([features for features, _ in known])
        self.source = guard.measure(self.source_features, torch.stack([logits for _, logits in known]), self.panels)


class Adaptation:
    """The adapter, what is published of it, and its history."""

    def __init__(self, adapter: Adapter, config: ServiceConfig, yardstick: Yardstick | None) -> None:
        adapter.reset()
        self.adapter = adapter
        self.config = config
        self.yardstick = yardstick
        self.guard = Guard(yardstick, adapter.classifier.num_classes)
        self.source = Replica(adapter)
        self.published = Published(adapter)
        self.history = History(config.history, int(config.history_megabytes * 2**20))
        self.highest = SOURCE_VERSION  # version that was given out
        self.good = copied(adapter.state())  # of the published snapshot, with the optimiser's memory
        # The best snapshot so far. Steps that are each a little worse than the one before add up; beside this one they
        # do not stay unnoticed.
        self.anchor = Replica(adapter)

    def cycle(self, items: list[Item], held_items: list[Item]) -> Outcome:
        """A step on some images, if there is need for one and it does no harm."""
        guarded = self.config.guard and bool(held_items)
        held = _Held(held_items, self.guard, self.source) if guarded else None
        if held is None:
            images = torch.stack([item.image for item in items])
            features, logits = self.adapter.features_and_logits(images)
            ours = self.guard.measure(features, logits, [list(range(len(items)))])
        else:
            images = held.images
            features, logits = self.adapter.features_and_logits(images)
            ours = self.guard.measure(features, logits, held.panels)
            if why := self._got_worse(held, ours):
                return self._step_back(held, ours, why)
        gains = {} if held is None else self._gains(held, features)
        new = {} if held is None else held.new
        drift = None if self.yardstick is None or not self.config.gate else self.yardstick.drift_of(features)
        if drift is not None and drift <= 1:
            text = f"no step: the images look like the source (drift {drift:.2f}, at most 1)"
            return Outcome("skipped", text, ours.summary(), gains, new)
        kind, text, figures = self._step(items, held, ours)
        return Outcome(kind, text, figures, gains, new)

    def publish(self, version: int, alignment: float | None = None) -> None:
        """Shows the adapter as it is now to everybody."""
        self.good = copied(self.adapter.state())
        self.published.show(version, self.good)
        self.highest = max(self.highest, version)
        if version != SOURCE_VERSION:
            self.history.add(Snapshot(version, time.time(), for_answering(self.good), alignment))

    def restore_good(self) -> None:
        """The adapter as it was published last."""
        self.adapter.set_state(copied(self.good))

    def back_to_source(self) -> None:
        self.adapter.reset()
        self.publish(SOURCE_VERSION)
        self.anchor.load(SOURCE_VERSION, self.good)

    def take(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from a state that was kept, refused whole where it does not fit."""
        self.adapter.check_state(tensors)
        if not all_finite(dict(tensors)):
            raise ValueError("the state holds values that are NaN or infinite")
        self.adapter.set_state(copied(tensors))
        self.publish(version)
        self.anchor.load(version, self.good)

    def state_meta(self) -> dict[str, Any]:
        """What says whether a saved state belongs to this adapter."""
        return self.adapter._state_meta()

    def _step(self, items: list[Item], held: _Held | None, ours: Figures) -> tuple[str, str, dict[str, Any]]:
        try:
            self.adapter(torch.stack([item.image for item in items]))
        except StepRefused as error:  # where warnings are errors; the weights stayed as they were
            return "refused", str(error), ours.summary()
        report = self.adapter.report
        assert report is not None
        if not report.stepped:
            return "refused" if report.refused else "skipped", f"no step: {report.reason}", ours.summary()
        figures = ours
        if held is not None:
            figures, why = self._judge(held, ours)
            if why:
                self.restore_good()
                return "refused", f"a step on {len(items)} images was refused: {why}", figures.summary()
        summary = figures.summary() | {"loss": report.loss}
        self.publish(self.highest + 1, summary.get("alignment"))
        if held is not None and self.guard.better(figures, self._of_anchor(held)):
            self.anchor.load(self.published.version, self.good)
        cameras = len({item.camera for item in items})
        text = f"adapted to {len(items)} images of {cameras} camera{'s' if cameras > 1 else ''}"
        return "accepted", text, summary

    def _judge(self, held: _Held, ours: Figures) -> tuple[Figures, str]:
        """How the candidate looks on images that are held back, and why it may not be published."""
        if not all_finite(self.adapter.state()):
            return ours, "its weights are NaN or infinite"
        figures = self.guard.measure(*self.adapter.features_and_logits(held.images), held.panels)
        for other, name in (
            (ours, "the published snapshot"),
            (held.source, "the source model"),
            (self._of_anchor(held), f"version {self.anchor.version}"),
        ):
            if why := self.guard.worse(figures, other, name):
                return figures, why
        return figures, ""

    def _got_worse(self, held: _Held, ours: Figures) -> str:
        """Why the published snapshot should not stay, now that more images have come."""
        if self.published.version == SOURCE_VERSION:
            return ""
        why = self.guard.worse(ours, held.source, "the source model")
        return why or self.guard.worse(ours, self._of_anchor(held), f"version {self.anchor.version}")

    def _of_anchor(self, held: _Held) -> Figures:
        """How the best snapshot so far looks on these images: computed once for them."""
        if held.anchor is None:
            features, logits = self.anchor.in_the_background(held.images)
            held.anchor = self.guard.measure(features, logits, held.panels)
        return held.anchor

    def _step_back(self, held: _Held, ours: Figures, why: str) -> Outcome:
        """Publishes an earlier snapshot that is better, or the source model."""
        bad = self.published.version
        self.history.forget(bad)
        for earlier in self._earlier(bad):
            self.adapter.set_state(copied(earlier.tensors))
            figures = self.guard.measure(*self.adapter.features_and_logits(held.images), held.panels)
            if not self.guard.worse(figures, held.source, "the source model") and self.guard.better(figures, ours):
                self.publish(earlier.version, earlier.alignment)
                text = f"rolled back from version {bad} to {earlier.version}: {why}"
                return Outcome("rolled_back", text, figures.summary(), {}, held.new)
        self.back_to_source()
        text = f"rolled back from version {bad} to the source model: {why}"
        return Outcome("rolled_back", text, held.source.summary(), {}, held.new)

    def _earlier(self, version: int) -> list[Snapshot]:
        """Snapshots to go back to: the best one so far, then the newest."""
        best = self.history.get(self.anchor.version)
        newest = [snapshot for snapshot in self.history.before(version) if snapshot is not best]
        return ([] if best is None or best.version == version else [best]) + newest[:LOOK_BACK]

    def _gains(self, held: _Held, features: Tensor) -> dict[str, float]:
        """For each camera with enough images: the published model's alignment beside the source's, as a logarithm."""
        if self.yardstick is None or self.published.version == SOURCE_VERSION:
            return {}
        rows: dict[str, list[int]] = {}
        for i, item in enumerate(held.items):
            rows.setdefault(item.camera, []).append(i)
        gains = {}
        for camera, places in rows.items():
            if len(places) >= PANEL:
                ours = self.yardstick.alignment(features[places])
                gain = log_ratio([ours], [self.yardstick.alignment(held.source_features[places])])
                if abs(gain) > SAME_FEATURES:
                    gains[camera] = gain
        return gains
