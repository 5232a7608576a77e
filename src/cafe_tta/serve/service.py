"""The service: answers from a published snapshot, and adapts a copy behind it. No HTTP in here."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cafe_tta.adapter import Adapter
from cafe_tta.judge import PANEL
from cafe_tta.serve import status
from cafe_tta.serve.adaptation import Adaptation, Outcome
from cafe_tta.serve.buffer import NEWCOMERS, VALIDATION_EVERY, Buffer, Item
from cafe_tta.serve.cameras import Camera, Cameras, check_name, finite, screen
from cafe_tta.serve.events import Events
from cafe_tta.serve.leader import Standing
from cafe_tta.serve.settings import Settings
from cafe_tta.serve.snapshots import SOURCE_VERSION, Replica, Snapshots
from cafe_tta.serve.stall import Stall
from cafe_tta.serve.store import MOST_OPTED_OUT
from cafe_tta.source import ImageRecord, Reference, SourceStats
from cafe_tta.source.images import ImageCheck

TICK = 2.0  # seconds between two points of the series
MOST_PATIENCE = 8  # largest factor by which refused steps raise the number of images needed for the next step
NAMED = 8  # cameras that one event names
LEAST_VALIDATION = 2 * PANEL  # images without which a step cannot be judged
FIRST_IMAGES = 2 * PANEL  # that a restored state is judged on before it answers


@dataclass(frozen=True)
class Answers:
    """The answers to a batch of images."""

    logits: Tensor  # (B, C) float32, on the CPU
    labels: Tensor  # (B,) int64: the predicted classes
    probabilities: Tensor  # (B,) float32: of the predicted classes
    version: int  # of the snapshot that was published; 0 is the source model
    drift: list[float | None]  # of each image's camera: 1 is like the source images; None while unknown
    adapted: list[bool]  # whether the image was taken for adapting
    versions: list[int]  # which snapshot answered each image: the published one, or 0, the source model


class Service:
    """One model for many cameras. Any thread may call any method.

    >>> import cafe_tta as cafe, torch
    >>> adapter = cafe.create("tent", cafe.split_classifier(torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
    ...     torch.nn.Linear(4, 2))))
    >>> service = Service(adapter, Settings(step_images=8), source_stats=None)
    >>> answers = service.answer(torch.rand(5, 3, 8, 8), cameras=["gate"] * 5, adapt=[True] * 5)
    >>> answers.logits.shape, answers.version, service.status()["answered"]
    (torch.Size([5, 2]), 0, 5)
    """

    def __init__(self, adapter: Adapter, settings: Settings, source_stats: SourceStats | None) -> None:
        if not isinstance(adapter, Adapter):
            raise TypeError(f"expected an Adapter, but got {type(adapter).__name__}; make one with cafe_tta.create()")
        if source_stats is not None:
            adapter.check_stats(source_stats)  # not its own classifier, which some methods change when they are made
        self.settings = settings
        self.name = settings.name or "cafe-tta"
        self.method = adapter.name
        self.num_classes = adapter.classifier.num_classes
        self.class_names: tuple[str, ...] | None = None
        self.device = adapter.classifier.head.weight.device
        self._reference = None if source_stats is None else Reference(source_stats, margin=settings.gate_margin)
        # It looks at the images of clients; the adapter sees them later, in other batches, and need not look again.
        self._image_check = adapter.image_check if source_stats is None else ImageCheck(source_stats.images)
        adapter.image_check = ImageCheck(ImageRecord())
        self._limits = None if source_stats is None else source_stats.images.limits
        self._lock = threading.RLock()  # guards everything except the adaptation; held only briefly
        self._wake = threading.Condition(self._lock)
        self._stepping = threading.Lock()  # guards the adaptation, for a whole step; taken before `_lock`, never after
        self._snapshots = Snapshots(adapter, settings)
        self._adaptation = Adaptation(self._snapshots, settings, self._reference)
        self._buffer = Buffer(settings.buffer_images, settings.per_camera, settings.max_cameras, settings.seed)
        num_features = adapter.classifier.num_features
        self._cameras = Cameras(settings, num_features, self._reference, self._buffer, self._lock)
        self._opted_out: set[str] = set()
        self._events = Events(self.name)
        self._stall = Stall(settings.step_images)
        self._stalled = ""  # why adapting comes to nothing
        self._first: list[Item] = []  # images that a restored state will be judged on
        self._series = status.Series()
        self._paused = self._closing = self._busy = False
        self._thread: threading.Thread | None = None
        self._started = time.time()
        self._images = self._answered = self._adapted_images = 0
        self._like_source = 0  # images since the last step that the gate kept out
        self._steps = {"accepted": 0, "refused": 0, "rolled_back": 0, "skipped": 0}
        self._patience = 1  # factor on the images that must come before the next step
        self._not_before = 0.0  # time.monotonic() of the next step at the earliest

    # For clients

    def answer(
        self,
        images: Tensor,
        cameras: Sequence[str],
        adapt: Sequence[bool],
        requests: Sequence[str] | None = None,
        verified: Sequence[bool] | None = None,
    ) -> Answers:
        """Answers a batch, and keeps those of its images that may be adapted to.

        `requests` are ids, for the log; `verified` says which images came with their camera's token.
        """
        _check_request(images, cameras, adapt)
        requests = ["-"] * len(images) if requests is None else requests
        verified = [False] * len(images) if verified is None else verified
        if self._snapshots.candidate is not None:
            self._judge_restored(images, cameras)
        with self._lock:
            self._images += len(images)
            known = {name: self._cameras.get(name) for name in set(cameras)}
        wanting = {name for name, camera in known.items() if camera is not None and camera.wants_source}
        published = self._snapshots.published
        of_source = [name in wanting and published.version != SOURCE_VERSION for name in cameras]
        passed = _forward(images, of_source, published.front, self._snapshots.source)
        probabilities, labels = passed.logits.softmax(1).max(1)
        screened = screen(images, self._limits) if self.settings.judge and self._adapting else None
        predictions = zip(labels.tolist(), probabilities.tolist(), strict=True)
        rows = list(zip(passed.features.unbind(), predictions, passed.clusters, strict=True))
        drift: list[float | None] = []
        taken: list[bool] = []
        with self._lock:
            if wrong := self._image_check.look(images):
                self._record("warning", f"camera {cameras[0]}: {wrong}")
            for i, name in enumerate(cameras):
                features, prediction, cluster = rows[i]
                camera = self._cameras.touch(name)
                camera.verified = verified[i]
                seen = (features.clone(), prediction, cluster, passed.versions[i] == SOURCE_VERSION)
                camera.saw(*seen)
                trusted = self._cameras.trusts(camera)
                if not trusted:
                    self._cameras.crowd.saw(*seen)
                flaw = "" if screened is None else camera.flaw(screened[i])
                takes = adapt[i] and not flaw and self._wanted(camera, trusted)
                if takes:
                    self._buffer.add(name, images[i], None if trusted else NEWCOMERS, requests[i], prediction[0])
                    camera.adapted += 1
                    self._adapted_images += 1
                taken.append(takes)
                drift.append(finite(camera.drift))
            self._answered += len(images)
            if self._adapting and any(adapt):
                self._stall.saw(len(images))
            if self._enough():
                self._wake.notify_all()
        return Answers(passed.logits, labels, probabilities, passed.published, drift, taken, passed.versions)

    @property
    def version(self) -> int:
        """Of the snapshot that answers; 0 is the source model."""
        return self._version

    def probe(self, images: Tensor) -> Tensor:
        """Logits of the published snapshot, not counted anywhere: to warm up, and to see whether it answers."""
        return _plain(self._snapshots.published.front(images).logits)

    def check_state(self, folder: Path) -> str:
        """What a start with this folder of states would go on from, in words; raises where it would fail."""
        return self._snapshots.require_usable(folder)

    def standing(self) -> Standing:
        """What followers of this service have to know, beside its snapshot."""
        with self._lock:
            return Standing(
                run=self._snapshots.run,
                version=self._version,
                adapting=self._adapting,
                source=[camera.name for camera in self._cameras if camera.wants_source],
                quarantined={camera.name: camera.quarantined for camera in self._cameras if camera.quarantined},
                opted_out=sorted(self._opted_out),
            )

    def snapshot(self) -> bytes:
        """The published snapshot, for followers."""
        return self._snapshots.export()

    def note(self, kind: str, text: str) -> None:
        """Records an event of the server around the service."""
        with self._lock:
            self._record(kind, text)

    def observe(self, images: int, seconds: float) -> None:
        """Notes how long a request took, for the series."""
        with self._lock:
            self._series.seconds.append(seconds)
            self._series.images += images

    # For operators

    def start(self) -> None:
        """Restores the last good state, and starts the adapting thread."""
        with self._stepping, self._lock:
            if self._thread is not None:
                raise RuntimeError("the service was started already")
            self._started = time.time()
            restored = self._snapshots.restore(judged=self.settings.judge)
            self._events.extend(restored.events)
            self._opted_out |= set(restored.opted_out)
            self._cameras.found(restored.trusted, restored.steps)
            self._record_problems()
            self._record("started", f"started with {self.method}{restored.text}")
            if self._snapshots.candidate is not None:
                text = f"the source model answers the first {FIRST_IMAGES} images, on which the saved state is judged"
                self._record("restoring", text)
            elif self._version != SOURCE_VERSION:
                self._record("restored", f"version {self._version} answers, which was not judged (judge=off)")
            self._thread = threading.Thread(target=self._run, name="cafe-tta-adapt", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Stops adapting; the published snapshot goes on answering."""
        with self._lock:
            self._require_adapting("pause")
            if self._paused:
                raise ValueError("cannot pause: the service is paused already")
            self._paused = True
            self._record("paused", "paused by an operator; goes on answering")

    def resume(self) -> None:
        """Starts adapting again."""
        with self._lock:
            self._require_adapting("resume")
            if not self._paused:
                raise ValueError("cannot resume: the service is not paused")
            self._paused = False
            self._record("resumed", "resumed by an operator")
            self._wake.notify_all()

    def reset(self) -> None:
        """Publishes the source model, and forgets what was seen. Waits for a running step to end."""
        with self._stepping:
            self._snapshots.back_to_source()
            with self._lock:
                self._buffer.clear()
                self._cameras.forget()
                self._stall.forget()
                self._patience = 1
                self._record("reset", "reset by an operator: the source model answers")

    def rollback(self, version: int | None = None) -> None:
        """Publishes an earlier snapshot; by default the one before. Waits for a running step to end."""
        with self._stepping:
            now = self._version
            chosen = self._snapshots.roll_back(version)
            with self._lock:
                self._steps["rolled_back"] += 1
                self._cameras.forget_clusters()
                self._record("rolled_back", f"rolled back from version {now} to {chosen} by an operator")

    def save(self) -> None:
        """Writes the state to disk now."""
        if self.settings.state is None:
            raise ValueError("cannot save: the service was started without a folder for its state")
        with self._stepping:
            try:
                self._save("saved by an operator")
            except OSError as error:
                raise ValueError(f"cannot save: {_said(error)}") from error

    def camera_opt_out(self, camera: str, out: bool = True) -> None:
        """Excludes a camera from adapting, or lets it in again; its images are answered in any case."""
        check_name(camera)
        with self._lock:
            if not out:
                self._opted_out.discard(camera)
                return
            if len(self._opted_out) >= MOST_OPTED_OUT and camera not in self._opted_out:
                raise ValueError(f"cannot opt {camera!r} out: {MOST_OPTED_OUT} cameras are opted out already")
            self._opted_out.add(camera)
            self._buffer.drop(camera)

    def undo(self, camera: str) -> None:
        """Opts a camera out, and publishes the newest kept snapshot that was not adapted to its images.

        Where every kept one was, the source model answers. Waits for a running step to end.
        """
        self.camera_opt_out(camera)
        with self._stepping:
            now = self._version
            chosen = self._snapshots.take_without(camera)
            with self._lock:
                self._buffer.drop(camera)
                if chosen == now:
                    self._record("undone", f"camera {camera} was opted out; version {now} had learnt nothing from it")
                    return
                self._steps["rolled_back"] += 1
                self._cameras.forget_clusters()
                text = f"camera {camera} was opted out, and what the model had learnt from it was undone"
                self._record("undone", f"{text}: from version {now} to {chosen or 'the source model'}, by an operator")

    def status(self) -> dict[str, Any]:
        """Everything that the dashboard shows, as plain JSON."""
        sizes = [] if self._reference is None else self._reference.sizes
        clusters = self._snapshots.published.front.clusters
        with self._lock:
            return {
                "name": self.name,
                "method": self.method,
                "state": "off" if not self.settings.adapt else "paused" if self._paused else "adapting",
                "version": self._version,
                "started": self._started,
                "now": time.time(),
                "images": self._images,
                "answered": self._answered,
                "adapted_images": self._adapted_images,
                "steps": dict(self._steps),
                "next_step_images": self._images_to_step(),
                "waiting": self._waiting() or None,
                "drift": {name: finite(drift) for name, drift in self._cameras.drift.items()},
                "stalled": self._stalled or None,
                "cameras": status.describe_cameras(
                    self._cameras, self._images, self._opted_out, clusters, self._snapshots.contributions
                ),
                "clusters": status.describe_clusters(clusters),
                "groups": status.describe_groups(self._cameras.divergences, sizes),
                "classes": status.describe_classes(self._cameras, self.class_names),
                "events": self._events.as_json(),
                "series": list(self._series.points),
                "snapshots": [snapshot.describe() for snapshot in self._snapshots.history],
                "leader": None,  # of a follower: see there
            }

    def settle(self, timeout: float = 60.0) -> bool:
        """Waits until there is nothing to adapt to. False where that took too long."""
        with self._lock:
            return self._wake.wait_for(lambda: self._closing or not (self._busy or self._enough()), timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Ends the adapting thread, after its step, and saves. May be called more than once."""
        with self._lock:
            self._closing = True
            self._wake.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        if self._stepping.acquire(timeout=timeout):  # a step that takes longer is abandoned
            try:
                if thread is not None and self._snapshots.on_disk:
                    self._save("saved at shutdown")
            except OSError as error:
                with self._lock:
                    self._record("error", f"could not save at shutdown: {_said(error)}")
            finally:
                self._snapshots.close()
                self._stepping.release()

    # The adapting thread

    @property
    def _version(self) -> int:
        return self._snapshots.published.version

    @property
    def _adapting(self) -> bool:
        return self.settings.adapt and not self._paused

    @property
    def _only_verified(self) -> bool:
        return self.settings.camera_tokens is not None and self.settings.unknown_cameras == "answer"

    def _wanted(self, camera: Camera, trusted: bool) -> bool:
        """Whether a good image of a camera is adapted to."""
        if not self._adapting or camera.name in self._opted_out or camera.quarantined:
            return False
        if not trusted and (self._only_verified or self._cameras.crowd.quarantined):
            return False
        if self.settings.gate and camera.looks_like_source:
            self._like_source += 1
            return False
        return True

    def _run(self) -> None:
        next_tick = time.monotonic() + TICK
        while True:
            with self._lock:
                while not self._closing and not self._due() and time.monotonic() < next_tick:
                    until = min(next_tick, self._not_before) if self._enough() else next_tick
                    self._wake.wait(max(1e-3, until - time.monotonic()))
                if self._closing:
                    return
                due = self._busy = self._due()
            try:
                if due:
                    with self._stepping:
                        self._cycle()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK
                    self._note_quarantine(self._cameras.look())
                    with self._lock:
                        self._look_for_stall()
                        self._series.point(self._cameras.drift["overall"], self._cameras.drift["source"])
                    self._save_if_due()
            except Exception as error:  # whatever goes wrong here, clients are answered
                self._recover(error)
            with self._lock:
                self._busy = False
                self._wake.notify_all()

    def _enough(self) -> bool:
        """Whether enough images have come for a step, or for saying why there is none."""
        if self._snapshots.candidate is not None:  # the adapter is to continue from it
            return False
        return self._adapting and (self._enough_to_step() or self._like_source >= self.settings.step_images)

    def _enough_to_step(self) -> bool:
        wanted = self.settings.step_images
        if self._buffer.arrived < wanted * self._patience or not self._buffer.ready(wanted):
            return False
        return not self.settings.judge or self._buffer.num_validation() >= LEAST_VALIDATION

    def _images_to_step(self) -> int | None:
        """About how many more images the next step takes, validation images among them; 0 where it is due."""
        if not self._adapting:
            return None
        part = self._buffer.missing(self.settings.step_images, self._patience)
        images = -(-part * VALIDATION_EVERY // (VALIDATION_EVERY - 1))
        if self.settings.judge:
            images = max(images, VALIDATION_EVERY * (LEAST_VALIDATION - self._buffer.num_validation()))
        return images

    def _waiting(self) -> str:
        """What the next step waits for, in words; empty where it is due, or none will be taken."""
        if self._adapting and self._snapshots.candidate is not None:
            return f"{FIRST_IMAGES - len(self._first)} more images, on which the saved state is judged"
        images = self._images_to_step()
        if not images:
            return ""
        new = [c.name for c in self._cameras if c.fresh and c.adapted and not self._cameras.trusts(c)]
        voices = self._buffer.num_voices
        return status.describe_waiting(images, self._patience, new if voices > 1 else [], voices)

    def _due(self) -> bool:
        return self._enough() and time.monotonic() >= self._not_before

    def _cycle(self) -> None:
        began = time.monotonic()
        self._note_quarantine(self._cameras.assess())
        items: list[Item] = []
        with self._lock:
            like_source, self._like_source = self._like_source, 0
            if self._adapting and self._enough_to_step():
                items = self._buffer.take(self.settings.step_images)
                validation = self._buffer.validation(self.settings.validation_images)
        if items:
            outcome = self._adaptation.cycle(items, validation)
        elif like_source:
            outcome = Outcome("skipped", f"no step: {like_source} images looked like the source")
        else:
            return  # the waiting images belonged to a camera that was quarantined just now
        ended = time.monotonic()
        with self._lock:
            self._note(outcome, items)
            share = self.settings.adapt_share
            self._not_before = ended + (ended - began) * (1 - share) / share

    def _note(self, outcome: Outcome, items: Sequence[Item]) -> None:
        self._steps[outcome.kind] += 1
        if items:
            self._cameras.count_step()
        by_camera = Counter(item.camera for item in items)
        requests = [item.request for item in sorted(items, key=lambda item: item.number)]
        self._events.record(outcome.kind, self._version, outcome.text, outcome.figures, by_camera, requests)
        self._stall.note(outcome.kind, by_camera)
        worse = outcome.kind in ("refused", "rolled_back")
        self._patience = min(MOST_PATIENCE, 2 * self._patience) if worse else 1
        if outcome.kind in ("accepted", "rolled_back"):
            self._cameras.forget_clusters()
        for camera in self._cameras:
            if outcome.kind == "rolled_back":
                camera.gain = None
            if camera.looks_like_source:
                camera.learn_gain(0.0, 0)
            elif measured := outcome.gains.get(camera.name):
                camera.learn_gain(*measured)
            camera.source_features.extend(outcome.source_features.get(camera.name, ()))
            camera.changed |= camera.name in outcome.source_features

    def _record(self, kind: str, text: str) -> None:
        self._events.record(kind, self._version, text)

    def _note_quarantine(self, changed: Sequence[Camera]) -> None:
        """Notes which cameras were quarantined or let in again: two events at most, however many cameras."""
        if not changed:
            return
        with self._lock:
            inside = [f"{_called(camera)}: {camera.quarantined}" for camera in changed if camera.quarantined]
            outside = [_called(camera) for camera in changed if not camera.quarantined]
            for kind, texts in (("quarantined", inside), ("released", outside)):
                if texts:
                    more = f"; and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
                    self._record(kind, "; ".join(texts[:NAMED]) + more)

    def _look_for_stall(self) -> None:
        """Notes when adapting begins to come to nothing, and when that is over."""
        before, self._stalled = self._stalled, self._stall.text if self._adapting else ""
        if self._stalled and not before:
            self._record("stalled", self._stalled)
        elif before and not self._stalled:
            self._record("recovered", "steps are accepted again, or none is needed")

    def _record_problems(self) -> None:
        for text in self._snapshots.problems():
            self._record("error", text)

    def _judge_restored(self, images: Tensor, cameras: Sequence[str]) -> None:
        """Collects images until there are enough to judge a restored state on; then publishes it, or an older one."""
        with self._lock:
            new = zip(images, cameras, strict=True)
            self._first += [Item(name, name, image.detach().clone(), 0) for image, name in new]
            if len(self._first) < FIRST_IMAGES:
                return
        with self._stepping:
            items, self._first = self._first, []
            if not items or self._snapshots.candidate is None:
                return  # an operator was faster, or another thread
            text = self._adaptation.judge_restored(items)
            with self._lock:
                self._record_problems()
                self._record("restored", text or "no saved state was taken up: the source model answers")

    def _save_if_due(self) -> None:
        if self._snapshots.save_due() and self._stepping.acquire(blocking=False):
            try:
                self._save("saved on schedule")
            finally:
                self._stepping.release()

    def _save(self, text: str) -> None:
        with self._lock:
            events, opted_out = list(self._events), sorted(self._opted_out)
            trusted = self._cameras.trusted_names()
        path = self._snapshots.save(events, opted_out, trusted)
        if path is not None:
            with self._lock:
                self._record("saved", f"version {self._version} {text}: {path.name}")

    def _recover(self, error: Exception) -> None:
        """After an error: sets the adapter back to what was published last, and records an event."""
        with self._stepping:
            self._snapshots.restore_good()
        with self._lock:
            self._patience = min(MOST_PATIENCE, 2 * self._patience)
            self._not_before = time.monotonic() + 1.0
            self._record("error", _said(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")

    def _require_adapting(self, what: str) -> None:
        if not self.settings.adapt:
            raise ValueError(f"cannot {what}: the service was started with adapt=off")


@dataclass(frozen=True)
class _Passed:
    """A batch after its forward passes."""

    features: Tensor  # (B, D) float32, on the CPU
    logits: Tensor  # (B, C) float32, on the CPU
    versions: list[int]
    clusters: list[int]
    published: int


def _forward(images: Tensor, of_source: Sequence[bool], published: Replica, source: Replica) -> _Passed:
    """One pass, or two where some of the images are answered by the source model."""
    if not any(of_source) or all(of_source):
        one = (source if any(of_source) else published)(images)
        versions = [one.version] * len(images)
        return _Passed(_plain(one.features), _plain(one.logits), versions, one.clusters, published.version)
    chosen = torch.tensor(of_source)
    ours, theirs = published(images[~chosen]), source(images[chosen])
    features = torch.empty(len(images), ours.features.shape[1])
    logits = torch.empty(len(images), ours.logits.shape[1])
    features[~chosen], features[chosen] = _plain(ours.features), _plain(theirs.features)
    logits[~chosen], logits[chosen] = _plain(ours.logits), _plain(theirs.logits)
    versions = [theirs.version if of else ours.version for of in of_source]
    own, others = iter(ours.clusters), iter(theirs.clusters)
    clusters = [next(others if of else own) for of in of_source]
    return _Passed(features, logits, versions, clusters, ours.version)


def _called(camera: Camera) -> str:
    return f"camera {camera.name}" if camera.name else "all new cameras, taken as one"


def _said(error: OSError) -> str:
    """What went wrong with a file, without saying where it is."""
    name = f"{Path(error.filename).name}: " if isinstance(error.filename, str) else ""
    return f"{name}{error.strerror or type(error).__name__}"


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu()


def _check_request(images: object, cameras: Sequence[str], adapt: Sequence[bool]) -> None:
    """Refuses requests without one camera and one `adapt` for each image."""
    if not isinstance(images, Tensor):
        raise TypeError(f"expected a tensor of images, but got {type(images).__name__}")
    if images.dim() < 2 or not len(images):
        raise ValueError(f"expected a batch of at least one image, but got shape {tuple(images.shape)}")
    if not len(images) == len(cameras) == len(adapt):
        raise ValueError(
            "expected one camera and one `adapt` for each image, "
            f"but got {len(images)} images, {len(cameras)} cameras, {len(adapt)} of `adapt`"
        )
    for name in set(cameras):
        check_name(name)
