"""The service: answers from a published snapshot, and adapts a copy behind it. No HTTP in here."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cafe_tta import losses
from cafe_tta.adapter import Adapter, StepRefused
from cafe_tta.serve.buffer import Buffer
from cafe_tta.serve.cameras import LONGEST_NAME, Cameras
from cafe_tta.serve.config import ServiceConfig as ServiceConfig
from cafe_tta.serve.replica import SOURCE_VERSION, Replica
from cafe_tta.serve.telemetry import Telemetry
from cafe_tta.serve.yardstick import FEWEST, Yardstick
from cafe_tta.stats import SourceStats

TICK = 2.0  # seconds between two points of the series
MOST_OPTED_OUT = 10_000


@dataclass(frozen=True)
class Answers:
    """What a batch of images gets."""

    logits: Tensor  # (B, C) float32, on the CPU
    version: int  # of the snapshot that answered; 0 is the source model
    drift: list[float | None]  # of each image's camera: at most 1 looks like the source; None while nobody knows
    adapted: list[bool]  # whether the image was taken for adapting


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
        adapter.reset()
        self._adapter = adapter
        self._yardstick = None if source_stats is None else Yardstick(source_stats, config.gate_margin)
        self._source = Replica(adapter)
        self._front, self._back = Replica(adapter), Replica(adapter)
        self._lock = threading.RLock()  # of everything below; held for moments only
        self._wake = threading.Condition(self._lock)
        self._stepping = threading.Lock()  # of the adapter and of what is published; held for a whole step
        self._buffer = Buffer(config.buffer_images, config.per_camera, config.max_cameras, config.seed)
        self._cameras = Cameras(config.max_cameras, self.num_features)
        self._opted_out: set[str] = set()
        self._telemetry = Telemetry()
        self._versions = SOURCE_VERSION  # the highest that was given out
        self._good = _copy(adapter.state())
        self._snapshots: list[dict[str, Any]] = []
        self._paused = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._started = time.time()
        self._images = self._adapted_images = 0
        self._steps = {"accepted": 0, "refused": 0, "rolled_back": 0, "skipped": 0}
        self._drift: dict[str, float | None] = {"overall": None, "source": None}
        self._groups: list[dict[str, Any]] = []
        self._not_before = 0.0  # time.monotonic() of the next step at the earliest

    # What clients use

    def answer(self, images: Tensor, cameras: Sequence[str], adapt: Sequence[bool]) -> Answers:
        """Answers a batch, and keeps of it what may be adapted to."""
        if not len(images) == len(cameras) == len(adapt):
            raise ValueError(
                "expected one camera and one `adapt` for each image, "
                f"but got {len(images)} images, {len(cameras)} cameras, {len(adapt)} of `adapt`"
            )
        for name in cameras:
            check_camera(name)
        version, features, logits = self._front(images)
        predicted = logits.argmax(1).tolist()
        rows = features.detach().float().cpu()
        drift: list[float | None] = []
        taken: list[bool] = []
        with self._lock:
            self._images += len(images)
            for i, name in enumerate(cameras):
                camera = self._cameras.touch(name)
                self._cameras.saw(camera, rows[i].clone(), predicted[i])
                take = self._adapting and adapt[i] and name not in self._opted_out
                if take:
                    self._buffer.add(name, images[i])
                    camera.adapted += 1
                    self._adapted_images += 1
                taken.append(take)
                drift.append(camera.drift)
            if self._buffer.fresh >= self.config.step_images:
                self._wake.notify_all()
        return Answers(logits.float().cpu(), version, drift, taken)

    def observe(self, images: int, seconds: float) -> None:
        """Notes what a request took, for the series."""
        with self._lock:
            self._telemetry.observe(images, seconds)

    # What operators use

    def start(self) -> None:
        """Starts the adapting thread."""
        with self._lock:
            if self._thread is not None:
                raise RuntimeError("the service was started already")
            self._started = time.time()
            self._telemetry.record("started", self._front.version, f"started with {self.method}")
            self._thread = threading.Thread(target=self._run, name="cafe-tta-adapt", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Goes on answering with what is published, and adapts no more."""
        with self._lock:
            self._require_adapting("pause")
            if self._paused:
                raise ValueError("cannot pause: the service is paused already")
            self._paused = True
            self._telemetry.record("paused", self._front.version, "paused by an operator; goes on answering")

    def resume(self) -> None:
        with self._lock:
            self._require_adapting("resume")
            if not self._paused:
                raise ValueError("cannot resume: the service is not paused")
            self._paused = False
            self._telemetry.record("resumed", self._front.version, "resumed by an operator")
            self._wake.notify_all()

    def reset(self) -> None:
        """The source model again; what was seen is forgotten."""
        with self._stepping:
            self._adapter.reset()
            self._good = _copy(self._adapter.state())
            self._show(SOURCE_VERSION, self._good)
            with self._lock:
                self._buffer.clear()
                self._cameras.clear()
                self._telemetry.record("reset", SOURCE_VERSION, "reset by an operator: the source model answers")

    def rollback(self, version: int | None = None) -> None:
        """An earlier snapshot again; by default the one before."""
        raise ValueError("cannot roll back: there is no earlier snapshot")

    def save(self) -> None:
        raise ValueError("cannot save: the service was started without a folder for its state")

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
            state = "off" if not self.config.adapt else "paused" if self._paused else "adapting"
            classes: dict[int, int] = {}
            for camera in self._cameras:
                for predicted in camera.classes:
                    classes[predicted] = classes.get(predicted, 0) + 1
            seen = max(1, sum(classes.values()))
            return {
                "name": self.config.name,
                "method": self.method,
                "state": state,
                "version": self._front.version,
                "started": self._started,
                "now": time.time(),
                "images": self._images,
                "answered": self._images,
                "adapted_images": self._adapted_images,
                "steps": dict(self._steps),
                "drift": dict(self._drift),
                "cameras": [
                    {
                        "camera": camera.name,
                        "images": camera.images,
                        "drift": camera.drift,
                        "share": camera.images / max(1, self._images),
                        "opted_out": camera.name in self._opted_out,
                        "last_seen": camera.last_seen,
                        "quarantined": camera.quarantined or None,
                    }
                    for camera in self._cameras
                ],
                "groups": list(self._groups),
                "classes": [
                    {"class": self._class_name(number), "share": count / seen}
                    for number, count in sorted(classes.items())
                ],
                "events": list(self._telemetry.events),
                "series": list(self._telemetry.series),
                "snapshots": list(self._snapshots),
            }

    def close(self, timeout: float = 5.0) -> None:
        """Ends the adapting thread, after its step."""
        with self._lock:
            self._closing = True
            self._wake.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    # The adapting thread

    @property
    def _adapting(self) -> bool:
        return self.config.adapt and not self._paused

    def _run(self) -> None:
        next_tick = time.monotonic() + TICK
        while True:
            with self._lock:
                while not self._closing and not self._due() and time.monotonic() < next_tick:
                    self._wake.wait(min(self._pause_until(next_tick), TICK))
                if self._closing:
                    return
                due = self._due()
            if due:
                began = time.monotonic()
                with self._stepping:
                    self._step()
                ended = time.monotonic()
                share = self.config.adapt_share
                self._not_before = ended + (ended - began) * (1 - share) / share
            if time.monotonic() >= next_tick:
                self._look()
                next_tick = time.monotonic() + TICK

    def _due(self) -> bool:
        enough = self._adapting and self._buffer.fresh >= self.config.step_images
        return enough and time.monotonic() >= self._not_before

    def _pause_until(self, next_tick: float) -> float:
        now = time.monotonic()
        until = next_tick
        if self._adapting and self._buffer.fresh >= self.config.step_images:
            until = min(until, self._not_before)
        return max(0.0, until - now) + 1e-3

    def _step(self) -> None:
        with self._lock:
            items = self._buffer.take(self.config.step_images)
        images = torch.stack([item.image for item in items])
        _, features, logits = self._front(images)
        alignment = None if self._yardstick is None else self._yardstick.alignment(features)
        if self.config.gate and self._yardstick is not None and alignment is not None:
            drift = self._yardstick.drift(alignment, len(images))
            if drift is not None and drift <= 1:
                with self._lock:
                    self._steps["skipped"] += 1
                    text = f"no step: the images look like the source (drift {drift:.2f}, at most 1)"
                    self._telemetry.record("skipped", self._front.version, text, alignment=alignment)
                return
        try:
            self._adapter(images)
        except (StepRefused, ValueError) as error:
            self._refuse(str(error))
            return
        report = self._adapter.report
        assert report is not None
        if not report.stepped:
            self._refuse(report.reason) if report.refused else self._skip(report.reason)
            return
        with self._lock:
            self._versions += 1
            version = self._versions
        self._good = _copy(self._adapter.state())
        self._show(version, self._good)
        with self._lock:
            self._steps["accepted"] += 1
            entropy = float(losses.entropy(logits).mean())
            self._telemetry.record(
                "accepted", version, f"adapted to {len(images)} images", alignment=alignment, entropy=entropy,
                loss=report.loss,
            )  # fmt: skip
            self._snapshots.append({"version": version, "time": time.time(), "alignment": alignment})
            del self._snapshots[: -self.config.history]

    def _refuse(self, why: str) -> None:
        self._adapter.set_state(self._good)
        with self._lock:
            self._steps["refused"] += 1
            self._telemetry.record("refused", self._front.version, why)

    def _skip(self, why: str) -> None:
        with self._lock:
            self._steps["skipped"] += 1
            self._telemetry.record("skipped", self._front.version, why)

    def _show(self, version: int, tensors: dict[str, Tensor]) -> None:
        """Publishes: writes the copy that nobody reads, and has it change places with the other."""
        self._back.load(version, tensors)
        with self._lock:
            self._front, self._back = self._back, self._front

    def _look(self) -> None:
        """Brings drift and series up to date."""
        if self._yardstick is not None:
            with self._lock:
                changed = [c for c in self._cameras if c.changed and len(c.features) >= FEWEST]
                parts = [(camera, camera.recent_features()) for camera in changed]
                for camera in changed:
                    camera.changed = False
            for camera, features in parts:
                drift = self._yardstick.drift(self._yardstick.alignment(features), len(features))
                with self._lock:
                    camera.drift = drift
            if parts:
                every = torch.cat([features for _, features in parts])
                every = every[torch.randperm(len(every))[:256]]
                divergences = self._yardstick.divergences(every)
                worst = divergences.argsort(descending=True)[:8].tolist()
                with self._lock:
                    self._drift["overall"] = self._yardstick.drift(float(divergences.mean()), len(every))
                    self._groups = [
                        {"group": g, "dims": self._yardstick.sizes[g], "divergence": float(divergences[g])}
                        for g in worst
                    ]
        with self._lock:
            self._telemetry.point(self._drift["overall"], self._drift["source"])

    def _require_adapting(self, what: str) -> None:
        if not self.config.adapt:
            raise ValueError(f"cannot {what}: the service was started with adapt=off")

    def _class_name(self, number: int) -> str:
        return str(number) if self.class_names is None else self.class_names[number]


def check_camera(name: object) -> None:
    if not isinstance(name, str) or not name or len(name) > LONGEST_NAME:
        raise ValueError(f"expected a camera's name of 1 to {LONGEST_NAME} characters, but got {str(name)[:50]!r}")


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
