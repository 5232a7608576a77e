"""Watches the stream: how far each camera is from the source, and which cameras are not worth adapting to."""

import threading
from typing import Any

import torch

from cafe_tta.serve import status
from cafe_tta.serve.buffer import Buffer
from cafe_tta.serve.cameras import Cameras
from cafe_tta.serve.config import ServiceConfig
from cafe_tta.serve.yardstick import FEWEST, Yardstick


class Watch:
    """Computes outside the service's lock, and holds it only to read and to write."""

    def __init__(
        self,
        lock: threading.RLock,
        cameras: Cameras,
        buffer: Buffer,
        config: ServiceConfig,
        yardstick: Yardstick | None,
    ) -> None:
        self._lock, self._cameras, self._buffer, self._config = lock, cameras, buffer, config
        self._yardstick = yardstick
        self.groups: list[dict[str, Any]] = []  # the feature groups that are furthest from the source
        self.drift: dict[str, float | None] = {}  # of recent images: as they were answered, and for the source model
        self.forget()

    def forget(self) -> None:
        self.drift = {"overall": None, "source": None}
        self.groups = []

    def assess(self) -> None:
        """Brings what is known of each camera up to date."""
        with self._lock:
            self._cameras.trim()
            changed = [camera for camera in self._cameras if camera.changed]
            parts = []
            for camera in changed:
                camera.changed = False
                kept = (camera.features, camera.source_features)
                parts.append([torch.stack(tuple(k)) if len(k) >= FEWEST else None for k in kept])
        for camera, (ours, source) in zip(changed, parts, strict=True):
            yardstick = self._yardstick
            drift = None if yardstick is None or ours is None else yardstick.drift_of(ours)
            source_drift = None if yardstick is None or source is None else yardstick.drift_of(source)
            with self._lock:
                camera.drift = camera.drift if drift is None else drift
                camera.source_drift = camera.source_drift if source_drift is None else source_drift
                camera.quarantined = camera.suspicion(yardstick) if self._config.guard else ""
                if camera.quarantined or (self._config.gate and camera.looks_like_source):
                    self._buffer.drop(camera.name)  # what came before that was known

    def look(self) -> None:
        """Brings the figures of the whole stream up to date."""
        self.assess()
        with self._lock:
            seen = [c for c in self._cameras if len(c.features) >= FEWEST]
            ours = status.pooled([torch.stack(tuple(c.features)) for c in seen])
            source = status.pooled([torch.stack(tuple(c.source_features)) for c in seen if c.source_features])
        if self._yardstick is None or ours is None:
            return
        divergences = self._yardstick.divergences(ours)
        overall = self._yardstick.drift(float(divergences.mean()), len(ours))
        of_source = None if source is None else self._yardstick.drift_of(source)
        with self._lock:
            self.drift["overall"] = status.finite(overall)
            self.drift["source"] = self.drift["source"] if of_source is None else status.finite(of_source)
            self.groups = status.describe_groups(self._yardstick, divergences)
