"""What is remembered of each camera: counts, its recent features and predictions. Bounded, whatever clients invent."""

import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

RECENT = 64  # images of a camera whose features and predictions are remembered
FEATURE_BYTES = 64 * 2**20  # that all of them may take
LONGEST_NAME = 256


@dataclass(eq=False)
class Camera:
    name: str
    images: int = 0
    adapted: int = 0
    last_seen: float = 0.0
    features: deque[Tensor] = field(default_factory=lambda: deque(maxlen=RECENT))  # (D,) each
    classes: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    changed: bool = False  # since its drift was computed
    drift: float | None = None
    quarantined: str = ""  # why nothing of it is adapted to

    def recent_features(self) -> Tensor:
        return torch.stack(tuple(self.features))


class Cameras:
    """The cameras that were heard of last. Not thread-safe: the service holds its lock."""

    def __init__(self, limit: int, num_features: int) -> None:
        self._limit = limit
        self._rows = max(RECENT, FEATURE_BYTES // (4 * num_features))  # features that are kept over all cameras
        self._cameras: OrderedDict[str, Camera] = OrderedDict()

    def __iter__(self) -> Iterator[Camera]:
        return iter(self._cameras.values())

    def __len__(self) -> int:
        return len(self._cameras)

    def get(self, name: str) -> Camera | None:
        return self._cameras.get(name)

    def touch(self, name: str) -> Camera:
        """The camera of that name, new or not, as the one that was heard of last."""
        camera = self._cameras.get(name)
        if camera is None:
            if len(self._cameras) >= self._limit:
                self._cameras.popitem(last=False)
            camera = self._cameras[name] = Camera(name)
        self._cameras.move_to_end(name)
        camera.last_seen = time.time()
        return camera

    def saw(self, camera: Camera, features: Tensor, predicted: int) -> None:
        camera.images += 1
        camera.classes.append(predicted)
        room = self._rows // len(self._cameras)
        while len(camera.features) > max(room, 1):
            camera.features.popleft()
        camera.features.append(features)
        camera.changed = True

    def clear(self) -> None:
        for camera in self:
            camera.features.clear()
            camera.classes.clear()
            camera.drift, camera.quarantined = None, ""
