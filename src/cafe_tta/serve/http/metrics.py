"""Metrics for Prometheus. Cameras by name are few, and change slowly: clients choose how many names there are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
# Buckets of the latency histograms, in seconds, and of the batch sizes, in images.
_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
SILENCE = 600.0  # seconds after which a silent camera's place among the named ones goes to another
SETTLED = 64  # images from which a camera may have such a place
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, status: Callable[[], Mapping[str, Any]], waiting: Callable[[], int], named_cameras: int) -> None:
        disable_created_metrics()  # they double the number of lines and add nothing
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "cafe_tta_requests", "Inference requests that were answered.", ["code"], registry=self.registry
        )
        self.images = Counter("cafe_tta_images", "Images that were classified.", registry=self.registry)
        self.request_seconds = Histogram(
            "cafe_tta_request_seconds",
            "From the first byte of a request to its answer.",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "cafe_tta_queue_seconds",
            "How long the oldest request of a batch waited.",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.batch_seconds = Histogram(
            "cafe_tta_batch_seconds", "How long the model took for a batch.", buckets=_BUCKETS, registry=self.registry
        )
        self.batch_images = Histogram(
            "cafe_tta_batch_images", "Images of a batch.", buckets=_IMAGES, registry=self.registry
        )
        Gauge("cafe_tta_waiting_images", "Images that wait for an answer.", registry=self.registry).set_function(
            waiting
        )
        self.registry.register(_OfService(status, named_cameras))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class NamedCameras:
    """The cameras that metrics name: at most `limit`, each until it has been silent for ten minutes.

    So neither the number of time series nor how fast new ones come up depends on the names that clients invent.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: list[str] = []

    def choose(self, cameras: Sequence[Mapping[str, Any]], now: float) -> list[Mapping[str, Any]]:
        """Those of the cameras that are named now; new ones are taken by their number of images."""
        present = {camera["camera"]: camera for camera in cameras if now - camera["last_seen"] < SILENCE}
        self._names = [name for name in self._names if name in present]
        ranked = sorted(present.values(), key=lambda camera: -camera["images"])
        waiting = [camera["camera"] for camera in ranked if camera["images"] >= SETTLED]
        waiting = [name for name in waiting if name not in self._names]
        self._names += waiting[: max(0, self._limit - len(self._names))]
        return [present[name] for name in self._names]


class _OfService(Collector):
    """The service's own figures, computed when they are read."""

    def __init__(self, status: Callable[[], Mapping[str, Any]], named_cameras: int) -> None:
        self._status = status
        self._named = NamedCameras(named_cameras)

    def describe(self) -> list[Metric]:
        return []  # else it would be asked before it is ready

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        steps = CounterMetricFamily("cafe_tta_steps", "Steps of adapting, by what became of them.", labels=["outcome"])
        for outcome, count in status["steps"].items():
            steps.add_metric([outcome], count)
        yield steps
        adapted = "Images that were taken for adapting; a quarter of them validates the steps."
        yield CounterMetricFamily("cafe_tta_adapted_images", adapted, value=status["adapted_images"])
        yield GaugeMetricFamily("cafe_tta_model_version", "Number of the state that answers.", value=status["version"])
        yield GaugeMetricFamily(
            "cafe_tta_adapting", "1 while the model adapts.", value=float(status["state"] == "adapting")
        )
        stalled = float(status["stalled"] is not None)
        yield GaugeMetricFamily("cafe_tta_stalled", "1 while adapting comes to nothing.", value=stalled)
        cameras = status["cameras"]
        yield GaugeMetricFamily("cafe_tta_cameras", "Cameras that are known.", value=len(cameras))
        quarantined = sum(camera["quarantined"] is not None for camera in cameras)
        yield GaugeMetricFamily("cafe_tta_quarantined_cameras", "Cameras in quarantine.", value=quarantined)
        yield from self._by_camera(cameras, status["now"])
        if status["clusters"] is not None:
            yield GaugeMetricFamily(
                "cafe_tta_clusters", "Clusters of images that are corrupted alike.", value=len(status["clusters"])
            )
        drift = GaugeMetricFamily(
            "cafe_tta_drift", "Drift of recent images from the source images; 1 is like them.", labels=["model"]
        )
        for model, key in (("adapted", "overall"), ("source", "source")):
            if status["drift"].get(key) is not None:
                drift.add_metric([model], status["drift"][key])
        yield drift

    def _by_camera(self, cameras: Sequence[Mapping[str, Any]], now: float) -> Iterator[Metric]:
        drift = GaugeMetricFamily("cafe_tta_camera_drift", "Drift of a camera's recent images.", labels=["camera"])
        images = CounterMetricFamily("cafe_tta_camera_images", "Images of a camera.", labels=["camera"])
        quarantined = GaugeMetricFamily(
            "cafe_tta_camera_quarantined", "1 while a camera is in quarantine.", labels=["camera"]
        )
        for camera in self._named.choose(cameras, now):
            label = [camera["camera"]]
            images.add_metric(label, camera["images"])
            quarantined.add_metric(label, float(camera["quarantined"] is not None))
            if camera["drift"] is not None:
                drift.add_metric(label, camera["drift"])
        yield from (drift, images, quarantined)
