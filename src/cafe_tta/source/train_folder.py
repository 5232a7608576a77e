"""Trains a source classifier on an image set, and keeps model, posterior and report in a folder."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cafe_tta import models, storage
from cafe_tta.classifier import SplitClassifier
from cafe_tta.data import Advance, ImageSet, Labels, Loader, Unreadable, left_out, match_labels
from cafe_tta.data import load as load_images
from cafe_tta.models import Model, ModelOptions
from cafe_tta.source.train import NEWER, TrainConfig, epochs_done, train

ShowProgress = Callable[[str, int], AbstractContextManager[Advance]]  # with a description and a total
DEFAULT_MODEL = "cafe:digits-resnet"
FIRST_IMAGES = 5000  # that a model may compute a layer from, before it is trained


def _no_progress(description: str, total: int) -> AbstractContextManager[Advance]:
    return nullcontext(lambda amount: None)


@dataclass(frozen=True)
class TrainingRun:
    """A training run and its folder. A run that was stopped continues when it is started with the same settings.

    The folder holds model.safetensors, posterior.safetensors (with SWAG epochs) and train.json, the report, which is
    written last; before, it holds checkpoint.safetensors. The number of classes of the model is that of the images.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     config = TrainConfig(epochs=1, swag_epochs=0, batch_size=256)
    ...     run = TrainingRun("digits:test", folder, config=config)
    ...     report = run.train()
    ...     run.finished() == report, report["images"]
    (True, 896)
    """

    data: str
    output: Path  # or its name
    model: ModelOptions = field(default_factory=lambda: ModelOptions(DEFAULT_MODEL))
    config: TrainConfig = field(default_factory=TrainConfig)
    test: str | None = None  # labelled images to measure the accuracy on in the end
    new_head: bool = False  # keep all but the last layer of the model's weights
    recipe: str | None = None  # the name of the recipe that model and config are from, for the report

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", Path(self.output))

    @property
    def checkpoint(self) -> Path:
        return self.output / "checkpoint.safetensors"

    @property
    def report(self) -> Path:
        return self.output / "train.json"

    @property
    def epochs_done(self) -> int:
        return epochs_done(self.checkpoint)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, as the report has it."""
        model = {key: value for key, value in asdict(self.model).items() if key not in ("num_classes", "device")}
        model |= {"model": str(model["model"])}
        model |= {key: model[key] and str(model[key]) for key in ("weights", "classes")}
        model |= {key: model[key] and ",".join(map(str, model[key])) for key in ("mean", "std")}
        own = {"data": self.data, "test": self.test, "recipe": self.recipe, "new_head": self.new_head}
        return {**own, **model, **asdict(self.config)}

    def clear(self) -> None:
        """Removes the results and the checkpoint of an earlier run."""
        for path in (self.report, self.checkpoint, *(self.output / name for name in _RESULTS)):
            path.unlink(missing_ok=True)

    def finished(self) -> dict[str, Any] | None:
        """The report, if the run is finished. A finished run with other settings is refused."""
        if not self.report.exists():
            return None
        report: dict[str, Any] = json.loads(self.report.read_text())
        if shown := storage.differences(_comparable(report["settings"]), _comparable(self.settings)):
            raise ValueError(
                f"{self.output} holds a finished run with other settings: {shown}; choose another `output`, or clear it"
            )
        return report

    def train(
        self,
        workers: int = 0,
        progress: ShowProgress = _no_progress,
        on_unreadable: Callable[[list[Unreadable]], None] = lambda items: None,
    ) -> dict[str, Any]:
        """Trains, from the checkpoint on if there is one; writes model, posterior and report; returns the report."""
        imageset = load_images(self.data)
        if imageset.labels is None:
            raise ValueError(f"expected labelled images, but {self.data} has no class folders and no labels")
        model = self._build(imageset)
        classes = model.classes or imageset.classes
        with progress("reading", len(imageset)) as advance:
            labels = _all_labels(imageset, classes, model.classifier.num_classes)
            loader = Loader(imageset, model.preprocessing, labels=labels, workers=workers, advance=advance)
            images, targets = _read_all(loader)
        on_unreadable([*loader.unreadable, *left_out(imageset)])
        for module in model.classifier.modules() if not model.trained else ():
            if callable(see_source := getattr(module, "see_source", None)):  # a layer that is computed from images
                see_source(images[:FIRST_IMAGES])
        self.output.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with ExitStack() as shown:
            advance = shown.enter_context(progress("training", self.config.total_epochs))
            advance(self.epochs_done)

            @cache
            def last_bar() -> Callable[[int], None]:
                shown.close()  # the first one: there can be no two at a time
                return shown.enter_context(progress("BatchNorm and accuracy", 2 * len(images)))

            result = train(
                model.classifier,
                images,
                targets,
                self.config,
                self.checkpoint,
                progress=lambda report: advance(1),
                finishing=lambda count: last_bar()(count),
            )
        training = {
            "settings": self.settings,
            "images": len(images),
            "data": imageset.digest(),
            "train_accuracy": result.train_accuracy,
            "test_accuracy": None if self.test is None else self._test(replace(model, classes=classes), workers),
        }
        written = (model.classifier, model.architecture, model.preprocessing, classes, training)
        size = models.save(self.output / _RESULTS[0], *written)
        if result.posterior is not None:
            result.posterior.of_images(model.preprocessing, classes).save(self.output / _RESULTS[1])
        report = {
            **training,
            "classes": None if classes is None else list(classes),
            "model_bytes": size,
            "seconds": time.perf_counter() - began,
            "losses": list(result.losses),
        }
        storage.write_bytes(self.report, (json.dumps(report, indent=2) + "\n").encode())
        self.checkpoint.unlink(missing_ok=True)
        return report

    def _build(self, imageset: ImageSet) -> Model:
        assert imageset.labels is not None
        num_classes = int(imageset.labels.max()) + 1 if imageset.classes is None else len(imageset.classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)  # of the first weights
            options = replace(self.model, num_classes=num_classes)
            return models.load_classifier(options, new_head=self.new_head, untrained=self.config.total_epochs > 0)

    def _test(self, model: Model, workers: int) -> float:
        assert self.test is not None
        imageset = load_images(self.test)
        labels, reason = match_labels(imageset, model.classes, model.classifier.num_classes)
        if labels is None:
            raise ValueError(f"expected labelled images to test on, but {self.test}: {reason}")
        loader = Loader(imageset, model.preprocessing, self.config.batch_size, labels=labels, workers=workers)
        return accuracy(model.classifier, loader)


_RESULTS = ("model.safetensors", "posterior.safetensors")


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which `0.50,0.50,0.50` and `0.5,0.5,0.5` are the same, and older reports have what they lack."""
    settings = {**NEWER, "recipe": None, **settings}
    numbers = {name: settings[name] for name in ("mean", "std") if settings.get(name)}
    return settings | {name: [float(part) for part in text.split(",")] for name, text in numbers.items()}


def _all_labels(imageset: ImageSet, classes: tuple[str, ...] | None, num_classes: int) -> Labels:
    labels, reason = match_labels(imageset, classes, num_classes)
    if labels is None or (labels < 0).any():
        raise ValueError(
            f"expected a class of the model for every image of {imageset.name}; {reason or 'some have none'}"
        )
    return labels


def _read_all(loader: Loader) -> tuple[Tensor, Tensor]:
    pairs = list(loader)
    if not pairs:
        raise ValueError(f"none of the {len(loader.imageset)} images of {loader.imageset.name} could be read")
    return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


def accuracy(classifier: SplitClassifier, loader: Loader) -> float:
    hits, total = 0, 0
    for images, labels in loader:
        with torch.no_grad():
            answers = classifier(images.to(classifier.head.weight)).argmax(1).cpu()
        hits += int((answers == labels).sum())
        total += len(labels)
    return hits / max(total, 1)
