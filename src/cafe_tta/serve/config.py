"""Options of the service, checked where they are made."""

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServiceConfig:
    """How the service adapts, guards itself and keeps its state."""

    name: str = "cafe-tta"  # of the model, as clients and the page see it
    adapt: bool = True  # off: the source model answers, nothing is kept
    step_images: int = 256  # images that one adaptation step takes; so many must have come since the last one
    buffer_images: int = 1024  # images that wait at most, over all cameras
    per_camera: int | None = None  # images of one camera that wait at most; None: an equal share of the buffer
    max_cameras: int = 1024  # cameras that are remembered; the one that was quiet for longest is forgotten
    held_images: int = 128  # images, never adapted to, that a snapshot is judged on
    adapt_share: float = 0.5  # of the time that adapting may take while images keep coming
    guard: bool = True  # judge every snapshot, and keep degenerate images and cameras out
    gate: bool = True  # no step while the images look like the source
    gate_margin: float = 1.5  # how far above the largest loss of source batches images still look like the source
    state: Path | None = None  # folder of snapshots with their history
    save_every: float = 60.0  # seconds
    history: int = 16  # snapshots that are kept to roll back to, in memory and on disk
    history_megabytes: float = 512.0  # memory that they may take
    seed: int = 0  # of the draws from the buffer

    def __post_init__(self) -> None:
        _require(bool(self.name.strip()), "name", "a word", self.name)
        _require(self.step_images >= 2, "step_images", "at least 2", self.step_images)
        least = self.step_images + self.held_images
        _require(
            self.buffer_images >= least,
            "buffer_images",
            f"at least `step_images` + `held_images` = {least}",
            self.buffer_images,
        )
        # A quarter of a camera's images is held back, and snapshots are judged on 16 at least.
        enough = self.per_camera is None or self.per_camera >= 64
        _require(enough, "per_camera", "at least 64, or None", self.per_camera)
        _require(self.max_cameras >= 1, "max_cameras", "at least 1", self.max_cameras)
        _require(self.held_images >= 16, "held_images", "at least 16", self.held_images)
        _require(0 < self.adapt_share <= 1, "adapt_share", "above 0 and at most 1", self.adapt_share)
        _require(0 < self.gate_margin < math.inf, "gate_margin", "above 0 and finite", self.gate_margin)
        _require(0 < self.save_every < math.inf, "save_every", "above 0 and finite", self.save_every)
        _require(self.history >= 1, "history", "at least 1", self.history)
        _require(self.history_megabytes > 0, "history_megabytes", "above 0", self.history_megabytes)


def _require(good: bool, name: str, expected: str, value: object) -> None:
    if not good:
        raise ValueError(f"expected `{name}` to be {expected}, but got {value!r}")
