"""What a person sees of the service: events in words, and a short series of figures over time."""

import statistics
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

EVENTS, SERIES, REQUESTS = 200, 300, 10_000  # how many of each are kept
KINDS = (
    "accepted",
    "refused",
    "rolled_back",
    "skipped",
    "paused",
    "resumed",
    "reset",
    "saved",
    "started",
    "error",
)


class Telemetry:
    """Events and series, bounded. Not thread-safe: the service holds its lock."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self.series: deque[dict[str, Any]] = deque(maxlen=SERIES)
        self._requests: deque[tuple[int, float]] = deque(maxlen=REQUESTS)  # since the last point of the series
        self._images = 0
        self._next_id = 1
        self._since = time.monotonic()

    def record(self, kind: str, version: int, text: str, **figures: float | None) -> None:
        """Notes an event. The same one again and again (skipped steps) only moves the last one's time."""
        assert kind in KINDS
        known = {name: figures.get(name) for name in ("alignment", "frechet", "entropy", "loss")}
        event = {"id": self._next_id, "time": time.time(), "kind": kind, "version": version, "text": text, **known}
        if kind in ("skipped", "saved") and self.events and self.events[-1]["kind"] == kind:
            self.events.pop()
        self.events.append(event)
        self._next_id += 1

    def restore(self, events: Iterable[dict[str, Any]]) -> None:
        """Events of an earlier life of the service."""
        for event in events:
            self.events.append(dict(event))
        self._next_id = max((int(event["id"]) for event in self.events), default=0) + 1

    def observe(self, images: int, seconds: float) -> None:
        self._requests.append((images, seconds))
        self._images += images

    def point(self, drift: float | None, source_drift: float | None) -> None:
        """Closes a stretch of time."""
        now = time.monotonic()
        times = sorted(1000 * seconds for _, seconds in self._requests)
        rate = self._images / max(now - self._since, 1e-3)
        self.series.append(
            {
                "time": time.time(),
                "drift": drift,
                "source_drift": source_drift,
                "images_per_second": rate,
                "latency_p50_ms": statistics.median(times) if times else None,
                "latency_p95_ms": times[min(len(times) - 1, int(0.95 * len(times)))] if times else None,
            }
        )
        self._requests.clear()
        self._images = 0
        self._since = now
