"""The summary of a simulation: accuracy beside the source model's, by camera and over time; latency; lost requests."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cafe_tta.simulate.play import Record
from cafe_tta.simulate.scenarios import HonestCamera
from cafe_tta.simulate.weather import Camera


@dataclass
class Tally:
    """Counts of answered images. Lost requests do not count for either model."""

    images: int = 0
    source: int = 0
    served: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, record: Record) -> None:
        self.images += record.images
        self.source += record.source
        self.served += record.served
        self.seconds.append(record.seconds)

    @property
    def source_accuracy(self) -> float | None:
        return 100 * self.source / self.images if self.images else None

    @property
    def served_accuracy(self) -> float | None:
        return 100 * self.served / self.images if self.images else None

    @property
    def gain(self) -> float | None:
        return 100 * (self.served - self.source) / self.images if self.images else None

    def percentile(self, share: float) -> float | None:
        """The latency in milliseconds within which `share` % of the requests were answered."""
        return float(np.percentile(self.seconds, share)) * 1000 if self.seconds else None

    def numbers(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "requests": len(self.seconds),
            "source_accuracy": self.source_accuracy,
            "served_accuracy": self.served_accuracy,
            "gain": self.gain,
            "latency_ms": {f"p{share}": self.percentile(share) for share in (50, 95, 99)},
        }


class Summary:
    """Tallies of all records: overall, by camera, and by block of time."""

    def __init__(self, cameras: Sequence[Camera | HonestCamera], duration: float, blocks: int) -> None:
        self.cameras, self.duration = list(cameras), duration
        self.overall = Tally()
        self.by_camera = [Tally() for _ in cameras]
        self.blocks = [Tally() for _ in range(blocks)]
        self.by_block_and_camera = [[Tally() for _ in cameras] for _ in range(blocks)]
        self.lost: Counter[str] = Counter()
        self.busy = self.broken = 0
        self.versions: set[int] = set()

    def add(self, record: Record) -> int:
        """Adds a record, and returns the index of its block of time."""
        block = min(int(record.time / self.duration * len(self.blocks)), len(self.blocks) - 1)
        if record.lost:
            self.lost[record.lost] += 1
            return block
        self.busy += record.busy
        self.broken += record.broken
        if record.version is not None:
            self.versions.add(record.version)
        cells = self.by_block_and_camera[block][record.camera], self.by_camera[record.camera]
        for tally in (self.overall, self.blocks[block], *cells):
            tally.add(record)
        return block

    def span(self, block: int) -> tuple[float, float]:
        """The beginning and the end of a block, in seconds."""
        return self.duration * block / len(self.blocks), self.duration * (block + 1) / len(self.blocks)

    def is_over(self, block: int) -> bool:
        """Whether every camera that has sent anything has sent something later; a few late answers may still come."""
        return any(tally.images for tally in self.by_block_and_camera[block + 1]) and all(
            any(later[n].images for later in self.by_block_and_camera[block + 1 :])
            for n, tally in enumerate(self.by_camera)
            if tally.images
        )

    def numbers(self, wall_seconds: float) -> dict[str, Any]:
        """All of it, for a JSON file."""
        cameras = [
            {"camera": c.name, "story": c.text, "rate": c.rate, **tally.numbers()}
            for c, tally in zip(self.cameras, self.by_camera, strict=True)
        ]
        blocks = [
            {"from": self.span(n)[0], "to": self.span(n)[1], **tally.numbers()} for n, tally in enumerate(self.blocks)
        ]
        return {
            "overall": self.overall.numbers(),
            "cameras": cameras,
            "blocks": blocks,
            "seconds": wall_seconds,
            "images_per_second": self.overall.images / wall_seconds if wall_seconds else None,
            "lost": dict(self.lost),
            "busy": self.busy,
            "broken_connections": self.broken,
            "versions": [min(self.versions), max(self.versions)] if self.versions else None,
        }
