"""The source side of an experiment: the model, and what the methods need from its training data. Computed once."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cafe_tta import data, models
from cafe_tta.bench.experiments import Dataset, Row
from cafe_tta.classifier import SplitClassifier, split_classifier
from cafe_tta.source.histograms import SourceHistograms
from cafe_tta.source.stats import FeatureStats, SourceStats
from cafe_tta.source.swag import Posterior
from cafe_tta.source.train import TrainConfig, collect_swag, train

Say = Callable[[str], None]
BATCH = 256
# The embedded model: half a minute on one core. Digits must not be flipped.
DIGITS_TRAINING = TrainConfig(epochs=12, swag_epochs=4, batch_size=64, lr=0.1, swag_lr=0.01, augment="crop")
DIGITS = models.Preprocessing(size=32, mean=(0.3, 0.3, 0.3), std=(0.35, 0.35, 0.35))
ARCHITECTURE = "cafe:digits-resnet"


@dataclass(frozen=True)
class SourceOptions:
    """Changes to the source side of a data set."""

    weights: Path | None = None
    num_classes: int | None = None
    limit: int | None = None  # source images used; a seeded subset
    posterior: Path | None = None  # a SWAG posterior made before
    swag_epochs: int = 0  # without one: collect it around the weights in this many epochs
    swag_lr: float = 1e-4
    num_groups: int | None = None
    max_group_size: int | None = None
    group_seed: int = 0


class SourceSide:
    """A classifier and everything the methods need from its source domain, each part made on first use."""

    def __init__(
        self, dataset: Dataset, folder: Path, options: SourceOptions | None = None, say: Say = lambda _: None
    ) -> None:
        self.dataset = dataset
        self.options = options or SourceOptions()
        self.folder = folder
        self.say = say
        folder.mkdir(parents=True, exist_ok=True)
        self._loaded = self._load_model()
        self.preprocessing = self._loaded.preprocessing
        self.classifier: SplitClassifier = split_classifier(models.channels_last(self._loaded.model))
        self._groups: dict[tuple[int, int | None], SourceStats] = {}

    @cached_property
    def images(self) -> data.ImageSet:
        return data.load(self.dataset.source_data)

    @cached_property
    def indices(self) -> list[int]:
        order = np.random.default_rng(0).permutation(len(self.images))[: self.options.limit]
        return sorted(order.tolist())

    @cached_property
    def stats(self) -> FeatureStats:
        path = self.folder / "feature-stats.safetensors"
        if path.exists():
            stats = FeatureStats.load(path)
            if stats.count == len(self.indices):
                stats.check_belongs_to(self.classifier)
                return stats
        self.say(f"computing statistics of {len(self.indices)} source images")
        stats = FeatureStats.fit(self.classifier, self._image_batches())
        stats.save(path)
        return stats

    def grouped(self, row: Row | None = None) -> SourceStats:
        """The statistics in groups: the data set's number of them, or those of a row."""
        wanted = None if row is None else row.num_groups
        num_groups = wanted or self.options.num_groups or self.dataset.num_groups
        limit = self.options.max_group_size
        if (num_groups, limit) not in self._groups:
            path = self.folder / f"source-stats-{num_groups}-{limit}.safetensors"
            if path.exists():
                source = SourceStats.load(path)
                if source.meta.get("count") == self.stats.count and source.meta.get("seed") == self.options.group_seed:
                    source.check_belongs_to(self.classifier)
                    self._groups[num_groups, limit] = source
                    return source
            self.say(f"grouping {len(self.stats.mean)} features into {num_groups}")
            source = self.stats.group(num_groups, seed=self.options.group_seed, max_group_size=limit)
            source.save(path)
            self._groups[num_groups, limit] = source
        return self._groups[num_groups, limit]

    @cached_property
    def histograms(self) -> SourceHistograms:
        path = self.folder / "histograms.safetensors"
        if path.exists():
            histograms = SourceHistograms.load(path)
            if histograms.count == len(self.indices):
                histograms.check_belongs_to(self.classifier)
                return histograms
        self.say(f"computing histograms of {len(self.indices)} source images")
        histograms = SourceHistograms.fit(self.classifier, _Repeatable(self._image_batches))
        histograms.save(path)
        return histograms

    @cached_property
    def posterior(self) -> Posterior:
        path = self.options.posterior or self.folder / "posterior.safetensors"
        if path.exists():
            return Posterior.load(path)
        if not self.options.swag_epochs:
            raise ValueError(
                "expected a SWAG posterior of the model's weights, but got none: pass `posterior`, or collect one with "
                "`swag_epochs`, or leave out the methods that need it"
            )
        self.say(f"collecting SWAG in {self.options.swag_epochs} epochs over {len(self.indices)} source images")
        images, labels = self._tensors()
        walker = split_classifier(self._loaded.model)
        posterior = collect_swag(
            walker, images, labels, epochs=self.options.swag_epochs, lr=self.options.swag_lr, momentum=0.9
        )
        posterior.save(path)
        return posterior

    def needs(self, row: Row, needs: str | None, batch_size: int) -> Any:
        """What a method takes from the source domain."""
        if needs == "stats":
            return self.grouped(row)
        if needs == "histograms":
            return self.histograms
        if needs == "posterior":
            return self.posterior
        if needs == "data":
            return _Repeatable(lambda: self._labelled_batches(batch_size))
        return None

    def describe_model(self) -> dict[str, Any]:
        weights = hashlib.sha256("".join(sorted(self.classifier.fingerprint().values())).encode()).hexdigest()
        return {
            "architecture": self._loaded.architecture,
            "weights": weights,
            "num_features": self.classifier.num_features,
            "num_classes": self.classifier.num_classes,
            "preprocessing": asdict(self.preprocessing),
        }

    def _load_model(self) -> models.LoadedModel:
        if self.dataset.model == "digits":
            return self._embedded_model()
        return models.load(
            self.dataset.model,
            weights=self.options.weights,
            num_classes=self.options.num_classes,
            pretrained=self.dataset.pretrained and self.options.weights is None,
            size=self.dataset.size,
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
            result.posterior.save(self.folder / "posterior.safetensors")
            models.save(path, classifier, ARCHITECTURE, DIGITS)
        return models.load(str(path))

    def _tensors(self, preprocessing: models.Preprocessing | None = None) -> tuple[Tensor, Tensor]:
        labels = self._labels()
        prepare = preprocessing or self.preprocessing
        images = torch.cat([prepare(self.images.images(part)) for part in _blocks(self.indices, BATCH)])
        return images, labels

    def _labels(self) -> Tensor:
        if self.images.labels is None:
            raise ValueError(f"{self.images.name} has no labels, which training needs")
        return torch.from_numpy(np.asarray(self.images.labels)[self.indices])

    def _image_batches(self) -> Iterator[Tensor]:
        for part in _blocks(self.indices, BATCH):
            yield self.preprocessing(self.images.images(part))

    def _labelled_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = np.random.default_rng(1).permutation(self.indices).tolist()
        labels = np.asarray(self.images.labels)
        for part in _blocks(order, batch_size):
            yield self.preprocessing(self.images.images(part)), torch.from_numpy(labels[part])


class _Repeatable:
    """An iterable that can be iterated more than once."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()


def _blocks(values: list[int], size: int) -> Iterable[list[int]]:
    return (values[start : start + size] for start in range(0, len(values), size))
