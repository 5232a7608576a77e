"""What source values know of their images: how they were read, what the classes are called, and the range of values.

Images that were read in another way make wrong features without any error: so what is known is kept with every source
value, compared where both sides are known, and looked for in the images themselves where they are not.
docs/drift.md has the figures behind the limits.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cafe_tta.models import Preprocessing
from cafe_tta.normalisation import batchnorm_layers, is_trained

IMAGES_PER_DIM = 8  # of the widest group: fewer source images make covariances of noise
OUTSIDE = 0.5  # share of the source's range of values by which images may leave it
TINY = 0.02  # share of the source's range that the values of images fill at least
ENOUGH_IMAGES = 16  # of a stream are looked at
LARGEST_DIVERGENCE = 1.0  # of what the first BatchNorm layer receives from what it received in training
WATCHED_BATCHES = 16  # of source images
_KEY = "images"  # of the metadata of source values


class SourceWarning(UserWarning):
    """Source images, statistics and test images do not fit together: what was read differently, or is too little.

    >>> import warnings
    >>> warnings.simplefilter("error", SourceWarning)  # stop instead
    >>> warnings.simplefilter("default", SourceWarning)
    """


@dataclass(frozen=True)
class ImageRecord:
    """What is known of the images that a source value was made of; None is unknown.

    >>> record = ImageRecord(Preprocessing(32, (0.5,) * 3, (0.5,) * 3), ("cat", "dog"))
    >>> record.describe()
    '32 px, mean 0.5,0.5,0.5, std 0.5,0.5,0.5'
    >>> ImageRecord.of(record.into({})) == record
    True
    """

    preprocessing: Preprocessing | None = None
    classes: tuple[str, ...] | None = None
    shape: tuple[int, ...] | None = None  # of one image, as the classifier received it, where all have the same
    low: float | None = None  # the smallest and the largest value of all pixels
    high: float | None = None

    @staticmethod
    def of(meta: Mapping[str, Any]) -> "ImageRecord":
        """The record in the metadata of a source value; an empty one where there is none."""
        known = dict(meta.get(_KEY) or {})
        if "preprocessing" in known:
            known["preprocessing"] = Preprocessing(**known["preprocessing"])
        known |= {name: tuple(known[name]) for name in ("classes", "shape") if name in known}
        return ImageRecord(**known)

    def into(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Metadata with this record in it, as JSON can hold it."""
        known: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        if self.preprocessing is not None:
            known["preprocessing"] = self.preprocessing.record()
        known |= {name: list(known[name]) for name in ("classes", "shape") if name in known}
        return {**meta, **({_KEY: known} if known else {})}

    def seen(self, images: Tensor) -> "ImageRecord":
        """With a first batch of images, or one more, in shape and range."""
        if not images.numel():
            return self
        low, high = (float(value) for value in images.detach().aminmax())
        own = ImageRecord(shape=tuple(images.shape[1:]), low=low, high=high)
        return self.merge(own) if self.low is not None else replace(self, shape=own.shape, low=low, high=high)

    def merge(self, other: "ImageRecord") -> "ImageRecord":
        """Of the images of both. Images that were read differently are refused."""
        if difference := self.difference(other):
            raise ValueError(f"the images were read differently: {difference}")
        known = [record for record in (self, other) if record.low is not None and record.high is not None]
        return ImageRecord(
            self.preprocessing or other.preprocessing,
            self.classes or other.classes,
            self.shape if len(known) < 2 or self.shape == other.shape else None,
            min((record.low for record in known if record.low is not None), default=None),
            max((record.high for record in known if record.high is not None), default=None),
        )

    def difference(self, other: "ImageRecord", there: str = "there", here: str = "here") -> str:
        """How the preprocessing or the classes differ, in words; empty where they do not, or are unknown."""
        ours, theirs = self.preprocessing, other.preprocessing
        if ours is not None and theirs is not None and ours != theirs:
            return f"{ours.describe()} {there}, {theirs.describe()} {here}"
        if self.classes and other.classes and self.classes != other.classes:
            pairs = enumerate(zip(self.classes, other.classes, strict=False))
            counts = f"{len(self.classes)} classes {there}, {len(other.classes)} {here}"
            named = (f"class {i} is {a!r} {there}, {b!r} {here}" for i, (a, b) in pairs if a != b)
            return next(named, counts)
        return ""

    def describe(self) -> str:
        """How the images were read, in words; empty where it is not known."""
        return "" if self.preprocessing is None else self.preprocessing.describe()

    @property
    def limits(self) -> tuple[float, float] | None:
        """The range in which values of images that were read in the same way lie: by preprocessing, or as seen."""
        if self.low is None or self.high is None:
            return None
        if self.preprocessing is None:
            return self.low, self.high
        return min(self.low, self.preprocessing.low), max(self.high, self.preprocessing.high)


class HasRecord(Protocol):
    """A source value, of which only the record is needed."""

    @property
    def images(self) -> ImageRecord: ...


def agreed_record(values: Mapping[str, HasRecord], given: Mapping[str, Any]) -> ImageRecord:
    """What several source values, by the names of their files, say of their images.

    `given` are settings that a user asked for: `size`, `mean` and `std`, None where they were not given. Values that
    disagree with each other or with these are refused.
    """
    agreed, owner = ImageRecord(), ""
    for name, value in values.items():
        record = replace(value.images, shape=None, low=None, high=None)
        if difference := agreed.difference(record, f"in {owner}", f"in {name}"):
            raise ValueError(f"the source values do not fit together, their images were read differently: {difference}")
        owner = owner or (name if record.preprocessing is not None else "")
        agreed = agreed.merge(record)
    if agreed.preprocessing is not None:
        own = agreed.preprocessing
        asked = {field: value for field, value in given.items() if value is not None and value != getattr(own, field)}
        if asked:
            settings: dict[str, Any] = {"size": own.size, "mean": own.mean, "std": own.std, **asked}
            Preprocessing(**settings)  # refuses what makes no sense at all
            shown = ", ".join(f"{field} {_words(value)}" for field, value in asked.items())
            raise ValueError(
                f"{owner} was made of images at {own.describe()}, but {shown} was asked for; leave it out, and the "
                "images are read as those were, or make the source values again"
            )
    return agreed


def _words(value: Any) -> str:
    return ",".join(f"{part:g}" for part in value) if isinstance(value, tuple) else str(value)


# Images that cannot have been read as they should


def few_images(count: int, widest: int) -> str:
    """What is wrong with statistics of few images; empty where there are enough for the widest group of features."""
    if count >= IMAGES_PER_DIM * widest:
        return ""
    return (
        f"the statistics are of {count} images, but the widest group has {widest} features, and its covariance is "
        f"noisy; make them of at least {IMAGES_PER_DIM * widest} images"
    )


class ImageCheck:
    """Looks at the first images of a stream: can they have been read as the source images were?

    >>> check = ImageCheck(ImageRecord(shape=(3, 8, 8), low=-2.1, high=2.6))
    >>> check.look(torch.linspace(0, 255, 16 * 192).view(16, 3, 8, 8))[:30]
    'the images have values from 0 '
    >>> check.look(torch.zeros(16, 3, 8, 8))  # it has seen enough
    ''
    """

    def __init__(self, record: ImageRecord) -> None:
        self.record, self.limits = record, record.limits
        self._first, self._count = ImageRecord(), 0

    @property
    def done(self) -> bool:
        return self.limits is None or self._count >= ENOUGH_IMAGES

    def look(self, images: Tensor) -> str:
        """What is wrong with the images, in words; empty where nothing is, or enough were seen."""
        if self.done or not images.numel():
            return ""
        self._first = self._first.seen(images)
        self._count += len(images)
        if text := self._wrong(tuple(images.shape[1:])):
            self._count = ENOUGH_IMAGES  # once is enough
        return text

    def _wrong(self, shape: tuple[int, ...]) -> str:
        known, limits = self.record.shape, self.limits
        low, high = self._first.low, self._first.high
        if known is not None and known != shape:
            ours, theirs = ("×".join(map(str, size)) for size in (shape, known))
            return f"the images are {ours}, but the source images were {theirs}; read them at the same size"
        assert limits is not None and low is not None and high is not None
        ranges = f"the images have values from {low:.3g} to {high:.3g}, the source images from "
        ranges += f"{limits[0]:.3g} to {limits[1]:.3g}"
        width = max(limits[1] - limits[0], 1e-6)
        if max(limits[0] - low, high - limits[1]) > OUTSIDE * width:
            return (
                f"{ranges}: the ones or the others were not normalised, not divided by 255, or normalised twice; read "
                "both as the model was trained"
            )
        enough = self._count >= ENOUGH_IMAGES
        if enough and 0 < high - low < TINY * width:
            return f"{ranges}: they look normalised, or divided by 255, and the source images were not"
        plain = -0.01 <= low <= 0.02 and 0.98 <= high <= 1.01
        if enough and plain and not (limits[0] >= -0.25 and limits[1] <= 1.25):
            return f"{ranges}: they look like images divided by 255 that were not normalised"
        return ""


class TrainingCheck:
    """Looks at the first batches of source images: does the classifier receive what it was trained on?

    BatchNorm's running statistics say what the first such layer received in training. The symmetrised KL divergence
    of each channel's Gaussian, ½[KL(t‖s) + KL(s‖t)] = ¼[r + 1/r - 2 + δ²(1 + 1/r)] with r the ratio of the variances
    and δ the shift in standard deviations, is averaged over the channels.
    """

    def __init__(self, classifier: nn.Module) -> None:
        layers = [layer for layer in batchnorm_layers(classifier) if is_trained(layer)]
        self.layer: Any = layers[0] if layers else None
        self.batches, self._count, self._listens = 0, 0, True
        self._sums: Tensor | None = None  # (2, C): of values and squares

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Listens to the layer inside the block."""
        handle = None if self.layer is None else self.layer.register_forward_pre_hook(self._receive)
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Does not listen inside the block: another pass over the same images."""
        self._listens = False
        try:
            yield
        finally:
            self._listens = True

    def _receive(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._listens and self.batches < WATCHED_BATCHES and args and isinstance(args[0], Tensor):
            values = args[0].detach().transpose(0, 1).flatten(1).double()  # (C, n)
            sums = torch.stack([values.sum(1), values.square().sum(1)]).cpu()
            self._sums = sums if self._sums is None else self._sums + sums
            self._count += values.shape[1]
            self.batches += 1

    def divergence(self) -> float | None:
        """The mean divergence of the channels that vary; None where there is nothing to compare."""
        if (
            self.layer is None
            or self._sums is None
            or self.layer.running_mean is None
            or self.layer.running_var is None
        ):
            return None
        trained_mean, trained_var = self.layer.running_mean.double().cpu(), self.layer.running_var.double().cpu()
        mean, square = self._sums / self._count
        live = trained_var > 1e-5 * trained_var.max()
        ratio = ((square - mean.square()).clamp(min=1e-12) / trained_var)[live]
        shift = ((mean - trained_mean).square() / trained_var)[live]
        return float((ratio + 1 / ratio - 2 + shift * (1 + 1 / ratio)).mean() / 4)

    def wrong(self) -> str:
        """What is wrong with the images, in words; empty where nothing is, or it cannot be said."""
        divergence = self.divergence()
        if divergence is None or not divergence > LARGEST_DIVERGENCE:
            return ""
        shown = f"{divergence:.2g}" if math.isfinite(divergence) else "infinite"
        return (
            f"the first BatchNorm layer receives other values from the source images than in training (divergence "
            f"{shown}, expected at most {LARGEST_DIVERGENCE:g}); are they normalised as in training?"
        )
