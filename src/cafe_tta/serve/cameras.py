"""What is remembered of each camera, and what follows from it: which model answers it, and whether it is adapted to.

Bounded in every direction, whatever names clients invent.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cafe_tta.serve.yardstick import FEWEST, Yardstick

RECENT = 64  # images of a camera whose features are remembered
WATCHED = 128  # images of a camera whose predictions are remembered
FEATURE_BYTES = 128 * 2**20  # that the features of all cameras may take
LONGEST_NAME = 256
NEWCOMER = 16  # images: cameras that have sent fewer share one place in the buffer
ONE_CLASS, SURE = 0.97, 0.95  # share of one class, and mean confidence, of a camera that shows a single thing
SAME = 0.01  # dispersion of the features of a camera that shows one image again and again
CLEAR_GAIN = math.log(1.25)  # a camera's alignment must fall so far, or the source model goes on answering it
MOSTLY = 0.5  # share of flat or repeated images from which the whole camera is kept out


@dataclass(eq=False)
class Camera:
    """One camera. `features` are of the model that answered, `source_features` of the source model, where known."""

    name: str
    images: int = 0
    adapted: int = 0
    last_seen: float = 0.0
    features: deque[Tensor] = field(default_factory=lambda: deque(maxlen=RECENT))  # (D,) each
    source_features: deque[Tensor] = field(default_factory=lambda: deque(maxlen=RECENT))
    predictions: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WATCHED))
    fingerprints: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    flaws: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT))  # "", "flat" or "repeated"
    changed: bool = False  # since it was assessed
    drift: float | None = None
    source_drift: float | None = None
    gain: float | None = None  # log of the published model's alignment over the source's: below 0 is better
    quarantined: str = ""  # why nothing of it is adapted to

    @property
    def looks_like_source(self) -> bool:
        return self.source_drift is not None and self.source_drift <= 1

    @property
    def wants_source(self) -> bool:
        """Whether the source model serves it at least as well as what is published."""
        return self.looks_like_source or (self.gain is not None and self.gain > -CLEAR_GAIN)

    def learn_gain(self, gain: float | None) -> None:
        """Takes in another measurement of the gain; few images make it noisy."""
        if gain is not None:
            self.gain = gain if self.gain is None else (self.gain + gain) / 2

    def flaw(self, flat: bool, fingerprint: int) -> str:
        """What is wrong with an image of this camera; empty where nothing is."""
        found = "flat" if flat else "repeated" if fingerprint in self.fingerprints else ""
        self.flaws.append(found)
        if not found:
            self.fingerprints.append(fingerprint)
        return found

    def suspicion(self, yardstick: Yardstick | None) -> str:
        """Why its recent images are not worth adapting to; empty where they are."""
        for flaw, text in (("flat", "flat frames"), ("repeated", "the same images again and again")):
            if len(self.flaws) >= FEWEST and self.flaws.count(flaw) > MOSTLY * len(self.flaws):
                return f"it sends {text}"
        if len(self.predictions) >= RECENT:
            classes = [predicted for predicted, _ in self.predictions]
            most = max(classes.count(c) for c in set(classes)) / len(classes)
            confidence = sum(sure for _, sure in self.predictions) / len(self.predictions)
            if most >= ONE_CLASS and confidence >= SURE:
                return "it shows one class for ever"
        if yardstick is None or len(self.features) < 2 * FEWEST:
            return ""
        return "its images hardly differ" if yardstick.dispersion(torch.stack(tuple(self.features))) < SAME else ""


class Cameras:
    """The cameras that were heard of last. Not thread-safe: the service holds its lock."""

    def __init__(self, limit: int, num_features: int) -> None:
        self._limit = limit
        self._rows = max(RECENT, FEATURE_BYTES // (8 * num_features))  # of features and source features alike
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

    def saw(self, camera: Camera, features: Tensor, prediction: tuple[int, float], of_source: bool) -> None:
        """Notes an answered image."""
        camera.images += 1
        camera.predictions.append(prediction)
        camera.features.append(features)
        if of_source:
            camera.source_features.append(features)
        camera.changed = True

    def trim(self) -> None:
        """Forgets features where many cameras would take too much memory."""
        room = max(1, self._rows // max(1, len(self._cameras)))
        for camera in self:
            for kept in (camera.features, camera.source_features):
                while len(kept) > room:
                    kept.popleft()

    def forget(self) -> None:
        """Forgets all that was seen, but not who is there."""
        for name, camera in self._cameras.items():
            self._cameras[name] = Camera(name, camera.images, camera.adapted, camera.last_seen)
