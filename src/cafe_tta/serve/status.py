"""What a person may want to know of the service, as plain JSON: see docs/serving.md for the fields."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from cafe_tta.serve.cameras import Camera
from cafe_tta.serve.yardstick import Yardstick

MOST_SHIFTED = 8  # feature groups that are shown
POOL = 256  # images that the drift of the whole stream is computed from


def describe_cameras(cameras: Iterable[Camera], images: int, opted_out: set[str]) -> list[dict[str, Any]]:
    return [
        {
            "camera": camera.name,
            "images": camera.images,
            "drift": finite(camera.drift),
            "share": camera.images / max(1, images),
            "opted_out": camera.name in opted_out,
            "last_seen": camera.last_seen,
            "quarantined": camera.quarantined or None,
            "model": "source" if camera.wants_source else "published",
        }
        for camera in cameras
    ]


def describe_classes(cameras: Iterable[Camera], names: Sequence[str] | None) -> list[dict[str, Any]]:
    """Shares of the classes among recent predictions."""
    counts = Counter(predicted for camera in cameras for predicted, _ in camera.predictions)
    total = max(1, counts.total())
    return [
        {"class": str(number) if names is None else names[number], "share": count / total}
        for number, count in sorted(counts.items())
    ]


def describe_groups(yardstick: Yardstick, divergences: Tensor) -> list[dict[str, Any]]:
    """The feature groups that are furthest from the source."""
    worst = divergences.argsort(descending=True)[:MOST_SHIFTED].tolist()
    return [
        {"group": g, "dims": yardstick.sizes[g], "divergence": finite(float(divergences[g]))} for g in worst
    ]  # fmt: skip


def pooled(parts: Sequence[Tensor]) -> Tensor | None:
    """Features of all cameras, as many of each."""
    if not parts:
        return None
    each = max(1, POOL // len(parts))
    return torch.cat([part[-each:] for part in parts])[:POOL]


def finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
