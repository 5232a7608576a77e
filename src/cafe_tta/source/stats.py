"""The source's feature statistics: mean and covariance (Eq. 1), computed in one streaming pass, then grouped."""

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from cafe_tta import storage
from cafe_tta.classifier import (
    SplitClassifier,
    describe_difference,
    evaluating,
    reading,
    require_classifier,
    require_match,
)
from cafe_tta.models import Preprocessing
from cafe_tta.source import modes
from cafe_tta.source.groups import dead_dims, default_num_groups, group_features
from cafe_tta.source.images import ImageRecord, SourceWarning, TrainingCheck, few_images
from cafe_tta.source.modes import BatchMode
from cafe_tta.source.reference import Reference, calibrate, describe_degenerate
from cafe_tta.source.value import Content, MadeOfImages, SourceValue, images_of, require_batches
from cafe_tta.styles import SMALLEST_SIDE, StyleStats, describe

FORMAT_VERSION = 1
BLOCK = 256  # columns of the covariance that are accumulated together
SAMPLE = 2048  # feature vectors in the reservoir sample: as much memory as the covariance of 2048 features
CHUNK = 2**20  # random keys that are skipped together


@dataclass(frozen=True, repr=False)
class FeatureStats(MadeOfImages):
    """Mean and covariance of the features of a data set, exact and mergeable. They stay at the training site.

    >>> a = FeatureStats.from_features(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    >>> a.mean.tolist(), a.cov.tolist(), a.count
    ([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]], 2)
    """

    mean: Tensor  # (D,) float64
    cov: Tensor  # (D, D) float64, divided by N as in Eq. 1
    count: int
    meta: Mapping[str, Any] = field(default_factory=dict)  # whose features: layer, hash of the weights; which images
    sample: Tensor | None = None  # (n, D) reservoir sample of the features: stays at the training site too
    keys: Tensor | None = None  # (n,) random keys of the sample, ascending: the n smallest of the whole data set
    styles: "FeatureStats | None" = None  # of the images' style descriptors, with the same sample: see `styles`
    batch_mode: Tensor | None = None  # (n, D) features of the first images, normalised with their batch: see `modes`

    def __post_init__(self) -> None:
        _check_moments(self.mean, self.cov)
        if self.count < 1:
            raise ValueError(f"expected `count` to be at least 1, but got {self.count}")
        object.__setattr__(self, "mean", self.mean.detach().double())
        object.__setattr__(self, "cov", self.cov.detach().double())

    @staticmethod
    def from_features(features: Tensor, meta: Mapping[str, Any] | None = None) -> "FeatureStats":
        """Mean and covariance of features that are already in memory."""
        sums = FeatureSums()
        sums.add(features)
        if sums.count == 0:
            raise ValueError("expected at least one feature vector, but got none")
        return _from_sums(sums, meta or {})

    @staticmethod
    def fit(
        classifier: SplitClassifier,
        loader: Iterable[Any],
        preprocessing: Preprocessing | None = None,
        classes: Sequence[str] | None = None,
        key: str | None = None,
    ) -> "FeatureStats":
        """One streaming pass over source images, in evaluation mode.

        Batches are tensors, tuples that begin with one, or dictionaries that have one under `key` (or, without it,
        under `image`, `images`, `pixel_values` or `img`). Memory is O(D²), however many images there are, and the
        classifier is left as it was. `preprocessing`, of the images that the loader gives, and the names of the
        `classes` are kept with the statistics: commands then read test images in the same way.
        """
        stats = FeatureStats.fit_part(classifier, loader, 0, preprocessing, classes, key)
        if stats is None:
            raise ValueError("expected at least one source image, but the loader was empty")
        return stats

    @staticmethod
    def fit_part(
        classifier: SplitClassifier,
        loader: Iterable[Any],
        start: int = 0,
        preprocessing: Preprocessing | None = None,
        classes: Sequence[str] | None = None,
        key: str | None = None,
    ) -> "FeatureStats | None":
        """Like `fit`, for the part of the source images that begins at image `start`; None if the part is empty.

        Merged parts have the same reservoir sample as the whole.
        """
        require_classifier(classifier)
        require_batches(loader)
        sums, styles = FeatureSums(start), FeatureSums(start)
        weights = next(classifier.parameters())
        record = ImageRecord(preprocessing, None if classes is None else tuple(classes))
        check, batch_mode = TrainingCheck(classifier), BatchMode(classifier)
        with torch.no_grad(), evaluating(classifier), check.watching():
            for number, batch in enumerate(loader):
                images = images_of(batch, key).to(weights)
                record = record.seen(images)
                with reading(images):
                    features = classifier.backbone(images)  # (B, D)
                if not torch.isfinite(features).all():
                    raise ValueError(
                        f"batch {number} of the source images gives features that are NaN or infinite; "
                        "look for damaged images or weights"
                    )
                sums.add(features)
                with check.resting():
                    batch_mode.add(images)
                if images.dim() == 4 and min(images.shape[2:]) >= SMALLEST_SIDE:
                    styles.add(describe(images))
        if not sums.count:
            return None
        if wrong := check.wrong():
            warnings.warn(wrong, SourceWarning, stacklevel=3)
        own = _from_sums(styles, {}) if styles.count == sums.count else None
        stats = _from_sums(sums, record.into(classifier.identity()))
        return replace(stats, styles=own, batch_mode=batch_mode.features)

    @staticmethod
    def merge(first: "FeatureStats", *others: "FeatureStats") -> "FeatureStats":
        """Statistics of the data sets taken together: exact, so that shards may be computed on many machines."""
        merged = first
        for other in others:
            if other.mean.shape != merged.mean.shape:
                raise ValueError(f"expected shards of {len(merged.mean)} features, but got one of {len(other.mean)}")
            if difference := describe_difference(merged.meta, other.meta):
                raise ValueError(f"the shards do not belong to the same classifier: {difference}")
            meta = merged.images.merge(other.images).into(merged.meta)
            count = merged.count + other.count
            share = other.count / count
            delta = other.mean - merged.mean  # (D,)
            cov = (1 - share) * merged.cov + share * other.cov + share * (1 - share) * torch.outer(delta, delta)
            sample, keys = _join_samples(merged, other)
            styles = None
            if merged.styles is not None and other.styles is not None:
                styles = FeatureStats.merge(merged.styles, other.styles)
            batch_mode = modes.joined(merged.batch_mode, other.batch_mode)
            merged = FeatureStats(merged.mean + share * delta, cov, count, meta, sample, keys, styles, batch_mode)
        return merged

    def group(
        self, num_groups: int | None = None, seed: int = 0, max_group_size: int | None = 128, keep_full: bool = False
    ) -> "SourceStats":
        """Groups correlated dimensions (spectral clustering) and keeps only the groups' own blocks of the covariance.

        `num_groups` is the paper's 128 by default, fewer where there are fewer than 2048 features that vary.
        A group wider than `max_group_size` is split by further clustering, because a batch must hold more images than a
        group has dimensions; the default is half of the paper's batch of 256, None is no limit, as in the paper.
        Dead dimensions, which hardly vary, are left out of every group.
        `keep_full` also stores the whole covariance, which the Fréchet distance needs.
        """
        dead = int(dead_dims(self.cov).sum())
        if num_groups is None:
            num_groups = default_num_groups(len(self.mean) - dead)
        groups = group_features(self.cov, num_groups, seed=seed, max_group_size=max_group_size)
        if few := few_images(self.count, max(map(len, groups))):
            warnings.warn(few, SourceWarning, stacklevel=2)
        meta = {
            **self.meta,
            "count": self.count,
            "num_groups": num_groups,
            "seed": seed,
            "max_group_size": max_group_size,
            "dead_dims": dead,
        }
        covs = tuple(self.cov[dims][:, dims] for dims in groups)
        styles = None if self.styles is None else StyleStats(self.styles.mean, self.styles.cov)
        source = SourceStats(self.mean, groups, covs, meta, self.cov if keep_full else None, styles)
        if self.sample is None:
            return source
        source = replace(source, meta=meta | {"alignment": calibrate(self.sample, source)})
        if wrong := describe_degenerate(source.meta["alignment"], [len(dims) for dims in groups]):
            warnings.warn(wrong, SourceWarning, stacklevel=2)
        reference = Reference(source)
        if self.batch_mode is None or not reference.calibrated:
            return source
        found = modes.disagreement(self.batch_mode, reference)
        if wrong := modes.describe(found):
            warnings.warn(wrong, SourceWarning, stacklevel=2)
        return replace(source, meta={**source.meta, "batch_mode": found})

    def check_belongs_to(self, classifier: SplitClassifier) -> None:
        """Raises where the features are another classifier's, and says what differs."""
        require_match("feature statistics", len(self.mean), self.meta, classifier)

    def facts(self) -> Mapping[str, Any]:
        return {"features": len(self.mean), "images": self.count, **super().facts()}

    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes the statistics to a safetensors file and returns its size in bytes."""
        meta = {**self.meta, "count": self.count}
        return storage.write(path, "feature-stats", FORMAT_VERSION, self.tensors(), meta)

    def tensors(self) -> dict[str, Tensor]:
        """What a file of the statistics holds."""
        own = {"mean": self.mean, "cov": self.cov, "sample": self.sample, "keys": self.keys}
        own |= {"batch_mode": self.batch_mode}
        styles = {} if self.styles is None else self.styles.tensors()
        own |= {f"styles.{name}": tensor for name, tensor in styles.items()}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "FeatureStats":
        """Statistics from a file that `save` made; a shard without images is refused."""
        tensors, meta = storage.read(path, "feature-stats", FORMAT_VERSION)
        if not meta["count"]:
            raise ValueError(
                f"{path} is a shard without images; merge it with the others (cafe_tta.source.shards.merge_files)"
            )
        return FeatureStats.from_file(tensors, meta)

    @staticmethod
    def from_file(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> "FeatureStats":
        """The statistics from the tensors and metadata of a file."""
        own = {name: value for name, value in meta.items() if name != "count"}
        sample, keys = tensors.get("sample"), tensors.get("keys")
        start = "styles."
        part = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        styles = FeatureStats.from_file(part, {"count": meta["count"]}) if part else None
        moments, batch_mode = (tensors["mean"], tensors["cov"]), tensors.get("batch_mode")
        return FeatureStats(*moments, meta["count"], own, sample, keys, styles, batch_mode)


@dataclass(frozen=True, repr=False)
class SourceStats(SourceValue):
    """Mean, groups and the groups' covariances of the source features: the only thing that leaves the training site.

    >>> features = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    >>> source = FeatureStats.from_features(features).group(num_groups=2)
    >>> len(source.groups), sum(map(len, source.groups))
    (2, 4)
    """

    kind = "stats"
    file_kind = "source-stats"
    how_to_make = "make them with FeatureStats.fit(classifier, source_loader).group() or `cafe-tta stats`"

    mean: Tensor  # (D,)
    groups: Sequence[Tensor]  # K index tensors, (d,) each
    covs: Sequence[Tensor]  # K blocks, (d, d) each
    meta: Mapping[str, Any] = field(default_factory=dict)
    full_cov: Tensor | None = None  # (D, D), only when asked for
    styles: StyleStats | None = None  # of the source images; files made before version 0.2 have none

    @classmethod
    def fit(
        cls,
        classifier: SplitClassifier,
        loader: Iterable[Any],
        num_groups: int | None = None,
        seed: int = 0,
        max_group_size: int | None = 128,
        keep_full: bool = False,
        preprocessing: Preprocessing | None = None,
    ) -> Self:
        """`FeatureStats.fit` and `FeatureStats.group` in one call."""
        stats = FeatureStats.fit(classifier, loader, preprocessing)
        return stats.group(num_groups, seed, max_group_size, keep_full)  # type: ignore[return-value]

    def __post_init__(self) -> None:
        if self.mean.dim() != 1 or not torch.isfinite(self.mean).all():
            raise ValueError(f"expected a finite mean of shape (D,), but got shape {tuple(self.mean.shape)}")
        if len(self.groups) != len(self.covs) or not len(self.groups):
            raise ValueError(
                f"expected one covariance a group, but got {len(self.groups)} groups, {len(self.covs)} covs"
            )
        groups = tuple(torch.as_tensor(dims, dtype=torch.long) for dims in self.groups)
        every = torch.cat(groups)
        if len(every.unique()) != len(every) or every.min() < 0 or every.max() >= len(self.mean):
            raise ValueError(f"expected every dimension of 0..{len(self.mean) - 1} in at most one group")
        for number, (dims, cov) in enumerate(zip(groups, self.covs, strict=True)):
            if cov.shape != (len(dims), len(dims)) or not torch.isfinite(cov).all():
                raise ValueError(
                    f"expected a finite covariance of shape {(len(dims),) * 2} for group {number}, "
                    f"but got shape {tuple(cov.shape)}"
                )
        if self.full_cov is not None:
            _check_moments(self.mean, self.full_cov)
        object.__setattr__(self, "mean", self.mean.detach())
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "covs", tuple(cov.detach() for cov in self.covs))
        object.__setattr__(self, "meta", dict(self.meta or {}))

    @property
    def widest_group(self) -> int:
        return max(len(dims) for dims in self.groups)

    def dimwise(self) -> "SourceStats":
        """The same statistics with every live dimension as a group of its own: no correlations."""
        pairs = sorted(
            (int(dim), cov[i, i])
            for dims, cov in zip(self.groups, self.covs, strict=True)
            for i, dim in enumerate(dims)
        )
        groups = tuple(torch.tensor([dim]) for dim, _ in pairs)
        return replace(self, groups=groups, covs=tuple(variance.reshape(1, 1) for _, variance in pairs))

    def check_belongs_to(self, classifier: SplitClassifier) -> None:
        """Raises where the features are another classifier's, and says what differs."""
        require_match("source statistics", len(self.mean), self.meta, classifier)

    def num_bytes(self) -> int:
        """The memory that its tensors take."""
        return sum(t.numel() * t.element_size() for t in self._tensors().values())

    def facts(self) -> Mapping[str, Any]:
        groups = f"{len(self.groups)}, the widest of {self.widest_group}"
        own = {"features": len(self.mean), "groups": groups, "images": self.meta.get("count"), **super().facts()}
        own |= {"full covariance": self.full_cov is not None or None, "styles": self.styles is not None or None}
        return own | {"size": f"{self.num_bytes() / 1e6:.1f} MB"}

    def content(self) -> Content:
        return self._tensors(), self.meta

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Statistics from a file that `save` made, with a warning where they are of too few images."""
        source = super().load(path)
        if few := few_images(source.meta.get("count", math.inf), source.widest_group):
            warnings.warn(f"{path}: {few}", SourceWarning, stacklevel=2)
        return source

    @classmethod
    def from_content(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        groups = tensors["dims"].split(tensors["sizes"].tolist())
        blocks = tensors["covs"].split([len(dims) ** 2 for dims in groups])
        covs = tuple(block.reshape(len(dims), len(dims)) for dims, block in zip(groups, blocks, strict=True))
        styles = None
        if "styles.mean" in tensors:
            styles = StyleStats(tensors["styles.mean"], tensors["styles.cov"])
        return cls(tensors["mean"], groups, covs, meta, tensors.get("full_cov"), styles)

    def _tensors(self) -> dict[str, Tensor]:
        # One long vector for all the groups: hundreds of named tensors would cost more in names than in numbers.
        tensors = {
            "mean": self.mean,
            "sizes": torch.tensor([len(dims) for dims in self.groups]),
            "dims": torch.cat(list(self.groups)),
            "covs": torch.cat([cov.reshape(-1) for cov in self.covs]),
        }
        if self.full_cov is not None:
            tensors["full_cov"] = self.full_cov
        if self.styles is not None:
            tensors |= {"styles.mean": self.styles.mean, "styles.cov": self.styles.cov}
        return tensors


def _check_moments(mean: Tensor, cov: Tensor) -> None:
    if mean.dim() != 1 or cov.shape != (len(mean), len(mean)):
        raise ValueError(f"expected shapes (D,) and (D, D), but got {tuple(mean.shape)} and {tuple(cov.shape)}")
    if not (torch.isfinite(mean).all() and torch.isfinite(cov).all()):
        raise ValueError("expected a finite mean and covariance, but got NaN or infinite values")


def _from_sums(sums: "FeatureSums", meta: Mapping[str, Any]) -> FeatureStats:
    mean, cov = sums.mean_and_cov()
    return FeatureStats(mean, cov, sums.count, meta, sums.sample, sums.keys)


def _join_samples(a: FeatureStats, b: FeatureStats) -> tuple[Tensor | None, Tensor | None]:
    """The sample of both together, with its keys. Without keys, each part is represented in proportion to its size."""
    if a.sample is None or b.sample is None:
        return None, None
    if a.keys is not None and b.keys is not None:
        return _smallest(torch.cat([a.sample, b.sample]), torch.cat([a.keys, b.keys]))
    size = min(SAMPLE, len(a.sample) + len(b.sample))
    of_b = min(len(b.sample), max(size - len(a.sample), round(size * b.count / (a.count + b.count))))
    return torch.cat([a.sample[: size - of_b], b.sample[:of_b]]), None


class FeatureSums:
    """Running sums n, Σ(z-a), Σ(z-a)(z-a)ᵀ in float64. The shift a, the first batch's mean, avoids cancellation.

    Also draws a mergeable reservoir sample: every feature vector of the whole data set has a random key, and those with
    the smallest keys are the sample. `start` is the index of the first vector, where this is a part of the data set.
    """

    def __init__(self, start: int = 0) -> None:
        self.count = 0
        self._generator = torch.Generator().manual_seed(0)
        for skipped in range(0, start, CHUNK):
            torch.rand(min(CHUNK, start - skipped), generator=self._generator)
        self.sample = torch.zeros(0)
        self.keys = torch.zeros(0)  # of the sample, in ascending order

    def add(self, features: Tensor) -> None:
        if features.dim() != 2:
            raise ValueError(f"expected features of shape (batch, D), but got {tuple(features.shape)}")
        if not len(features):
            return
        values = features.detach().to("cpu", torch.float64)
        if self.count == 0:
            self.shift = values.mean(0)  # (D,)
            self.sum = torch.zeros_like(self.shift)
            self.outer = torch.zeros(values.shape[1], values.shape[1], dtype=torch.float64)
        self._draw(features)
        values = values - self.shift
        self.count += len(values)
        self.sum += values.sum(0)
        for start in range(0, len(self.sum), BLOCK):  # the lower triangle is enough: half of the work
            rows = slice(start, start + BLOCK)
            self.outer[rows, : start + BLOCK].addmm_(values[:, rows].T, values[:, : start + BLOCK])

    def mean_and_cov(self) -> tuple[Tensor, Tensor]:
        """Mean (D,) and covariance (D, D), divided by n, of what was added."""
        offset = self.sum / self.count
        cov = torch.empty_like(self.outer)
        for start in range(0, len(cov), BLOCK):
            rows, before = slice(start, start + BLOCK), slice(start)
            square = self.outer[rows, rows].tril()
            cov[rows, rows] = square + square.tril(-1).T
            cov[rows, before] = self.outer[rows, before]
            cov[before, rows] = self.outer[rows, before].T
        cov.div_(self.count).addr_(offset, offset, alpha=-1)
        cov.diagonal().clamp_(min=0)  # a constant feature may come out a rounding error below zero
        return self.shift + offset, cov

    def _draw(self, features: Tensor) -> None:
        keys = torch.rand(len(features), generator=self._generator)
        if len(self.keys) == SAMPLE:
            better = keys < self.keys.max()
            if not better.any():
                return
            features, keys = features[better.to(features.device)], keys[better]
        rows = features.detach().to("cpu", torch.float32)
        rows = torch.cat([self.sample, rows]) if len(self.sample) else rows
        self.sample, self.keys = _smallest(rows, torch.cat([self.keys, keys]))


def _smallest(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The rows with the smallest keys, at most as many as the sample holds, and their keys."""
    kept = keys.argsort(stable=True)[:SAMPLE]
    return rows[kept], keys[kept]
