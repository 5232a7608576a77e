"""The service's status as plain JSON (docs/serving.md explains the fields), and its series over time."""

import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from cafe_tta.serve.cameras import Camera, Cameras, finite

MOST_SHIFTED = 8  # feature groups that are shown
NAMED = 3  # new cameras that the reason for waiting names
SERIES, REQUESTS = 300, 10_000  # how many points, and how many requests within a point, are kept


def describe_waiting(images: int, patience: int, newcomers: Sequence[str], num_voices: int) -> str:
    """What the next step waits for, in words.

    >>> describe_waiting(234, 1, ["gate-2"], 2)
    'about 234 more images; gate-2 is new: all new cameras together count as one of 2 until they are trusted'
    """
    text = f"about {images} more image{'s' if images > 1 else ''}"
    if patience > 1:
        text += f" ({patience} times as many as usual, after steps that came to nothing)"
    if newcomers:
        more = f" and {len(newcomers) - NAMED} more" if len(newcomers) > NAMED else ""
        text += f"; {', '.join(newcomers[:NAMED])}{more} {'is' if len(newcomers) == 1 else 'are'} new: all new cameras "
        text += f"together count as one of {num_voices} until they are trusted"
    return text


def describe_cameras(
    cameras: Cameras,
    images: int,
    opted_out: set[str],
    clusters: Mapping[int, int] | None,
    contributions: Mapping[str, int],
) -> list[dict[str, Any]]:
    return [
        {
            "camera": camera.name,
            "images": camera.images,
            "drift": finite(camera.drift),
            "share": camera.images / max(1, images),
            "trusted": cameras.trusts(camera),
            "contributed": contributions.get(camera.name, 0),
            "opted_out": camera.name in opted_out,
            "last_seen": camera.last_seen,
            "quarantined": camera.quarantined or None,
            "model": "source" if camera.wants_source else "published",
            "clusters": None if clusters is None else _shares(camera.clusters, clusters),
        }
        for camera in cameras
    ]


def _shares(numbers: Sequence[int], known: Mapping[int, int]) -> list[dict[str, Any]]:
    """The clusters of recent images with their shares, the largest first; the rest was in none that there is now."""
    counts = Counter(number for number in numbers if number in known)
    return [{"cluster": number, "share": count / len(numbers)} for number, count in counts.most_common()]


def describe_clusters(clusters: Mapping[int, int] | None) -> list[dict[str, Any]] | None:
    """The clusters of the published snapshot, the largest first; None where the method does not unmix."""
    if clusters is None:
        return None
    total = max(1, sum(clusters.values()))
    return [{"cluster": number, "images": size, "share": size / total} for number, size in clusters.items()]


def describe_classes(cameras: Iterable[Camera], names: Sequence[str] | None) -> list[dict[str, Any]]:
    """Shares of the classes among recent predictions."""
    counts = Counter(predicted for camera in cameras for predicted, _ in camera.predictions)
    total = max(1, counts.total())
    return [
        {"class": str(number) if names is None else names[number], "share": count / total}
        for number, count in sorted(counts.items())
    ]


def describe_groups(divergences: Tensor | None, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The feature groups that are furthest from the source."""
    if divergences is None:
        return []
    worst = divergences.argsort(descending=True)[:MOST_SHIFTED].tolist()
    return [{"group": g, "dims": sizes[g], "divergence": finite(float(divergences[g]))} for g in worst]


class Series:
    """Drift, throughput and latency over time. Not thread-safe: the service holds its lock."""

    def __init__(self) -> None:
        self.points: deque[dict[str, Any]] = deque(maxlen=SERIES)
        self.seconds: deque[float] = deque(maxlen=REQUESTS)  # that requests took, since the last point
        self.images = 0  # since the last point
        self._since = time.monotonic()

    def point(self, drift: float | None, source_drift: float | None) -> None:
        """Adds a point for the time since the last one."""
        now = time.monotonic()
        times = sorted(1000 * seconds for seconds in self.seconds)
        self.points.append(
            {
                "time": time.time(),
                "drift": finite(drift),
                "source_drift": finite(source_drift),
                "images_per_second": self.images / max(now - self._since, 1e-3),
                "latency_p50_ms": statistics.median(times) if times else None,
                "latency_p95_ms": times[min(len(times) - 1, int(0.95 * len(times)))] if times else None,
            }
        )
        self.seconds.clear()
        self.images = 0
        self._since = now
