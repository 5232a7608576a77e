"""An adapter whose steps are judged on other images of the stream, without labels, and undone where they do harm."""

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cafe_tta import storage
from cafe_tta.adapter import STATE_KIND, STATE_VERSION, Adapter, copied
from cafe_tta.classifier import SplitClassifier, evaluating
from cafe_tta.judge import FEWEST, Figures, Judge
from cafe_tta.source import Reference, SourceStats
from cafe_tta.unmixing import Unmixer

VALIDATION_IMAGES, EVERY = 64, 512
WHILE_FILLING, WHEN_FULL = 4, 16  # one image of so many becomes a validation image
PREFIX = "judged."

State = dict[str, Tensor]
_OF_METHOD = ("needs", "adapts", "distributed", "in_tables", "traits", "remark", "one_pass", "Config", "presets")


class Judged(Adapter):
    """An adapter that takes back what makes other images of the stream worse. It is called like the one it wraps.

    At most `images` images of the stream are kept as validation images. After every `every` images, the model is
    compared on them, by `Judge.worse`, with what it was at the last check, with the best so far and with the source
    model. Where it is worse, it is again what it was at the last check; or, if that has turned out worse than the
    source model by now, the best so far or the source model. `report.rolled_back` and `report.reason` tell, and the
    batch is answered by the model that it was rolled back to. `stats` are those of the adapter, if not given; without
    any, only collapse, guesses and infinite answers are noticed. `save` keeps the validation images in the file, so
    that the adapter goes on as if it had not been saved; `judged.adapter.save` keeps no image.

    >>> from cafe_tta import FeatureStats, create, split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> stats = FeatureStats.fit(classifier, [torch.rand(512, 3, 2, 2)]).group()
    >>> adapter = Judged(create("cafe", classifier, stats, lr=100), every=64)  # far too large a learning rate
    >>> images = torch.rand(64, 3, 2, 2)
    >>> logits = adapter(images)
    >>> adapter.report.rolled_back, adapter.report.reason  # doctest: +ELLIPSIS
    (True, 'rolled back: its alignment loss is ... times that of the source model (...)')
    >>> torch.equal(adapter.predict(images), classifier(images))
    True
    """

    def __init__(
        self,
        adapter: Adapter,
        stats: SourceStats | Reference | None = None,
        *,
        images: int = VALIDATION_IMAGES,
        every: int = EVERY,
    ) -> None:
        nn.Module.__init__(self)  # everything else is the wrapped adapter's
        if not isinstance(adapter, Adapter) or isinstance(adapter, Judged):
            raise TypeError(f"expected an adapter that is not judged yet, but got {type(adapter).__name__}")
        if images < FEWEST:
            raise ValueError(f"expected at least {FEWEST} validation `images`, but got {images}")
        if every < 1:
            raise ValueError(f"expected `every` to be at least 1, but got {every}")
        if adapter.ranks.size > 1:
            raise ValueError(f"expected an adapter in one process, but this one is a rank of {adapter.ranks.size}")
        own = adapter._source.value
        stats = own if stats is None and isinstance(own, SourceStats) else stats
        if isinstance(stats, SourceStats):
            adapter.check_stats(stats)
            stats = Reference(stats)
        self.adapter, self.capacity, self.every = adapter, images, every
        self.judge = Judge(stats, adapter.classifier.num_classes, agree=True)
        with torch.inference_mode(False), adapter.source_weights():
            self.source = copy.deepcopy(adapter.classifier).requires_grad_(False)
        for name in _OF_METHOD:
            setattr(self, name, getattr(adapter, name))
        self._begin()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("adapter"), name)

    @property
    def drift(self) -> float | None:
        """How far the validation images are from the source images: 1 is like them. None without statistics."""
        reference, features = self.judge.reference, self.validation.features
        return None if reference is None or not len(features) else reference.drift(features)

    @property
    def clusters(self) -> Unmixer | None:
        return self.adapter.clusters

    # Like any adapter

    def forward(self, images: Tensor) -> Tensor:
        logits = self.adapter(images)
        with torch.inference_mode(False), torch.no_grad():
            return self._judged(images.clone() if images.is_inference() else images.detach(), logits)

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.adapter.features_and_logits(images)

    def features_as_answered(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.adapter.features_as_answered(images)

    def reset(self) -> None:
        self.adapter.reset()
        self._begin()

    def wants_more(self) -> bool:
        return self.adapter.wants_more()

    def export(self) -> nn.Module:
        return self.adapter.export()

    def changing(self) -> State:
        return self.adapter.changing()

    def facts(self) -> Mapping[str, Any]:
        drift = "" if self.drift is None else f"{self.drift:.2f}"
        return {**self.adapter.facts(), "judged on": f"{len(self.validation.images)} images", "drift": drift}

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continues where `save` left off, also that of an adapter that was not judged."""
        self.adapter.load(path)
        self._set_own(storage.read(path, STATE_KIND, STATE_VERSION)[0])

    def state(self) -> State:
        """That of the wrapped adapter, the validation images, and the states to go back to that differ from it."""
        own = {f"{PREFIX}{name}": tensor for name, tensor in self.validation.named_buffers()}
        if self.validation.unchecked:
            own |= {f"{PREFIX}last.{name}": tensor for name, tensor in self._last.items()}
        if self._best is not self._last:
            own |= {f"{PREFIX}best.{name}": tensor for name, tensor in self._best.items()}
        return self.adapter.state() | own

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.adapter.check_state(tensors)

    def set_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.adapter.set_state(tensors)
        self._set_own(tensors)

    def _state_meta(self) -> dict[str, Any]:
        return self.adapter._state_meta()

    def _set_own(self, tensors: Mapping[str, Tensor]) -> None:
        """The part of a state that is not the wrapped adapter's; what the state does not have begins here."""
        self._begin()
        for name, buffer in self.validation.named_buffers():
            if (found := tensors.get(f"{PREFIX}{name}")) is not None:
                setattr(self.validation, name, nn.Buffer(found.to(buffer).clone()))
        if last := _part(tensors, "last."):
            self._last = self._best = last
        self._best = _part(tensors, "best.") or self._last

    def _begin(self) -> None:
        """No images yet; what the adapter is now is the best so far."""
        self.validation = _Validation(self.adapter.classifier.head.weight)
        self._last = self._best = copied(self.adapter.state())  # at the last check; the best of all checks

    # Judging

    def _judged(self, images: Tensor, logits: Tensor) -> Tensor:
        report = self.adapter.report
        assert report is not None
        if report.refused:  # such a batch leaves no trace
            return logits
        kept = self.validation
        kept.count(len(images), report.stepped)
        first = len(kept.images) < FEWEST  # there are none yet but these to judge on
        if first:
            kept.keep(images, self.source, self.capacity)
        if kept.steps and kept.unchecked >= self.every and len(kept.images) >= FEWEST:
            if why := self._check():
                self.adapter.counters.rolled_back += int(kept.steps)
                report = replace(report, stepped=False, rolled_back=True, reason=f"rolled back: {why}")
                logits = self.features_as_answered(images)[1]
            kept.checked()
        if not first:
            kept.keep(images, self.source, self.capacity)
        self.adapter.report = replace(report, drift=self.drift if report.drift is None else report.drift)
        return logits

    def _check(self) -> str:
        """Accepts what was adapted since the last check; or rolls it back, and says why."""
        source = self.judge.measure(self.validation.features, self.validation.logits)
        now, ours = copied(self.adapter.state()), self._figures()
        figures = {id(now): ours}

        def measured(state: State) -> Figures:
            if id(state) not in figures:
                self.adapter.set_state(copied(state))
                figures[id(state)] = self._figures()
            return figures[id(state)]

        others = (
            ("the source model", lambda: source),
            ("the last check", lambda: measured(self._last)),
            ("the best so far", lambda: measured(self._best)),
        )
        why = self.judge.objection(ours, others)
        if not why and self.judge.better(ours, measured(self._best)):
            self._best = now
        back: State | None = now
        if why:
            harmless = (
                state for state in (self._last, self._best) if not self.judge.worse(measured(state), source, "")
            )
            back = next(harmless, None)
        if back is None:
            self._back_to_source()
        else:
            self._last = back
            self.adapter.set_state(copied(back))
        return why

    def _back_to_source(self) -> None:
        counters = self.adapter.counters
        self.adapter.reset()
        self.adapter.counters = counters  # batches are still counted
        self._last = self._best = copied(self.adapter.state())

    def _figures(self) -> Figures:
        return self.judge.measure(*self.adapter.features_as_answered(self.validation.images))


class _Validation(nn.Module):
    """The validation images with the source model's answers, and what came since the last check.

    A module of its own, so that its buffers cannot have the names of the wrapped adapter's.
    """

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        for name in ("images", "features", "logits"):
            setattr(self, name, nn.Buffer(like.detach().new_zeros(0)))
        self.seen = nn.Buffer(torch.tensor(0))  # images of the stream
        self.checked()

    images: Tensor
    features: Tensor
    logits: Tensor

    def checked(self) -> None:
        self.unchecked, self.steps = nn.Buffer(torch.tensor(0)), nn.Buffer(torch.tensor(0))  # images, and their steps

    def count(self, images: int, stepped: bool) -> None:
        self.unchecked = nn.Buffer(self.unchecked + images)
        self.steps = nn.Buffer(self.steps + int(stepped))

    def keep(self, images: Tensor, source: SplitClassifier, capacity: int) -> None:
        """Makes some of the images validation images, in the place of others where there are enough."""
        first, one_of = int(self.seen), WHILE_FILLING if len(self.images) < capacity else WHEN_FULL
        self.seen = nn.Buffer(self.seen + len(images))
        new = images[-first % one_of :: one_of][:capacity]
        if not len(new):
            return
        with evaluating(source):
            features, logits = source.features_and_logits(new)
        good = torch.isfinite(features).all(1) & torch.isfinite(logits).all(1)
        alike = self.images.shape[1:] == new.shape[1:]  # images of another size take the place of all
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(first))
        stay = order[: capacity - int(good.sum()) if alike else 0]
        self.images = _joined(self.images, stay, new[good])
        self.features = _joined(self.features, stay, features[good])
        self.logits = _joined(self.logits, stay, logits[good])


def _joined(old: Tensor, stay: Tensor, new: Tensor) -> nn.Buffer:
    return nn.Buffer(torch.cat([old[stay.to(old.device)], new]) if len(stay) else new.clone())


def _part(tensors: Mapping[str, Tensor], prefix: str) -> State:
    prefix = PREFIX + prefix
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
