"""Cameras: what is remembered of each, how far it is from the source, which model answers it, whether it is adapted to.

Bounded in every direction, whatever names clients invent.
"""

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cafe_tta.judge import PANEL
from cafe_tta.serve.buffer import NEWCOMERS, Buffer
from cafe_tta.serve.settings import Settings
from cafe_tta.source import Reference
from cafe_tta.source.reference import MIN_IMAGES

NEWCOMER = 16  # images: cameras that have sent fewer have one share of the buffer in common
# Cameras that send as many images before the second step, and among the first images of all, are of the beginning.
FOUNDING_STEPS, FOUNDING_IMAGES = 2, 1024
TRUST_STEPS = 8  # that others must have sent images before; and in as many steps no more of them are trusted than
TRUST_PART = 4  # this part of those that are trusted already, or one: whoever takes many names gains little
RECENT = 64  # images of a camera whose features are remembered
PREDICTIONS = 128  # images of a camera whose predictions are remembered
POOL = 256  # images that the drift of the whole stream is computed from
FEATURE_BYTES = 128 * 2**20  # that the features of all cameras may take
LONGEST_NAME = 256
SAME = 0.01  # dispersion of the features of a camera that repeats one image
LIKE_SOURCE = 1.25  # drift of a camera, to the source model, up to which the gate may keep it out
FAR = 2.0  # and from which the source model is expected to be the worse one for it
CLEAR_GAIN = math.log(1.25)  # by which the model that is expected to be worse for a camera must be better to answer it
FEW_IMAGES = 2 * PANEL  # a gain measured on fewer images is noisy:
GAIN_OF_FEW = math.log(1.5)  # then the published model must be better by this, wherever the camera is
MOSTLY = 0.5  # share of flat or repeated images from which the whole camera is quarantined
FLAT = 0.01  # standard deviation of a flat frame's values; that of ordinary, normalised images is about 1
SIDE = 8  # pixels of the thumbnail that says whether two images are the same
LEVELS = 4.0  # levels of the thumbnail's values per standard deviation of the image
FLAWS = {
    "flat": "flat frames",
    "outside": "values that no image has",
    "repeated": "the same images again and again",
}


@dataclass(eq=False)
class Camera:
    """One camera. `features` are of the model that answered, `source_features` of the source model, where known."""

    name: str
    images: int = 0
    adapted: int = 0
    last_seen: float = 0.0
    founder: bool = False  # was here from the beginning, or trusted in an earlier run
    steps: int = 0  # before which it sent images
    earned: bool = False  # its trust, by staying
    verified: bool = False  # by a token, with its last request
    features: deque[Tensor] = field(default_factory=lambda: deque(maxlen=RECENT))  # (D,) each
    source_features: deque[Tensor] = field(default_factory=lambda: deque(maxlen=RECENT))
    predictions: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PREDICTIONS))
    fingerprints: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    clusters: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))  # of its images; -1: in none
    flaws: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT))  # of its images: see `FLAWS`
    changed: bool = False  # since it was assessed
    fresh: bool = False  # has sent images since the last step
    drift: float | None = None
    source_drift: float | None = None  # as the source model sees its images
    looks_like_source: bool = False  # to the source model
    gain: float | None = None  # of the published model over the source model: below 0 is better (`Adaptation._gains`)
    measured_on: int = 0  # images that the gain was measured on, in all
    quarantined: str = ""  # why the model is not adapted to it

    @property
    def settled(self) -> bool:
        """Whether it has been here long enough to have a share of its own, where cameras have no tokens."""
        return self.images > NEWCOMER and (self.founder or self.earned)

    @property
    def wants_source(self) -> bool:
        """Whether the source model answers it, not the published one.

        Near the source, the published model must be clearly better; far from it, the source model must be.
        """
        if self.looks_like_source or self.gain is None:
            return self.looks_like_source
        if self.measured_on < FEW_IMAGES:
            return self.gain > -GAIN_OF_FEW
        far = self.source_drift is not None and self.source_drift >= FAR
        return self.gain > (CLEAR_GAIN if far else -CLEAR_GAIN)

    def learn_gain(self, gain: float, images: int) -> None:
        """Averages a new measurement of the gain, on so many images, with the last: few images make it noisy.

        One on very few images counts only until there is another.
        """
        if self.gain is not None and self.measured_on >= FEW_IMAGES:
            gain = (self.gain + gain) / 2
        self.gain = gain
        self.measured_on += images

    def saw(self, features: Tensor, prediction: tuple[int, float], cluster: int, of_source: bool) -> None:
        """Notes an answered image."""
        self.images += 1
        self.predictions.append(prediction)
        self.clusters.append(cluster)
        self.features.append(features)
        if of_source:
            self.source_features.append(features)
        self.changed = self.fresh = True

    def flaw(self, seen: "Screened") -> str:
        """What is wrong with an image of this camera, a key of `FLAWS`; or empty."""
        flaw = seen.flaw or ("repeated" if seen.fingerprint in self.fingerprints else "")
        self.flaws.append(flaw)
        if not flaw:
            self.fingerprints.append(seen.fingerprint)
        return flaw

    def suspicion(self, reference: Reference | None) -> str:
        """Why the model should not be adapted to its recent images; empty if it should.

        Never what they show: a camera may see one class all day.
        """
        for flaw, text in FLAWS.items():
            if len(self.flaws) >= MIN_IMAGES and self.flaws.count(flaw) > MOSTLY * len(self.flaws):
                return f"it sends {text}"
        if reference is None or len(self.features) < 2 * MIN_IMAGES:
            return ""
        return "its images hardly differ" if reference.dispersion(torch.stack(tuple(self.features))) < SAME else ""


class Cameras:
    """The cameras that sent images last, and the drift of the whole stream.

    Not thread-safe: callers hold the service's lock. Only `assess` and `look` take it themselves, to read and to write,
    and compute outside of it.
    """

    def __init__(
        self, settings: Settings, num_features: int, reference: Reference | None, buffer: Buffer, lock: threading.RLock
    ) -> None:
        self._settings, self._reference, self._buffer, self._lock = settings, reference, buffer, lock
        self._rows = max(RECENT, FEATURE_BYTES // (8 * num_features))  # of features and source features alike
        self._cameras: OrderedDict[str, Camera] = OrderedDict()
        self.steps = 0  # that were taken or refused; of earlier runs, those that were accepted
        self._founding, self._images = True, 0  # whether this is the beginning, and images since the start
        self._next_trust = 0  # step from which one more new camera may be trusted
        self._founders: frozenset[str] = frozenset()  # of an earlier run
        self.crowd = Camera(NEWCOMERS)  # all that are not trusted, as one camera
        self.divergences: Tensor | None = None  # (K,): of each feature group of recent images, as they were answered
        self.drift: dict[str, float | None] = {}  # of recent images: as they were answered, and for the source model
        self.forget()

    def __iter__(self) -> Iterator[Camera]:
        return iter(self._cameras.values())

    def __len__(self) -> int:
        return len(self._cameras)

    def get(self, name: str) -> Camera | None:
        return self._cameras.get(name)

    def touch(self, name: str) -> Camera:
        """The camera of that name, new or not, as the one that sent images last."""
        camera = self._cameras.get(name)
        if camera is None:
            if len(self._cameras) >= self._settings.max_cameras:
                self._make_room()
            camera = self._cameras[name] = Camera(name, founder=self._founding or name in self._founders)
        self._images += 1
        self._end_founding(self._images >= FOUNDING_IMAGES)
        self._cameras.move_to_end(name)
        camera.last_seen = time.time()
        return camera

    def _end_founding(self, over: bool) -> None:
        """Ends the beginning, once. A name that sent an image or two by then is no camera of the beginning."""
        if over and self._founding:
            self._founding = False
            for camera in self:
                camera.founder &= camera.images >= NEWCOMER or camera.name in self._founders

    def _make_room(self) -> None:
        """Forgets the camera that was silent longest, a trusted one only where there is no other."""
        gone = next((name for name, camera in self._cameras.items() if not self.trusts(camera)), None)
        self._cameras.pop(gone if gone is not None else next(iter(self._cameras)))

    def trusts(self, camera: Camera) -> bool:
        """Whether a camera has a share of its own; the others have one in common."""
        return camera.settled if self._settings.camera_tokens is None else camera.verified

    def trusted_names(self) -> list[str]:
        """Names that need not earn their trust again in the next run."""
        return sorted(camera.name for camera in self if camera.settled)

    def found(self, names: Iterable[str], steps: int) -> None:
        """Takes up the names that were trusted in earlier runs, and how many steps had been accepted in them."""
        self._founders = frozenset(names)
        if self._founders:  # else there is nobody whose trust the beginning could endanger
            self.steps = steps
            self._founding = steps < FOUNDING_STEPS

    def count_step(self) -> None:
        """Notes which cameras have sent images before a step."""
        self.steps += 1
        for camera in self:
            camera.steps += camera.fresh
            camera.fresh = False
        self._end_founding(self.steps >= FOUNDING_STEPS)
        self._trust_some()

    def _trust_some(self) -> None:
        """Trusts those that have stayed for longest, if it is time: a quarter as many as are trusted, or one."""
        waiting = [c for c in self if not c.settled and c.images > NEWCOMER and c.steps >= TRUST_STEPS]
        if waiting and self.steps >= self._next_trust:
            most = max(1, sum(camera.settled for camera in self) // TRUST_PART)
            for camera in sorted(waiting, key=lambda camera: (-camera.steps, -camera.images))[:most]:
                camera.earned = True
            self._next_trust = self.steps + TRUST_STEPS

    def forget(self) -> None:
        """Forgets what was seen, but not which cameras there are."""
        kept = ("name", "images", "adapted", "last_seen", "founder", "steps", "earned", "verified")
        for name, camera in self._cameras.items():
            self._cameras[name] = Camera(**{part: getattr(camera, part) for part in kept})
        self.crowd = Camera(NEWCOMERS)
        self.drift = {"overall": None, "source": None}
        self.divergences = None

    def forget_clusters(self) -> None:
        """Forgets which clusters the images fell into: every snapshot numbers its own."""
        for camera in self:
            camera.clusters.clear()

    def assess(self) -> list[Camera]:
        """Updates drift and quarantine of each camera that has sent images; those whose quarantine changed."""
        turned = []
        with self._lock:
            self._trim()
            changed = [camera for camera in (*self, self.crowd) if camera.changed]
            parts = []
            for camera in changed:
                camera.changed = False
                kept = (camera.features, camera.source_features)
                parts.append([torch.stack(tuple(k)) if len(k) >= MIN_IMAGES else None for k in kept])
        for camera, (ours, source) in zip(changed, parts, strict=True):
            drift, source_drift = self._drift(ours), self._drift(source)
            like = self._looks_like_source(source, source_drift)
            with self._lock:
                camera.drift = camera.drift if drift is None else drift
                camera.source_drift = camera.source_drift if source_drift is None else source_drift
                camera.looks_like_source = camera.looks_like_source if like is None else like
                before = camera.quarantined
                camera.quarantined = camera.suspicion(self._reference) if self._settings.judge else ""
                if bool(before) != bool(camera.quarantined):
                    turned.append(camera)
                if camera.quarantined or (self._settings.gate and camera.looks_like_source):
                    self._drop(camera)
        return turned

    def _drop(self, camera: Camera) -> None:
        """Removes images that came before it was known that they are not adapted to."""
        if camera is not self.crowd:
            self._buffer.drop(camera.name)
        elif camera.quarantined:
            self._buffer.drop_share(NEWCOMERS)

    def look(self) -> list[Camera]:
        """Updates the drift of the whole stream, after `assess`."""
        turned = self.assess()
        with self._lock:
            seen = [c for c in self if len(c.features) >= MIN_IMAGES]
            ours = _pooled([torch.stack(tuple(c.features)) for c in seen])
            source = _pooled([torch.stack(tuple(c.source_features)) for c in seen if c.source_features])
        if self._reference is None or ours is None:
            return turned
        divergences = self._reference.divergences(ours).cpu()
        overall, of_source = self._drift(ours), self._drift(source)
        with self._lock:
            self.drift["overall"] = overall
            self.drift["source"] = self.drift["source"] if of_source is None else of_source
            self.divergences = divergences
        return turned

    def _looks_like_source(self, features: Tensor | None, drift: float | None) -> bool | None:
        """Whether a camera's images, of this drift, look like the source; None where nobody can tell.

        Its mean must not have moved either: few shifted images among many clean ones pass the test of a batch.
        """
        if self._reference is None or features is None:
            return None
        return self._reference.looks_like_source(features) and (drift is None or drift <= LIKE_SOURCE)

    def _drift(self, features: Tensor | None) -> float | None:
        return None if self._reference is None or features is None else self._reference.drift(features)

    def _trim(self) -> None:
        """Forgets features where many cameras would take too much memory."""
        room = max(1, self._rows // max(1, len(self._cameras)))
        for camera in self:
            for kept in (camera.features, camera.source_features):
                while len(kept) > room:
                    kept.popleft()


def _pooled(parts: list[Tensor]) -> Tensor | None:
    """Recent features of all cameras, the same number of each."""
    if not parts:
        return None
    each = max(1, POOL // len(parts))
    return torch.cat([part[-each:] for part in parts])[:POOL]


@dataclass(frozen=True)
class Screened:
    """What the pixels of an image tell: a flaw, or none, and a number that equal images share."""

    flaw: str
    fingerprint: int


def screen(images: Tensor, limits: tuple[float, float] | None = None) -> list[Screened]:
    """Looks at each image of a batch, (B, C, H, W) or any other shape, by its pixels alone.

    `limits` is the range of ordinary values: what leaves it by more than its length was no image.
    """
    with torch.no_grad():
        batch = images.detach().float()
        values = batch.flatten(2) if batch.dim() > 2 else batch[:, None, :]  # (B, C, pixels)
        means = values.mean(-1)  # (B, C)
        variances = (values - means[..., None]).square().mean(-1)  # several times as fast as torch.var
        flat = variances.amax(1) < FLAT**2
        whole, mean = values.flatten(1), means.mean(1)
        std = (variances + (means - mean[:, None]).square()).mean(1).sqrt().clamp(min=1e-6)
        small = torch.nn.functional.adaptive_avg_pool2d(batch, SIDE).flatten(1) if batch.dim() == 4 else whole
        levels = ((small - mean[:, None]) / std[:, None] * LEVELS).round().clamp(-127, 127).to(torch.int8)
        rows = levels.cpu().numpy()
        outside = _outside(whole, limits)
    flaws = ["flat" if f else "outside" if o else "" for f, o in zip(flat.tolist(), outside, strict=True)]
    return [Screened(flaw, hash(row.tobytes())) for flaw, row in zip(flaws, rows, strict=True)]


def _outside(values: Tensor, limits: tuple[float, float] | None) -> list[bool]:
    if limits is None:
        return [False] * len(values)
    low, high = limits
    beyond: list[bool] = (~((values >= 2 * low - high) & (values <= 2 * high - low)).all(1)).tolist()  # NaN too
    return beyond


def check_name(name: object) -> None:
    if not isinstance(name, str) or not name or len(name) > LONGEST_NAME:
        raise ValueError(f"expected a camera's name of 1 to {LONGEST_NAME} characters, but got {str(name)[:50]!r}")


def finite(value: float | None) -> float | None:
    """The value, or None if it is NaN or infinite, which JSON cannot express."""
    return value if value is not None and math.isfinite(value) else None
