"""The source side of an experiment: the model, and what the methods need from its training data. Computed once."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cafe_tta import data, models, storage
from cafe_tta.bench.experiments import Dataset, Row
from cafe_tta.classifier import SplitClassifier, split_classifier
from cafe_tta.models.options import WEIGHTS_HELP
from cafe_tta.options import Options, option
from cafe_tta.source import (
    FeatureStats,
    Posterior,
    SourceData,
    SourceStats,
    SourceValue,
    agreed_record,
    load_all,
    source_kind,
)
from cafe_tta.source.train import TrainConfig, train
from cafe_tta.styles import StyleStats

Say = Callable[[str], None]
BATCH = 256
# The embedded model: half a minute on one core. Digits must not be flipped.
DIGITS_TRAINING = TrainConfig(epochs=12, swag_epochs=4, batch_size=64, lr=0.1, swag_lr=0.01, augment="crop")
DIGITS = models.Preprocessing(size=32, mean=(0.3, 0.3, 0.3), std=(0.35, 0.35, 0.35))
ARCHITECTURE = "cafe:digits-resnet"


_PANEL = "Source side"


@dataclass(frozen=True)
class SourceSideOptions(Options):
    """Changes to the source side of a data set.

    >>> SourceSideOptions(num_groups=64).source_limit is None
    True
    """

    weights: Path | None = option(None, WEIGHTS_HELP, panel=_PANEL)
    num_classes: int | None = option(
        None, "The number of classes; by default that of the weights.", least=1, panel=_PANEL
    )
    pretrained: bool = option(
        False, "Download the weights that the model's library offers.", panel=_PANEL, flag="--pretrained"
    )
    source: list[Path] = option(
        [],
        "A file of source values that was made before, such as a SWAG posterior. May be repeated.",
        panel=_PANEL,
        metavar="FILE",
        aliases=("posterior",),
    )
    source_limit: int | None = option(None, "Number of source images used: a seeded subset.", least=1, panel=_PANEL)
    num_groups: int | None = option(None, "Number of groups k, instead of the data set's.", least=1, panel=_PANEL)
    max_group_size: int = option(0, "Wider groups are split; 0 sets no limit, as in the paper.", least=0, panel=_PANEL)
    swag_epochs: int = option(
        0, "Collect a SWAG posterior around the weights in this many epochs.", least=0, panel=_PANEL
    )
    swag_lr: float = option(1e-4, "Learning rate while the posterior is collected.", least=0, panel=_PANEL)


class SourceSide:
    """A classifier and everything the methods need from its source domain, each part made on first use."""

    def __init__(
        self, dataset: Dataset, folder: Path, options: SourceSideOptions | None = None, say: Say = lambda _: None
    ) -> None:
        self.dataset = dataset
        self.options = options or SourceSideOptions()
        self.folder = folder
        self.say = say
        folder.mkdir(parents=True, exist_ok=True)
        self._given = load_all(self.options.source)
        names = (str(path) for path in self.options.source)
        pixels = {"size": dataset.size, "mean": dataset.mean, "std": dataset.std}
        asked = {name: value for name, value in pixels.items() if name in dataset.changed}
        recorded = agreed_record(dict(zip(names, self._given.values(), strict=True)), asked).preprocessing
        self._loaded = self._load_model(recorded)
        self.preprocessing = recorded or self._loaded.preprocessing
        self.classifier: SplitClassifier = split_classifier(models.channels_last(self._loaded.model))
        self.group_seed = 0
        self._groups: dict[int | None, SourceStats] = {}
        self._values: dict[str, SourceValue] = {}
        self._digests: dict[tuple[str, int | None], str] = {}

    @cached_property
    def images(self) -> data.ImageSet:
        return self.of_one_size(data.load(self.dataset.source_data))

    def of_one_size(self, images: data.ImageSet) -> data.ImageSet:
        """The images; those of a folder that differ in size, at the size of the model, for which they are corrupted."""
        if not isinstance(images, data.FolderSet) or images.has_one_size():
            return images
        preprocessing = getattr(self, "preprocessing", DIGITS)  # not known yet, while the embedded model is trained
        read_as = f"{preprocessing.describe_size()}, {preprocessing.interpolation}"
        return data.FittedFolder(images, preprocessing.fit, read_as)

    @cached_property
    def indices(self) -> list[int]:
        order = np.random.default_rng(0).permutation(len(self.images))[: self.options.source_limit]
        return sorted(order.tolist())

    @cached_property
    def stats(self) -> FeatureStats:
        path = self.folder / "feature-stats.safetensors"
        stats = self._kept(FeatureStats, path)
        # Files of version 0.1 have no styles.
        if stats is not None and stats.count == len(self.indices) and stats.styles is not None:
            return stats
        self.say(f"computing statistics of {len(self.indices)} source images")
        stats = FeatureStats.fit(self.classifier, self._image_batches(), self.preprocessing, self._loaded.classes)
        stats.save(path)
        return stats

    @cached_property
    def given(self) -> dict[str, SourceValue]:
        """Source values from files, by kind."""
        for value in self._given.values():
            value.check_belongs_to(self.classifier)
        return self._given

    def grouped(self, row: Row | None = None) -> SourceStats:
        """The statistics in groups: those that were given, or the data set's number of groups, or a row's own."""
        wanted = None if row is None else row.num_groups
        if wanted is None and isinstance(given := self.given.get("stats"), SourceStats):
            return given
        num_groups = wanted or self.options.num_groups or self.dataset.num_groups
        limit = self.options.max_group_size or None
        if num_groups not in self._groups:
            path = self.folder / f"source-stats-{num_groups}-{limit}.safetensors"
            kept = self._kept(SourceStats, path)
            same = {} if kept is None or kept.styles is None else kept.meta
            if same.get("count") == self.stats.count and same.get("seed") == self.group_seed:
                self._groups[num_groups] = kept
                return self._groups[num_groups]
            self.say(f"grouping {len(self.stats.mean)} features{f' into {num_groups}' if num_groups else ''}")
            source = self.stats.group(num_groups, seed=self.group_seed, max_group_size=limit)
            source.save(path)
            self._groups[num_groups] = source
        return self._groups[num_groups]

    def needed(self, row: Row) -> Any:
        """What the method of a row needs from the source domain."""
        kind = row.needs
        if kind is None:
            return None
        if kind == SourceStats.kind:
            return self.grouped(row)
        if kind == SourceData.kind:
            return _Repeatable(lambda: self._labelled_batches(row.config.batch_size, shuffled=True))
        return self.value(kind)

    def styles(self, row: Row) -> StyleStats | None:
        """The styles of the source images, where the method of a row unmixes and has no statistics of its own."""
        return self.grouped(row).styles if row.config.unmixes and row.needs != SourceStats.kind else None

    def value(self, kind: str) -> SourceValue:
        """A source value of any kind: given, made before, or made now by its `fit`."""
        value = self.given.get(kind) or self._values.get(kind)
        options = self._fit_options(kind)
        path = self.folder / f"{'-'.join(map(str, (kind, *options.values())))}.safetensors"
        if value is None:
            value = self._kept(source_kind(kind), path)
            if getattr(value, "count", len(self.indices)) != len(self.indices):
                value = None  # of other source images
        if value is None:
            if kind == Posterior.kind and not options:
                raise ValueError(
                    "expected a SWAG posterior of the model's weights, but got none: give one as `source`, or collect "
                    "one with `swag_epochs`, or leave out the methods that need it"
                )
            self.say(f"computing {kind} of {len(self.indices)} source images")
            fit: Any = source_kind(kind).fit  # which may take options of its own
            value = fit(self.classifier, _Repeatable(lambda: self._labelled_batches(BATCH)), **options)
            value = value.of_images(self.preprocessing, self._loaded.classes)
            value.save(path)
        self._values[kind] = value
        return value

    def _kept(self, kind: Any, path: Path) -> Any:
        """What was made before, if it was made with this classifier, of images that were read as these are.

        An attempt that failed may have had others.
        """
        if not path.exists():
            return None
        value = kind.load(path)
        try:
            value.check_belongs_to(self.classifier)
        except ValueError:
            return None
        return value if value.images.preprocessing in (None, self.preprocessing) else None

    def facts(self, row: Row, distances: bool = False) -> dict[str, Any]:
        """For records: a hash of every source value that a row's runs use, and how a posterior was collected.

        With `distances`, the runs also measure how far they are from the source statistics.
        """
        kinds = [row.needs] if row.needs not in (None, SourceData.kind) else []
        kinds += [SourceStats.kind] if distances and row.needs != SourceStats.kind else []
        values = {kind: self._digest(kind, row) for kind in kinds if kind}
        if (styles := self.styles(row)) is not None:
            values["styles"] = storage.checksum({"mean": styles.mean, "cov": styles.cov})
        facts: dict[str, Any] = {"values": values}
        if row.needs == Posterior.kind:
            facts["swag"] = {"given": True} if Posterior.kind in self.given else self._swag_options()
        return facts

    def _digest(self, kind: str, row: Row) -> str:
        key = kind, row.num_groups
        if key not in self._digests:
            value = self.grouped(row) if kind == SourceStats.kind else self.value(kind)
            if type(value).content is SourceValue.content:  # it writes its files in a way of its own
                with tempfile.TemporaryDirectory() as folder:
                    value.save(path := Path(folder) / kind)
                    self._digests[key] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                tensors, meta = value.content()
                self._digests[key] = storage.checksum(tensors, kind, text=json.dumps(meta, sort_keys=True))
        return self._digests[key]

    def _swag_options(self) -> dict[str, Any]:
        if not self.options.swag_epochs and self.dataset.model == "digits":
            return {"epochs": DIGITS_TRAINING.swag_epochs, "lr": DIGITS_TRAINING.swag_lr}
        return self._fit_options(Posterior.kind)

    def _fit_options(self, kind: str) -> dict[str, Any]:
        if kind != Posterior.kind or not self.options.swag_epochs:
            return {}
        return {"epochs": self.options.swag_epochs, "lr": self.options.swag_lr, "momentum": 0.9}

    def labels_of(self, images: data.ImageSet) -> data.Labels | None:
        """The labels of images, in the model's numbers where both have names of classes."""
        loaded = getattr(self, "_loaded", None)  # none yet, while the embedded model is trained
        if loaded is None or loaded.classes is None or images.classes is None or images.labels is None:
            return images.labels
        labels, _ = data.match_labels(images, loaded.classes, loaded.num_classes)
        if labels is None or (labels < 0).any():
            strange = ", ".join(name for name in images.classes if name not in loaded.classes)
            raise ValueError(f"{images.name} has classes that the model does not have: {strange}")
        return labels

    def describe_model(self) -> dict[str, Any]:
        weights = hashlib.sha256("".join(sorted(self.classifier.fingerprint().values())).encode()).hexdigest()
        return {
            "architecture": self._loaded.architecture,
            "weights": weights,
            "num_features": self.classifier.num_features,
            "num_classes": self.classifier.num_classes,
            "preprocessing": self.preprocessing.record(),
        }

    def _load_model(self, recorded: models.Preprocessing | None) -> models.LoadedModel:
        if self.dataset.model == "digits":
            return self._embedded_model()
        return models.load(
            self.dataset.model,
            weights=self.options.weights,
            num_classes=self.options.num_classes,
            pretrained=(self.dataset.pretrained or self.options.pretrained) and self.options.weights is None,
            size=self.dataset.size if recorded is None else recorded.size,
            mean=self.dataset.mean,
            std=self.dataset.std,
        )

    def _embedded_model(self) -> models.LoadedModel:
        path = self.folder / "model.safetensors"
        if not (path.exists() and (self.folder / "posterior.safetensors").exists()):
            self.say("training a small ResNet on the embedded digits")
            images, labels = self._tensors(DIGITS)
            generator_state = torch.get_rng_state()
            torch.manual_seed(0)
            classifier = split_classifier(models.build(ARCHITECTURE, num_classes=10))
            torch.set_rng_state(generator_state)
            result = train(classifier, images, labels, DIGITS_TRAINING)
            assert result.posterior is not None
            result.posterior.of_images(DIGITS).save(self.folder / "posterior.safetensors")
            models.save(path, classifier, ARCHITECTURE, DIGITS)
        return models.load(str(path))

    def _tensors(self, preprocessing: models.Preprocessing | None = None) -> tuple[Tensor, Tensor]:
        labels = self._labels(self.indices)
        prepare = preprocessing or self.preprocessing
        images = torch.cat([prepare(self.images.images(part)) for part in _blocks(self.indices, BATCH)])
        return images, labels

    def _labels(self, indices: list[int]) -> Tensor:
        labels = self.labels_of(self.images)
        if labels is None:
            raise ValueError(f"{self.images.name} has no labels, which training needs")
        return torch.from_numpy(np.asarray(labels)[indices])

    def _image_batches(self) -> Iterator[Tensor]:
        for part in _blocks(self.indices, BATCH):
            yield self.preprocessing(self.images.images(part))

    def _labelled_batches(self, batch_size: int, shuffled: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        order = np.random.default_rng(1).permutation(self.indices).tolist() if shuffled else self.indices
        for part, labels in zip(_blocks(order, batch_size), _blocks(self._labels(order), batch_size), strict=True):
            yield self.preprocessing(self.images.images(part)), labels


class _Repeatable:
    """An iterable that can be iterated more than once."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()


def _blocks(values: Any, size: int) -> Iterable[Any]:
    return (values[start : start + size] for start in range(0, len(values), size))
