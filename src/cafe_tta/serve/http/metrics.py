"""Metrics for Prometheus. There is no label per camera: clients choose how many there are."""

from collections.abc import Callable, Iterator, Mapping
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
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, status: Callable[[], Mapping[str, Any]], waiting: Callable[[], int]) -> None:
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
        self.registry.register(_OfService(status))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _OfService(Collector):
    """The service's own figures, computed when they are read."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # else it would be asked before it is ready

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        steps = CounterMetricFamily("cafe_tta_steps", "Steps of adapting, by what became of them.", labels=["outcome"])
        for outcome, count in status["steps"].items():
            steps.add_metric([outcome], count)
        yield steps
        yield CounterMetricFamily("cafe_tta_adapted_images", "Images adapted to.", value=status["adapted_images"])
        yield GaugeMetricFamily("cafe_tta_model_version", "Number of the state that answers.", value=status["version"])
        yield GaugeMetricFamily(
            "cafe_tta_adapting", "1 while the model adapts.", value=float(status["state"] == "adapting")
        )
        yield GaugeMetricFamily("cafe_tta_cameras", "Cameras that are known.", value=len(status["cameras"]))
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
