"""What is known of the source domain at test time: mean and covariance of its features (Eq. 1), in groups."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cafe_tta import storage
from cafe_tta.classifier import SplitClassifier, evaluating
from cafe_tta.gate import alignment_of_source
from cafe_tta.groups import dead_dims, default_num_groups, group_features
from cafe_tta.losses import EIGENVALUE_FLOOR
from cafe_tta.sums import SAMPLE, FeatureSums, smallest

FORMAT_VERSION = 1


@dataclass(frozen=True)
class FeatureStats:
    """Mean and covariance of the features of a data set, exact and mergeable. Stays at the training site.

    >>> a = FeatureStats.from_features(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    >>> a.mean.tolist(), a.cov.tolist(), a.count
    ([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]], 2)
    """

    mean: Tensor  # (D,) float64
    cov: Tensor  # (D, D) float64, divided by N as in Eq. 1
    count: int
    meta: Mapping[str, Any] = field(default_factory=dict)  # whose features: layer, hash of the weights
    sample: Tensor | None = (
        None  # (n, D) some of the features: how batches of them look; stays at the training site too
    )
    keys: Tensor | None = None  # (n,) by which the sample was drawn: the smallest of all, in ascending order

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
    def fit(classifier: SplitClassifier, loader: Iterable[Any]) -> "FeatureStats":
        """One streaming pass over source images (tensors, or tuples that begin with one), in evaluation mode.

        Memory is O(D²), however many images there are, and the classifier is left as it was.
        """
        found = FeatureStats.fit_part(classifier, loader)
        if found is None:
            raise ValueError("expected at least one source image, but the loader was empty")
        return found

    @staticmethod
    def fit_part(classifier: SplitClassifier, loader: Iterable[Any], start: int = 0) -> "FeatureStats | None":
        """As `fit`, of a part of the source images, before which `start` others come; None if there are none in it.

        The parts, merged, have the sample that the whole would have.
        """
        require_classifier(classifier)
        sums = FeatureSums(start)
        place = next(classifier.parameters())
        with torch.no_grad(), evaluating(classifier):
            for number, batch in enumerate(loader):
                images = images_of(batch).to(place)
                features = classifier.backbone(images)  # (B, D)
                if not torch.isfinite(features).all():
                    raise ValueError(
                        f"batch {number} of the source images gives features that are NaN or infinite; "
                        "look for damaged images or weights"
                    )
                sums.add(features)
        return _from_sums(sums, classifier_meta(classifier)) if sums.count else None

    @staticmethod
    def merge(first: "FeatureStats", *others: "FeatureStats") -> "FeatureStats":
        """Statistics of the data sets taken together: exact, so that shards may be computed on many machines."""
        merged = first
        for other in others:
            if other.mean.shape != merged.mean.shape:
                raise ValueError(f"expected shards of {len(merged.mean)} features, but got one of {len(other.mean)}")
            if difference := describe_difference(merged.meta, other.meta):
                raise ValueError(f"the shards do not belong to the same classifier: {difference}")
            count = merged.count + other.count
            share = other.count / count
            delta = other.mean - merged.mean  # (D,)
            cov = (1 - share) * merged.cov + share * other.cov + share * (1 - share) * torch.outer(delta, delta)
            sample, keys = _join_samples(merged, other)
            merged = FeatureStats(merged.mean + share * delta, cov, count, merged.meta, sample, keys)
        return merged

    def group(
        self, num_groups: int | None = None, seed: int = 0, max_group_size: int | None = 128, keep_full: bool = False
    ) -> "SourceStats":
        """Groups correlated dimensions (spectral clustering) and keeps only the groups' own blocks of the covariance.

        `num_groups` is the paper's 128 by default, fewer where there are fewer than 2048 features that vary.
        A group wider than `max_group_size` is split by further clustering, because a batch must hold more images than a
        group has dimensions; the default is half of the paper's batch of 256, None is no limit, as in the paper.
        Dead dimensions (no variance) have no correlation and are left out of every group.
        `keep_full` also stores the whole covariance, which the Fréchet distance needs.
        """
        dead = int(dead_dims(self.cov).sum())
        if num_groups is None:
            num_groups = default_num_groups(len(self.mean) - dead)
        groups = group_features(self.cov, num_groups, seed=seed, max_group_size=max_group_size)
        meta = {
            **self.meta,
            "count": self.count,
            "num_groups": num_groups,
            "seed": seed,
            "max_group_size": max_group_size,
            "dead_dims": dead,
        }
        covs = tuple(self.cov[dims][:, dims] for dims in groups)
        source = SourceStats(self.mean, groups, covs, meta, full_cov=self.cov if keep_full else None)
        if self.sample is None:
            return source
        return replace(source, meta=meta | {"alignment": alignment_of_source(self.sample, source, EIGENVALUE_FLOOR)})

    def check_belongs_to(self, classifier: SplitClassifier) -> None:
        """Refuses a classifier other than the one whose features these are, and says what differs."""
        check_belongs_to("feature statistics", len(self.mean), self.meta, classifier)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes the statistics to a safetensors file and returns its size in bytes."""
        meta = {**self.meta, "count": self.count}
        tensors = {"mean": self.mean, "cov": self.cov, "sample": self.sample, "keys": self.keys}
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return storage.write(path, "feature-stats", FORMAT_VERSION, present, meta)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "FeatureStats":
        tensors, meta = storage.read(path, "feature-stats", FORMAT_VERSION)
        if not meta["count"]:
            raise ValueError(
                f"{path} is a shard without images: cafe-tta stats --merge puts it together with the others"
            )
        return FeatureStats.from_file(tensors, meta)

    @staticmethod
    def from_file(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> "FeatureStats":
        """What `save` wrote, as `storage.read` gives it."""
        own = {name: value for name, value in meta.items() if name != "count"}
        sample, keys = tensors.get("sample"), tensors.get("keys")
        return FeatureStats(tensors["mean"], tensors["cov"], meta["count"], own, sample, keys)


@dataclass(frozen=True)
class SourceStats:
    """Mean, groups and the groups' covariances of the source features: the only thing that leaves the training site."""

    mean: Tensor  # (D,)
    groups: Sequence[Tensor]  # K index tensors, (d,) each
    covs: Sequence[Tensor]  # K blocks, (d, d) each
    meta: Mapping[str, Any] = field(default_factory=dict)
    full_cov: Tensor | None = None  # (D, D), only when asked for

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
        """Refuses a classifier other than the one whose features these are, and says what differs."""
        check_belongs_to("source statistics", len(self.mean), self.meta, classifier)

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors().values())

    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes the statistics to a safetensors file and returns its size in bytes."""
        return storage.write(path, "source-stats", FORMAT_VERSION, self._tensors(), dict(self.meta))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "SourceStats":
        tensors, meta = storage.read(path, "source-stats", FORMAT_VERSION)
        groups = tensors["dims"].split(tensors["sizes"].tolist())
        blocks = tensors["covs"].split([len(dims) ** 2 for dims in groups])
        covs = tuple(block.reshape(len(dims), len(dims)) for dims, block in zip(groups, blocks, strict=True))
        return SourceStats(tensors["mean"], groups, covs, meta, full_cov=tensors.get("full_cov"))

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
        return tensors


def images_of(batch: Any) -> Tensor:
    """The images of a loader's batch: the batch itself, or the first of a tuple such as (images, labels)."""
    images = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(images, Tensor):
        raise TypeError(f"expected batches of tensors or of (images, labels), but got {type(images).__name__}")
    if not images.is_floating_point():
        raise TypeError(
            f"expected floating-point images, normalised as in training, but got {images.dtype}; "
            "divide by 255 and normalise first"
        )
    return images


def classifier_meta(classifier: SplitClassifier) -> dict[str, Any]:
    """What says later whether a file belongs to a classifier."""
    return {"feature_layer": classifier.feature_layer, "weights": classifier.fingerprint()}


def check_belongs_to(what: str, num_features: int, meta: Mapping[str, Any], classifier: SplitClassifier) -> None:
    """Refuses a classifier that `meta` was not made with, and says what differs."""
    require_classifier(classifier)
    if num_features != classifier.num_features:
        raise ValueError(
            f"the {what} have {num_features} features, but the classifier's `{classifier.feature_layer}` receives "
            f"{classifier.num_features}; make them with this classifier"
        )
    if difference := describe_difference(meta, classifier_meta(classifier)) if meta.get("weights") else "":
        raise ValueError(f"the {what} do not belong to this classifier: {difference}; make them with this classifier")


def describe_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What differs between two descriptions of a classifier, in words; empty where nothing does."""
    if ours.get("feature_layer") != theirs.get("feature_layer"):
        return f"feature layer `{ours.get('feature_layer')}` there, `{theirs.get('feature_layer')}` here"
    a, b = ours.get("weights") or {}, theirs.get("weights") or {}
    names = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    if not names:
        return ""
    return f"{len(names)} of {len(a.keys() | b.keys())} tensors differ, the first is `{names[0]}`"


def require_classifier(classifier: object) -> None:
    if not isinstance(classifier, SplitClassifier):
        raise TypeError(
            f"expected a SplitClassifier, but got {type(classifier).__name__}; "
            "make one with cafe_tta.split_classifier(model)"
        )


def _check_moments(mean: Tensor, cov: Tensor) -> None:
    if mean.dim() != 1 or cov.shape != (len(mean), len(mean)):
        raise ValueError(f"expected shapes (D,) and (D, D), but got {tuple(mean.shape)} and {tuple(cov.shape)}")
    if not (torch.isfinite(mean).all() and torch.isfinite(cov).all()):
        raise ValueError("expected a finite mean and covariance, but got NaN or infinite values")


def _from_sums(sums: FeatureSums, meta: Mapping[str, Any]) -> FeatureStats:
    mean, cov = sums.mean_and_cov()
    return FeatureStats(mean, cov, sums.count, meta, sums.sample, sums.keys)


def _join_samples(a: FeatureStats, b: FeatureStats) -> tuple[Tensor | None, Tensor | None]:
    """A sample of both, with its keys. Where the keys are not known, each has its share in it."""
    if a.sample is None or b.sample is None:
        return None, None
    if a.keys is not None and b.keys is not None:
        return smallest(torch.cat([a.sample, b.sample]), torch.cat([a.keys, b.keys]))
    size = min(SAMPLE, len(a.sample) + len(b.sample))
    of_b = min(len(b.sample), max(size - len(a.sample), round(size * b.count / (a.count + b.count))))
    return torch.cat([a.sample[: size - of_b], b.sample[:of_b]]), None
