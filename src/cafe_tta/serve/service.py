"""The service: answers from a published snapshot, and adapts a copy behind it. No HTTP in here."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cafe_tta.adapter import Adapter
from cafe_tta.serve import status
from cafe_tta.serve.adaptation import Adaptation, Outcome
from cafe_tta.serve.answering import Answers as Answers
from cafe_tta.serve.answering import check_camera, check_request, run
from cafe_tta.serve.buffer import Buffer, Item
from cafe_tta.serve.cameras import NEWCOMER, Camera, Cameras
from cafe_tta.serve.config import ServiceConfig as ServiceConfig
from cafe_tta.serve.guard import PANEL
from cafe_tta.serve.keeping import Keeping
from cafe_tta.serve.replica import SOURCE_VERSION
from cafe_tta.serve.screen import screen
from cafe_tta.serve.telemetry import Telemetry
from cafe_tta.serve.watch import Watch
from cafe_tta.serve.yardstick import Yardstick
from cafe_tta.source.stats import SourceStats

TICK = 2.0  # seconds between two points of the series
MOST_OPTED_OUT = 10_000
MOST_PATIENCE = 8  # times as many images must come before the next step, after steps that were refused
NEWCOMERS = ""  # their place in the buffer: no camera has this name


class Service:
    """One model for many cameras. Any thread may call any method."""

    def __init__(self, adapter: Adapter, config: ServiceConfig, source_stats: SourceStats | None) -> None:
        if not isinstance(adapter, Adapter):
            raise TypeError(f"expected an Adapter, but got {type(adapter).__name__}; make one with cafe_tta.create()")
        if source_stats is not None:
            source_stats.check_belongs_to(adapter.classifier)
        self.config = config
        self.method = adapter.name
        self.num_classes = adapter.classifier.num_classes
        self.num_features = adapter.classifier.num_features
        self.class_names: tuple[str, ...] | None = None
        self._yardstick = None if source_stats is None else Yardstick(source_stats, config.gate_margin)
        self._lock = threading.RLock()  # of everything but the adaptation; held for moments only
        self._wake = threading.Condition(self._lock)
        self._stepping = threading.Lock()  # of the adaptation; held for a whole step. Taken before `_lock`, never after
        self._adaptation = Adaptation(adapter, config, self._yardstick)
        self._keeping = Keeping(self._adaptation, config)
        self._buffer = Buffer(config.buffer_images, config.per_camera, config.max_cameras, config.seed)
        self._cameras = Cameras(config.max_cameras, self.num_features)
        self._watch = Watch(self._lock, self._cameras, self._buffer, config, self._yardstick)
        self._opted_out: set[str] = set()
        self._telemetry = Telemetry()
        self._paused = self._closing = self._busy = False
        self._thread: threading.Thread | None = None
        self._started = time.time()
        self._images = self._answered = self._adapted_images = 0
        self._like_source = 0  # images since the last step that the gate kept out
        self._steps = {"accepted": 0, "refused": 0, "rolled_back": 0, "skipped": 0}
        self._patience = 1  # times as many images as a step takes must have come
        self._not_before = 0.0  # time.monotonic() of the next step at the earliest

    # What clients use

    def answer(self, images: Tensor, cameras: Sequence[str], adapt: Sequence[bool]) -> Answers:
        """Answers a batch, and keeps of it what may be adapted to."""
        check_request(images, cameras, adapt)
        with self._lock:
            self._images += len(images)
            known = {name: self._cameras.get(name) for name in set(cameras)}
        wanting = {name for name, camera in known.items() if camera is not None and camera.wants_source}
        published = self._adaptation.published
        of_source = [name in wanting and published.version != SOURCE_VERSION for name in cameras]
        passed = run(images, of_source, published.front, self._adaptation.source)
        sure, predicted = passed.logits.softmax(1).max(1)
        screened = screen(images) if self.config.guard and self._adapting else None
        rows = list(zip(passed.features.unbind(), predicted.tolist(), sure.tolist(), strict=True))
        drift: list[float | None] = []
        taken: list[bool] = []
        with self._lock:
            for i, name in enumerate(cameras):
                features, label, confidence = rows[i]
                camera = self._cameras.touch(name)
                self._cameras.saw(camera, features.clone(), (label, confidence), passed.versions[i] == SOURCE_VERSION)
                flaw = "" if screened is None else camera.flaw(screened.flat[i], screened.fingerprints[i])
                takes = adapt[i] and not flaw and self._wanted(camera)
                if takes:
                    self._buffer.add(name, images[i], None if camera.images > NEWCOMER else NEWCOMERS)
                    camera.adapted += 1
                    self._adapted_images += 1
                taken.append(takes)
                drift.append(status.finite(camera.drift))
            self._answered += len(images)
            if self._enough():
                self._wake.notify_all()
        return Answers(passed.logits, passed.published, drift, taken, passed.versions)

    def probe(self, images: Tensor) -> Tensor:
        """Logits of the published snapshot, counted nowhere: to warm up, and to see whether it answers."""
        return self._adaptation.published.front(images)[2].float().cpu()

    def observe(self, images: int, seconds: float) -> None:
        """Notes what a request took, for the series."""
        with self._lock:
            self._telemetry.observe(images, seconds)

    # What operators use

    def start(self) -> None:
        """Takes up the last good state, and starts the adapting thread."""
        with self._stepping, self._lock:
            if self._thread is not None:
                raise RuntimeError("the service was started already")
            self._started = time.time()
            restored = self._keeping.restore()
            self._telemetry.restore(restored.events)
            self._opted_out |= set(restored.opted_out)
            for text in restored.problems:
                self._telemetry.record("error", self._version, text)
            self._telemetry.record("started", self._version, f"started with {self.method}{restored.text}")
            self._thread = threading.Thread(target=self._run, name="cafe-tta-adapt", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Goes on answering with what is published, and adapts no more."""
        with self._lock:
            self._require_adapting("pause")
            if self._paused:
                raise ValueError("cannot pause: the service is paused already")
            self._paused = True
            self._telemetry.record("paused", self._version, "paused by an operator; goes on answering")

    def resume(self) -> None:
        with self._lock:
            self._require_adapting("resume")
            if not self._paused:
                raise ValueError("cannot resume: the service is not paused")
            self._paused = False
            self._telemetry.record("resumed", self._version, "resumed by an operator")
            self._wake.notify_all()

    def reset(self) -> None:
        """The source model again; what was seen is forgotten. Waits for a step that is under way."""
        with self._stepping:
            self._adaptation.back_to_source()
            with self._lock:
                self._buffer.clear()
                self._cameras.forget()
                self._patience = 1
                self._watch.forget()
                self._telemetry.record("reset", SOURCE_VERSION, "reset by an operator: the source model answers")

    def rollback(self, version: int | None = None) -> None:
        """An earlier snapshot again; by default the one before. Waits for a step that is under way."""
        with self._stepping:
            now = self._version
            chosen = self._keeping.roll_back(version)
            with self._lock:
                text = f"rolled back from version {now} to {chosen} by an operator"
                self._steps["rolled_back"] += 1
                self._telemetry.record("rolled_back", chosen, text)

    def save(self) -> None:
        """Writes the state to disk now."""
        if self.config.state is None:
            raise ValueError("cannot save: the service was started without a folder for its state")
        with self._stepping:
            self._save("saved by an operator")

    def camera_opt_out(self, camera: str, out: bool = True) -> None:
        """Nothing of this camera is adapted to; its images are answered as ever."""
        check_camera(camera)
        with self._lock:
            if not out:
                self._opted_out.discard(camera)
                return
            if len(self._opted_out) >= MOST_OPTED_OUT and camera not in self._opted_out:
                raise ValueError(f"cannot opt {camera!r} out: {MOST_OPTED_OUT} cameras are opted out already")
            self._opted_out.add(camera)
            self._buffer.drop(camera)

    def status(self) -> dict[str, Any]:
        """All that a person may want to know, as plain JSON."""
        with self._lock:
            return {
                "name": self.config.name,
                "method": self.method,
                "state": "off" if not self.config.adapt else "paused" if self._paused else "adapting",
                "version": self._version,
                "started": self._started,
                "now": time.time(),
                "images": self._images,
                "answered": self._answered,
                "adapted_images": self._adapted_images,
                "steps": dict(self._steps),
                "drift": dict(self._watch.drift),
                "cameras": status.describe_cameras(self._cameras, self._images, self._opted_out),
                "groups": list(self._watch.groups),
                "classes": status.describe_classes(self._cameras, self.class_names),
                "events": list(self._telemetry.events),
                "series": list(self._telemetry.series),
                "snapshots": [snapshot.describe() for snapshot in self._adaptation.history],
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
        if self._stepping.acquire(timeout=timeout):  # a step that takes longer than that is left to its fate
            try:
                if thread is not None and self._keeping.open:
                    self._save("saved at shutdown")
                self._keeping.close()
            finally:
                self._stepping.release()

    # The adapting thread

    @property
    def _version(self) -> int:
        return self._adaptation.published.version

    @property
    def _adapting(self) -> bool:
        return self.config.adapt and not self._paused

    def _wanted(self, camera: Camera) -> bool:
        """Whether a good image of a camera is adapted to."""
        if not self._adapting or camera.name in self._opted_out or camera.quarantined:
            return False
        if self.config.gate and camera.looks_like_source:
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
                    self._watch.look()
                    with self._lock:
                        self._telemetry.point(self._watch.drift["overall"], self._watch.drift["source"])
                    self._save_if_due()
            except Exception as error:  # whatever goes wrong here, clients are answered
                self._recover(error)
            with self._lock:
                self._busy = False
                self._wake.notify_all()

    def _enough(self) -> bool:
        """Whether so many images have come that it is time for a step, or to say why there is none."""
        return self._adapting and (self._enough_to_step() or self._like_source >= self.config.step_images)

    def _enough_to_step(self) -> bool:
        wanted = self.config.step_images
        if self._buffer.arrived < wanted * self._patience or not self._buffer.ready(wanted):
            return False
        return not self.config.guard or self._buffer.num_held() >= 2 * PANEL  # else nobody could judge the step

    def _due(self) -> bool:
        return self._enough() and time.monotonic() >= self._not_before

    def _cycle(self) -> None:
        began = time.monotonic()
        self._watch.assess()
        items: list[Item] = []
        with self._lock:
            like_source, self._like_source = self._like_source, 0
            if self._adapting and self._enough_to_step():
                items = self._buffer.take(self.config.step_images)
                held = self._buffer.held(self.config.held_images)
        if items:
            outcome = self._adaptation.cycle(items, held)
        elif like_source:
            outcome = Outcome("skipped", f"no step: {like_source} images looked like the source")
        else:
            return  # what waited belonged to a camera that was quarantined just now
        ended = time.monotonic()
        with self._lock:
            self._note(outcome)
            share = self.config.adapt_share
            self._not_before = ended + (ended - began) * (1 - share) / share

    def _note(self, outcome: Outcome) -> None:
        self._steps[outcome.kind] += 1
        figures = {name: status.finite(value) for name, value in outcome.figures.items()}
        self._telemetry.record(outcome.kind, self._version, outcome.text, **figures)
        worse = outcome.kind in ("refused", "rolled_back")
        self._patience = min(MOST_PATIENCE, 2 * self._patience) if worse else 1
        for camera in self._cameras:
            if outcome.kind == "rolled_back":
                camera.gain = None
            camera.learn_gain(outcome.gains.get(camera.name))
            camera.source_features.extend(outcome.source_features.get(camera.name, ()))
            camera.changed |= camera.name in outcome.source_features

    def _save_if_due(self) -> None:
        if self._keeping.due() and self._stepping.acquire(blocking=False):
            try:
                self._save("saved on schedule")
            finally:
                self._stepping.release()

    def _save(self, text: str) -> None:
        with self._lock:
            events, opted_out = list(self._telemetry.events), sorted(self._opted_out)
        path = self._keeping.save(events, opted_out)
        if path is not None:
            with self._lock:
                self._telemetry.record("saved", self._version, f"version {self._version} {text}: {path.name}")

    def _recover(self, error: Exception) -> None:
        """After a mistake: the adapter as it was published last, and an event that says so."""
        with self._stepping:
            self._adaptation.restore_good()
        with self._lock:
            self._patience = min(MOST_PATIENCE, 2 * self._patience)
            self._not_before = time.monotonic() + 1.0
            self._telemetry.record("error", self._version, f"{type(error).__name__}: {error}")

    def _require_adapting(self, what: str) -> None:
        if not self.config.adapt:
            raise ValueError(f"cannot {what}: the service was started with adapt=off")
