"""Metrics for Prometheus. Cameras by name are few, and change slowly: clients choose how many names there are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
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
    """The metrics of one server, in a registry of its own. Those of a model have the label `model`."""

    def __init__(self, models: Callable[[], Mapping[str, "Measured"]]) -> None:
        disable_created_metrics()  # they double the number of lines and add nothing
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "cafe_tta_requests",
            "Inference requests that were answered.",
            ["model", "code"],
            registry=self.registry,
        )
        self._images = Counter("cafe_tta_images", "Images that were classified.", ["model"], registry=self.registry)
        self._request_seconds = self._histogram("request_seconds", "From the first byte of a request to its answer.")
        self._queue_seconds = self._histogram("queue_seconds", "How long the oldest request of a batch waited.")
        self._batch_seconds = self._histogram("batch_seconds", "How long the model took for a batch.")
        self._batch_images = self._histogram("batch_images", "Images of a batch.", _IMAGES)
        self.registry.register(_OfModels(models))

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float] = _BUCKETS) -> Histogram:
        return Histogram(f"cafe_tta_{name}", meaning, ["model"], buckets=buckets, registry=self.registry)

    def of(self, model: str) -> "ModelMetrics":
        """What is counted for one model; a model that replaces another of its name goes on counting."""
        return ModelMetrics(
            lambda code: self._requests.labels(model, str(code)).inc(),
            self._images.labels(model),
            self._request_seconds.labels(model),
            self._queue_seconds.labels(model),
            self._batch_seconds.labels(model),
            self._batch_images.labels(model),
        )

    def forget(self, model: str) -> None:
        """Drops the counts of a model that is no longer served."""
        for sample in next(iter(self._requests.collect())).samples:
            if sample.labels["model"] == model:
                self._requests.remove(model, sample.labels["code"])
        for metric in (
            self._images, self._request_seconds, self._queue_seconds, self._batch_seconds, self._batch_images
        ):  # fmt: skip
            metric.remove(model)

    def text(self) -> bytes:
        return generate_latest(self.registry)


@dataclass(frozen=True)
class ModelMetrics:
    """What is counted for one model."""

    answered: Callable[[int], None]  # a request, with this status
    images: Counter
    request_seconds: Histogram
    queue_seconds: Histogram
    batch_seconds: Histogram
    batch_images: Histogram


class Measured(Protocol):
    """A served model, as far as it is measured when the metrics are read."""

    @property
    def waiting(self) -> int: ...
    @property
    def named_cameras(self) -> "NamedCameras": ...
    def status(self) -> Mapping[str, Any]: ...


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


class _OfModels(Collector):
    """The figures of the services themselves, computed when they are read."""

    def __init__(self, models: Callable[[], Mapping[str, Measured]]) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        return []  # else it would be asked before it is ready

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for model, measured in self._models().items():
            for figure in _figures(measured):
                family = families.get(figure.name)
                if family is None:
                    family = families[figure.name] = figure.family()
                for values, value in figure.values:
                    family.add_metric([model, *values], value)
        yield from families.values()


@dataclass(frozen=True)
class _Figure:
    name: str
    meaning: str
    values: Sequence[tuple[Sequence[str], float]]  # values of the labels, and the figure
    labels: Sequence[str] = ()
    counted: bool = False

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if self.counted else GaugeMetricFamily
        return kind(f"cafe_tta_{self.name}", self.meaning, labels=["model", *self.labels])


def _figures(measured: Measured) -> Iterator[_Figure]:
    """The figures of one model."""
    status = measured.status()

    def one(name: str, meaning: str, value: float, counted: bool = False) -> _Figure:
        return _Figure(name, meaning, [((), float(value))], counted=counted)

    yield one("waiting_images", "Images that wait for an answer.", measured.waiting)
    steps = [((outcome,), count) for outcome, count in status["steps"].items()]
    yield _Figure("steps", "Steps of adapting, by what became of them.", steps, ["outcome"], counted=True)
    adapted = "Images that were taken for adapting; a quarter of them validates the steps."
    yield one("adapted_images", adapted, status["adapted_images"], counted=True)
    yield one("model_version", "Number of the state that answers.", status["version"])
    yield one("adapting", "1 while the model adapts.", status["state"] == "adapting")
    yield one("stalled", "1 while adapting comes to nothing.", status["stalled"] is not None)
    yield from _of_several_servers(status)
    cameras = status["cameras"]
    yield one("cameras", "Cameras that are known.", len(cameras))
    quarantined = sum(camera["quarantined"] is not None for camera in cameras)
    yield one("quarantined_cameras", "Cameras in quarantine.", quarantined)
    yield from _by_camera(measured.named_cameras.choose(cameras, status["now"]))
    if status["clusters"] is not None:
        yield one("clusters", "Clusters of images that are corrupted alike.", len(status["clusters"]))
    drift = ((name, status["drift"].get(key)) for name, key in (("adapted", "overall"), ("source", "source")))
    known = [((name,), value) for name, value in drift if value is not None]
    yield _Figure("drift", "Drift of recent images from the source images; 1 is like them.", known, ["weights"])


def _of_several_servers(status: Mapping[str, Any]) -> Iterator[_Figure]:
    """The figures of a leader; and those of a follower, which others have not."""
    yield _Figure("followers", "Servers that follow this one.", [((), len(status["followers"]))])
    taken = [((), status["follower_images"])]
    yield _Figure("follower_images", "Images to adapt to that followers sent.", taken, counted=True)
    leader = status["leader"]
    up = [] if leader is None else [((), float(leader["away"] is None))]
    yield _Figure("leader_up", "Of a follower: 1 while its leader answers.", up)
    for name, what in (("sent", "that were sent to the leader"), ("unsent", "that the leader did not get")):
        count = [] if leader is None else [((), leader[f"{name}_images"])]
        yield _Figure(f"{name}_images", f"Of a follower: images to adapt to {what}.", count, counted=True)


def _by_camera(cameras: Sequence[Mapping[str, Any]]) -> Iterator[_Figure]:
    drift = [((camera["camera"],), camera["drift"]) for camera in cameras if camera["drift"] is not None]
    yield _Figure("camera_drift", "Drift of a camera's recent images.", drift, ["camera"])
    images = [((camera["camera"],), camera["images"]) for camera in cameras]
    yield _Figure("camera_images", "Images of a camera.", images, ["camera"], counted=True)
    quarantined = [((camera["camera"],), float(camera["quarantined"] is not None)) for camera in cameras]
    yield _Figure("camera_quarantined", "1 while a camera is in quarantine.", quarantined, ["camera"])
