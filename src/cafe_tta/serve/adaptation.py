"""One adaptation step after the other: judged before it is published, and again when more images have come.

There are no threads here: the service calls `cycle` from its own, and holds a lock while it does.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cafe_tta.adapter import StepRefused, copied
from cafe_tta.judge import PANEL, Figures, Judge, log_ratio
from cafe_tta.losses import entropy
from cafe_tta.serve.buffer import Item, panels
from cafe_tta.serve.settings import Settings
from cafe_tta.serve.snapshots import SOURCE_VERSION, Replica, Snapshot, Snapshots, all_finite
from cafe_tta.source import Reference

SAME_FEATURES = 1e-3  # a method that leaves the features as they are cannot be judged by them
LOOK_BACK = 3  # earlier snapshots that are tried before the source model when the published one got worse


@dataclass(frozen=True)
class Outcome:
    """What a cycle did, in words and figures."""

    kind: str  # accepted | refused | rolled_back | skipped
    text: str
    figures: Mapping[str, float | None] = field(default_factory=dict)
    gains: Mapping[str, tuple[float, int]] = field(default_factory=dict)  # by camera: for `Camera.learn_gain`
    source_features: Mapping[str, list[Tensor]] = field(default_factory=dict)  # newly computed, by camera


class _Validation:
    """Validation images, and the figures of the source model and the anchor on them."""

    def __init__(self, items: list[Item], judge: Judge, source: Replica) -> None:
        self.items = items
        self.images = torch.stack([item.image for item in items])
        self.panels = panels(items)
        self.anchor: Figures | None = None
        self.candidate: tuple[Tensor, Tensor] | None = None  # features and logits of the last candidate
        self.new: dict[str, list[Tensor]] = {}  # source features that were computed now, by camera
        unknown = [i for i, item in enumerate(items) if item.source is None]
        if unknown:
            features, logits = source.in_chunks(self.images[unknown])
            for row, i in enumerate(unknown):
                items[i].source = (features[row].clone(), logits[row].clone())
                self.new.setdefault(items[i].camera, []).append(features[row].float().cpu())
        known = [item.source for item in items if item.source is not None]
        self.source_features = torch.stack([features for features, _ in known])
        self.source_logits = torch.stack([logits for _, logits in known])
        self.source = judge.measure(self.source_features, self.source_logits, self.panels)


class Adaptation:
    """Takes steps with the adapter, and publishes those that do no harm."""

    def __init__(self, snapshots: Snapshots, settings: Settings, reference: Reference | None) -> None:
        self.snapshots, self.settings, self.reference = snapshots, settings, reference
        self.adapter = snapshots.adapter
        # A panel is a camera's few images, perhaps all of one class: either distance alone errs on these.
        self.judge = Judge(reference, self.adapter.classifier.num_classes, agree=True)

    def judge_restored(self, items: list[Item]) -> str:
        """Publishes the newest saved state that is no worse than the source model on these images, if there is one.

        Says in words which one; empty where all of them were passed over.
        """
        validation = _Validation(items, self.judge, self.snapshots.source)
        while self.snapshots.candidate is not None:
            if why := self._harm(validation):
                self.snapshots.reject_candidate(why)
                continue
            saved = self.snapshots.accept_candidate()
            return f"version {saved.meta.version} of {saved.path.name} answers: no worse than the source model on " + (
                f"the first {len(items)} images"
            )
        return ""

    def _harm(self, validation: _Validation) -> str:
        """Why the candidate is worse than the source model on these images; empty if it is not."""
        try:
            self.snapshots.try_candidate()
            figures = self.judge.measure(*self.adapter.features_and_logits(validation.images), validation.panels)
        except Exception as error:  # whatever a file holds
            return f"it cannot answer: {type(error).__name__}: {error}"
        return self.judge.worse(figures, validation.source, "the source model")

    def cycle(self, items: list[Item], validation_items: list[Item]) -> Outcome:
        """Takes a step on some images, if one is needed and does no harm."""
        judged = self.settings.judge and bool(validation_items)
        validation = _Validation(validation_items, self.judge, self.snapshots.source) if judged else None
        gains: dict[str, tuple[float, int]] = {}
        new: dict[str, list[Tensor]] = {}
        seen = [self.adapter.features_and_logits(torch.stack([item.image for item in items]))]
        if validation is None:
            ours = self.judge.measure(*seen[0])
        else:
            seen.append(self.adapter.features_and_logits(validation.images))
            ours = self.judge.measure(*seen[1], validation.panels)
            if why := self._got_worse(validation, ours):
                return self._step_back(validation, ours, why)
            gains, new = self._gains(validation, seen[1]), validation.new
        if self.settings.gate and (drift := self._source_drift(torch.cat([features for features, _ in seen]))):
            text = f"no step: the images look like the source (drift {drift:.2f})"
            return Outcome("skipped", text, ours.summary(), gains, new)
        kind, text, figures = self._step(items, validation, ours)
        if kind == "accepted" and validation is not None:
            gains = self._gains(validation, validation.candidate)
        return Outcome(kind, text, figures, gains, new)

    def _source_drift(self, features: Tensor) -> float | None:
        """The drift of images that look like the source; None where they do not, or nobody can tell."""
        if self.reference is None or not self.reference.looks_like_source(features):
            return None
        return self.reference.drift(features)

    def _step(
        self, items: list[Item], validation: _Validation | None, ours: Figures
    ) -> tuple[str, str, dict[str, Any]]:
        try:
            self.adapter(torch.stack([item.image for item in items]))
        except StepRefused as error:  # where warnings are errors; the weights stayed as they were
            return "refused", str(error), ours.summary()
        report = self.adapter.report
        assert report is not None
        if not report.stepped:
            self.snapshots.restore_good()  # what the adapter noted of these images is not published either
            return "refused" if report.refused else "skipped", f"no step: {report.reason}", ours.summary()
        figures = ours
        if validation is not None:
            figures, why = self._judge(validation, ours)
            if why:
                self.snapshots.restore_good()
                return "refused", f"a step on {len(items)} images was refused: {why}", figures.summary()
        summary = figures.summary() | {"loss": report.loss}
        contributions = self.snapshots.with_step(Counter(item.camera for item in items))
        self.snapshots.publish(self.snapshots.highest + 1, summary.get("alignment"), contributions)
        if validation is not None and self.judge.better(figures, self._of_anchor(validation)):
            self.snapshots.anchor.load(self.snapshots.published.version, self.snapshots.good)
        cameras = len({item.camera for item in items})
        text = f"adapted to {len(items)} images of {cameras} camera{'s' if cameras > 1 else ''}"
        return "accepted", text, summary

    def _judge(self, validation: _Validation, ours: Figures) -> tuple[Figures, str]:
        """The candidate's figures on the validation images, and why it may not be published."""
        if not all_finite(self.adapter.state()):
            return ours, "its weights are NaN or infinite"
        validation.candidate = self.adapter.features_and_logits(validation.images)
        figures = self.judge.measure(*validation.candidate, validation.panels)
        others = (
            ("the published snapshot", lambda: ours),
            ("the source model", lambda: validation.source),
            (f"version {self.snapshots.anchor.version}", lambda: self._of_anchor(validation)),
        )
        return figures, self.judge.objection(figures, others)

    def _got_worse(self, validation: _Validation, ours: Figures) -> str:
        """Why the published snapshot should not stay, now that more images have come."""
        if self.snapshots.published.version == SOURCE_VERSION:
            return ""
        anchor = f"version {self.snapshots.anchor.version}"
        others = (("the source model", lambda: validation.source), (anchor, lambda: self._of_anchor(validation)))
        return self.judge.objection(ours, others)

    def _of_anchor(self, validation: _Validation) -> Figures:
        """The figures of the best snapshot so far on these images, computed once."""
        if validation.anchor is None:
            features, logits = self.snapshots.anchor.in_chunks(validation.images)
            validation.anchor = self.judge.measure(features, logits, validation.panels)
        return validation.anchor

    def _step_back(self, validation: _Validation, ours: Figures, why: str) -> Outcome:
        """Publishes an earlier snapshot that is better, or the source model."""
        bad = self.snapshots.published.version
        self.snapshots.history.forget(bad)
        for earlier in self._earlier(bad):
            self.adapter.set_state(copied(earlier.tensors))
            passed = self.adapter.features_and_logits(validation.images)
            figures = self.judge.measure(*passed, validation.panels)
            harmless = not self.judge.worse(figures, validation.source, "the source model")
            if harmless and self.judge.better(figures, ours):
                self.snapshots.publish(earlier.version, earlier.alignment, earlier.contributions)
                text = f"rolled back from version {bad} to {earlier.version}: {why}"
                return Outcome("rolled_back", text, figures.summary(), self._gains(validation, passed), validation.new)
        self.snapshots.back_to_source()
        text = f"rolled back from version {bad} to the source model: {why}"
        return Outcome("rolled_back", text, validation.source.summary(), {}, validation.new)

    def _earlier(self, version: int) -> list[Snapshot]:
        """Snapshots to go back to: the best one so far, then the newest."""
        history = self.snapshots.history
        best = history.get(self.snapshots.anchor.version)
        newest = [snapshot for snapshot in history.before(version) if snapshot is not best]
        return ([] if best is None or best.version == version else [best]) + newest[:LOOK_BACK]

    def _gains(self, validation: _Validation, passed: tuple[Tensor, Tensor] | None) -> dict[str, tuple[float, int]]:
        """For each camera with enough images, how much better the published model is than the source model.

        It is log(Fréchet distance · entropy), less that of the source model: below 0 where the features are nearer to
        the source's and the answers surer. The distance alone prefers the model that tells few classes apart badly, the
        entropy alone one that is sure of garbage. With the number of images that it was measured on.
        """
        if self.reference is None or passed is None or self.snapshots.published.version == SOURCE_VERSION:
            return {}
        features, logits = passed
        rows: dict[str, list[int]] = {}
        for i, item in enumerate(validation.items):
            rows.setdefault(item.camera, []).append(i)
        gains = {}
        for camera, chosen in rows.items():
            if len(chosen) < PANEL:
                continue
            ours = self.reference.frechet(features[chosen]), float(entropy(logits[chosen]).mean())
            source = validation.source_features[chosen], validation.source_logits[chosen]
            theirs = self.reference.frechet(source[0]), float(entropy(source[1]).mean())
            nearer, surer = (log_ratio([a], [b]) for a, b in zip(ours, theirs, strict=True))
            if abs(nearer) > SAME_FEATURES:
                gains[camera] = nearer + surer, len(chosen)
        return gains
