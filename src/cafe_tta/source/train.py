"""Training of a source classifier (Appendix A.1).

Momentum SGD with a learning rate that falls to zero along a cosine; then a constant learning rate, at which the weights
are collected for SWAG. The mean of the collected weights is the source classifier.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from cafe_tta import storage
from cafe_tta.classifier import SplitClassifier, require_classifier
from cafe_tta.normalisation import NORM_LAYERS
from cafe_tta.options import Options, option
from cafe_tta.source.swag import Posterior, SwagCollector, recompute_batchnorm

CHECKPOINT_VERSION = 1
CROP = 4  # pixels that a random crop may move an image
Augmentation = Literal["crop-flip", "crop", "none"]
Precision = Literal["float32", "bfloat16"]
NEWER = {  # settings that older files lack, as they were then
    "warmup": 0.0,
    "nesterov": False,
    "label_smoothing": 0.0,
    "precision": "float32",
    "crop": CROP,
    "alternate_flips": False,
    "bias_lr": 1.0,
    "head_lr": 1.0,
}


@dataclass(frozen=True)
class TrainConfig(Options):
    """How the source classifier is trained; the defaults are the paper's for CIFAR (Appendix A.1).

    >>> TrainConfig(momentum=1)
    Traceback (most recent call last):
    ValueError: expected `momentum` to be at least 0 and below 1, but got 1
    """

    epochs: int = option(
        200,
        "Epochs with a learning rate that falls along a cosine; 0: only the SWAG epochs. Without either, trained "
        "weights stay as they are, and BatchNorm's statistics are recomputed on the images.",
        least=0,
    )
    batch_size: int = option(128, "Images in a batch.", least=1)
    lr: float = option(0.1, "Learning rate at the start; it falls to 0 along a cosine.", least=0)
    warmup: float = option(0.0, "Epochs at the start in which the learning rate rises from 0.", least=0)
    momentum: float = option(0.9, "Momentum of SGD.", least=0, below=1)
    nesterov: bool = option(False, "Nesterov momentum.")
    weight_decay: float = option(5e-4, "Weight decay of SGD.", least=0)
    label_smoothing: float = option(
        0.0, "Share of the target probability that all classes have in common.", least=0, below=1
    )
    swag_epochs: int = option(
        100, "Further epochs, which collect weights for the posterior that `bacs` needs; 0: no posterior.", least=0
    )
    swag_lr: float = option(0.01, "Learning rate of the SWAG epochs.", least=0)
    collections_per_epoch: int = option(4, "Times that weights are collected in a SWAG epoch.", least=1)
    augment: Augmentation = option(  # the paper does not say; this is usual for CIFAR
        "crop-flip", "Augmentation of the images: crop-flip, crop or none. Digits must not be flipped."
    )
    crop: int = option(CROP, "Pixels that an augmented image may be moved, each way.", least=0)
    alternate_flips: bool = option(
        False,
        "With crop-flip: mirror each image in every other epoch, not at random, so that two epochs show both views.",
    )
    bias_lr: float = option(
        1.0,
        "Learning rate of the normalisation layers' biases, as a multiple of `lr`. They decay no faster for it.",
        above=0,
    )
    head_lr: float = option(
        1.0,
        "Learning rate of the head's weights, as a multiple of `lr`: small where the features are large. They decay no "
        "slower for it.",
        above=0,
    )
    precision: Precision = option(
        "float32",
        "Type of the products in training: float32 or bfloat16, which is twice as fast where the processor has it "
        "(AVX-512 BF16, AMX, recent GPUs) and slower elsewhere. Weights are float32 in both.",
    )
    seed: int = option(
        0, "Seed of the first weights, of the order and augmentation of the images, and of dropout.", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs and self.warmup >= self.epochs:
            raise ValueError(f"expected `warmup` to be below `epochs` ({self.epochs}), but got {self.warmup}")
        if self.nesterov and not self.momentum:
            raise ValueError("expected `momentum` to be above 0 with `nesterov`, but got 0")
        if self.swag_epochs * self.collections_per_epoch == 1:
            raise ValueError("expected at least 2 collections for SWAG, but got 1; raise `collections_per_epoch`")

    @property
    def total_epochs(self) -> int:
        return self.epochs + self.swag_epochs

    def learning_rate(self, epoch: float) -> float:
        """The learning rate when `epoch` epochs have passed; it changes at every step, so fractions count.

        >>> [round(TrainConfig().learning_rate(epoch), 3) for epoch in (0, 100, 199, 200, 250)]
        [0.1, 0.05, 0.0, 0.01, 0.01]
        >>> config = TrainConfig(epochs=10, warmup=2)
        >>> [round(config.learning_rate(epoch), 3) for epoch in (0, 1, 2, 6)]
        [0.0, 0.05, 0.1, 0.05]
        """
        if epoch >= self.epochs:
            return self.swag_lr
        if epoch < self.warmup:
            return self.lr * epoch / self.warmup
        done = (epoch - self.warmup) / (self.epochs - self.warmup)
        return self.lr * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Progress:
    """How far training is, after an epoch."""

    epoch: int  # epochs done
    total_epochs: int
    phase: Literal["train", "swag"]
    loss: float  # mean over the epoch
    accuracy: float  # over the epoch, of the classifier in training mode on augmented images
    lr: float  # of the epoch's last step


@dataclass(frozen=True)
class TrainResult:
    """The result of training, beside the classifier itself."""

    posterior: Posterior | None  # None without SWAG epochs
    losses: tuple[float, ...]  # mean of each epoch
    accuracies: tuple[float, ...]  # of each epoch, in training mode on augmented images
    train_accuracy: float  # of the finished classifier on the training images as they are


def train(
    classifier: SplitClassifier,
    images: Tensor,
    labels: Tensor,
    config: TrainConfig | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
    finishing: Callable[[int], None] | None = None,
) -> TrainResult:
    """Trains the classifier itself, head included, on normalised images (N, 3, H, W) with labels (N,).

    In the end it is in evaluation mode, with BatchNorm statistics recomputed on the images as they are: those of
    training are of augmented ones. With SWAG epochs it is the mean of the collected weights. With a `checkpoint`, every
    epoch is written to that file; a later call with the same arguments goes on from there, and ends bit for bit as if
    it had never been interrupted. `finishing` is told of every batch after the last epoch how many images it had: twice
    all of them, for BatchNorm and for the accuracy.
    """
    config = config or TrainConfig()
    _check_data(classifier, images, labels, config)
    run = _Run(classifier, images, labels, config)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        run.describe_data()
        if path.exists():
            run.resume(path)
        elif not path.parent.is_dir():  # now, not after the first epoch
            raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    try:
        while run.epoch < config.total_epochs:
            report = run.one_epoch()
            if path is not None:
                run.save(path)
            if progress is not None:
                progress(report)
        return run.finish(finishing or (lambda images: None))
    finally:
        classifier.eval()


def collect_swag(
    classifier: SplitClassifier,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int = 10,
    lr: float = 1e-4,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Posterior:
    """A SWAG posterior around weights that are trained already; the classifier becomes its mean.

    The defaults are the paper's for ImageNet: vanilla SGD, four collections an epoch (Appendix A.1). `options` are
    those of `TrainConfig`.
    """
    if epochs < 1:
        raise ValueError(f"expected `epochs` to be at least 1, but got {epochs}")
    vanilla: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "augment": "none"}
    config = TrainConfig(epochs=0, swag_epochs=epochs, swag_lr=lr, **(vanilla | options))
    posterior = train(classifier, images, labels, config, checkpoint, progress).posterior
    assert posterior is not None
    return posterior


def augmented(images: Tensor, kind: Augmentation, crop: int = CROP, mirrored: Tensor | None = None) -> Tensor:
    """Every image moved by up to `crop` pixels each way, its border repeated; "crop-flip" also mirrors half of them.

    Those that are `mirrored` (B,), or others at random. The border is repeated, not black, because black is an unknown
    value after normalisation.
    """
    if kind == "none":
        return images
    size, channels, height, width = images.shape
    device = images.device
    shifts = partial(torch.randint, -crop, crop + 1, (size, 1), device=device)
    rows = torch.arange(height, device=device) + shifts()  # (B, H)
    cols = torch.arange(width, device=device) + shifts()  # (B, W)
    if kind == "crop-flip":
        if mirrored is None:
            mirrored = torch.rand(size, device=device) < 0.5
        cols = torch.where(mirrored[:, None].to(device), cols.flip(1), cols)
    rows, cols = rows.clamp(0, height - 1), cols.clamp(0, width - 1)
    pixels = (rows[:, :, None] * width + cols[:, None, :]).reshape(size, 1, -1)  # (B, 1, H·W)
    moved = images.reshape(size, channels, -1).gather(2, pixels.expand(-1, channels, -1))
    return moved.reshape(images.shape)


class _Run:
    """A training run between two epochs: all that a checkpoint holds."""

    def __init__(self, classifier: SplitClassifier, images: Tensor, labels: Tensor, config: TrainConfig) -> None:
        self.classifier = classifier
        self.images = images
        self.labels = labels
        self.config = config
        self.epoch = 0  # epochs done
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self.collector = SwagCollector(classifier)
        self.parameters = [p for p in classifier.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("the classifier has nothing to train: none of its parameters requires a gradient")
        self.rates = _rates(classifier, config)  # of each parameter, as a multiple of the learning rate
        self.optimizer = torch.optim.SGD(
            [
                {"params": [p], "weight_decay": config.weight_decay / rate}
                for p, rate in zip(self.parameters, self.rates, strict=True)
            ],
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
        )
        self.data: dict[str, Any] = {}

    def one_epoch(self) -> Progress:
        """One pass over the images."""
        config, steps = self.config, _num_steps(len(self.images), self.config)
        swag = self.epoch >= config.epochs
        collections = range(1, config.collections_per_epoch + 1)
        collect_after = {round(steps * n / config.collections_per_epoch) for n in collections} if swag else set()
        total, hits, lr = 0.0, 0, 0.0
        self.classifier.train()
        with _seeded(config.seed, self.epoch, self.images.device, self._like.device):
            for step, chosen in enumerate(self._order(), start=1):
                lr = config.learning_rate(self.epoch + (step - 1) / steps)
                images = augmented(self._images(chosen), config.augment, config.crop, self._mirrored(chosen))
                logits = self._logits(images.to(self._like))
                labels = self._labels(chosen).to(self._like.device)
                loss = nn.functional.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
                value = loss.item()
                if not math.isfinite(value):
                    raise self._diverged(f"the loss became {value}", lr)
                for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                    group["lr"] = lr * rate
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                if step in collect_after:
                    self.collector.collect(self.classifier)
                total += value * len(labels)
                hits += int((logits.argmax(1) == labels).sum())
        if not all(torch.isfinite(parameter).all() for parameter in self.parameters):  # after the last step
            raise self._diverged("the weights became NaN or infinite", lr)
        self.epoch += 1
        self.losses.append(total / len(self.images))
        self.accuracies.append(hits / len(self.images))
        phase: Literal["train", "swag"] = "swag" if swag else "train"
        return Progress(self.epoch, config.total_epochs, phase, self.losses[-1], self.accuracies[-1], lr)

    def _logits(self, images: Tensor) -> Tensor:
        """The classifier's float32 logits, computed with the products of `precision`."""
        reduced = self.config.precision == "bfloat16"
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=reduced):
            logits: Tensor = self.classifier(images)
        return logits.float() if reduced else logits

    def finish(self, advance: Callable[[int], None]) -> TrainResult:
        """The classifier becomes the mean of the collected weights; BatchNorm describes the images as they are."""
        posterior = None

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for chosen in self._order():
                yield self._images(chosen), self._labels(chosen)
                advance(len(chosen))

        with _seeded(self.config.seed, self.epoch, self.images.device, self._like.device):
            if self.config.swag_epochs:
                posterior = self.collector.posterior(self.classifier, batches())
            else:
                recompute_batchnorm(self.classifier, batches())
        self.classifier.eval()
        hits = 0
        with torch.no_grad():
            for start in range(0, len(self.images), self.config.batch_size):
                chosen = slice(start, start + self.config.batch_size)
                logits = self.classifier(self.images[chosen].to(self._like))
                hits += int((logits.argmax(1).to(self.labels.device) == self.labels[chosen]).sum())
                advance(len(logits))
        return TrainResult(posterior, tuple(self.losses), tuple(self.accuracies), hits / len(self.images))

    def _order(self) -> Sequence[Tensor]:
        """All images in random order, in batches of nearly the same size: a last batch of one would stop BatchNorm."""
        return torch.randperm(len(self.images)).tensor_split(_num_steps(len(self.images), self.config))

    def _images(self, chosen: Tensor) -> Tensor:
        return self.images[chosen.to(self.images.device)]

    def _labels(self, chosen: Tensor) -> Tensor:
        return self.labels[chosen.to(self.labels.device)]

    def _mirrored(self, chosen: Tensor) -> Tensor | None:
        """Which of these images are mirrored in this epoch: half of them at first, then the others, and so on."""
        if not self.config.alternate_flips:
            return None
        generator = torch.Generator().manual_seed(self.config.seed)
        at_first = torch.rand(len(self.images), generator=generator) < 0.5
        return at_first[chosen] ^ bool(self.epoch % 2)

    def _diverged(self, what: str, lr: float) -> RuntimeError:
        option = "lr" if self.epoch < self.config.epochs else "swag_lr"
        return RuntimeError(
            f"{what} in epoch {self.epoch + 1} at learning rate {lr:g}; lower `{option}`. "
            "A checkpoint, if there is one, holds the epochs before"
        )

    @property
    def _like(self) -> Tensor:
        """A tensor with the device and the type of the classifier."""
        return self.classifier.head.weight

    # Checkpoints

    def describe_data(self) -> None:
        self.data = {
            "count": len(self.images),
            "images": storage.tensor_digest(self.images),
            "labels": storage.tensor_digest(self.labels),
        }

    def save(self, path: Path) -> None:
        momentum = {
            f"momentum.{number}": memory["momentum_buffer"]
            for number, parameter in enumerate(self.parameters)
            if (memory := self.optimizer.state.get(parameter)) and memory.get("momentum_buffer") is not None
        }
        weights = {f"classifier.{name}": tensor for name, tensor in self.classifier.state_dict().items()}
        moments = self.collector.state() if self.collector.count else {}
        swag = {f"swag.{name}": tensor for name, tensor in moments.items()}
        meta = {
            "config": asdict(self.config),
            "data": self.data,
            "epoch": self.epoch,
            "losses": self.losses,
            "accuracies": self.accuracies,
        }
        storage.write(path, "training", CHECKPOINT_VERSION, weights | momentum | swag, meta)

    def resume(self, path: Path) -> None:
        """Takes everything from a checkpoint; one of another training run is refused, and nothing is changed."""
        tensors, meta = storage.read(path, "training", CHECKPOINT_VERSION)
        weights = _part(tensors, "classifier.")
        if difference := self._difference(meta, weights):
            raise ValueError(
                f"{path} is the checkpoint of another training run: {difference}; give the same arguments to continue, "
                "or another file to start anew"
            )
        with torch.no_grad():
            for name, tensor in self.classifier.state_dict().items():
                tensor.copy_(weights[name])
        for number, tensor in _part(tensors, "momentum.").items():
            parameter = self.parameters[int(number)]
            self.optimizer.state[parameter]["momentum_buffer"] = tensor.to(parameter.device)
        if swag := _part(tensors, "swag."):
            self.collector.set_state({name: tensor.to(self._like.device) for name, tensor in swag.items()})
        self.epoch = meta["epoch"]
        self.losses, self.accuracies = list(meta["losses"]), list(meta["accuracies"])

    def _difference(self, meta: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
        """How a checkpoint's run differs from this one, in words."""
        differences = [shown] if (shown := storage.differences(NEWER | meta["config"], asdict(self.config))) else []
        if meta["data"]["count"] != self.data["count"]:
            differences.append(f"{meta['data']['count']} images there, {self.data['count']} here")
        else:
            differences += [f"other {name}" for name in ("images", "labels") if meta["data"][name] != self.data[name]]
        a = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        b = {name: tuple(tensor.shape) for name, tensor in self.classifier.state_dict().items()}
        if changed := [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]:
            there, here = (shapes.get(changed[0], "none") for shapes in (a, b))
            differences.append(f"another classifier: `{changed[0]}` has shape {there} there, {here} here")
        return "; ".join(differences)


def epochs_done(checkpoint: Path) -> int:
    """The number of epochs that a checkpoint holds; 0 where there is none."""
    if not checkpoint.exists():
        return 0
    return int(storage.read(checkpoint, "training", CHECKPOINT_VERSION)[1]["epoch"])


def _part(tensors: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _rates(classifier: SplitClassifier, config: TrainConfig) -> list[float]:
    """The learning rate of every parameter that is trained, as a multiple of the run's."""
    norms = (module for module in classifier.modules() if isinstance(module, NORM_LAYERS))
    own = {getattr(module, "bias", None): config.bias_lr for module in norms} | {classifier.head.weight: config.head_lr}
    return [own.get(parameter, 1.0) for parameter in classifier.parameters() if parameter.requires_grad]


def _num_steps(images: int, config: TrainConfig) -> int:
    return math.ceil(images / config.batch_size)


@contextmanager
def _seeded(seed: int, epoch: int, *devices: torch.device) -> Iterator[None]:
    """Random numbers that depend on seed and epoch alone; those of the caller are not changed."""
    state = int(np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)[0])
    with torch.random.fork_rng(devices=list({device for device in devices if device.type == "cuda"})):
        torch.manual_seed(state)
        yield


def _check_data(classifier: SplitClassifier, images: Tensor, labels: Tensor, config: TrainConfig) -> None:
    require_classifier(classifier)
    if not isinstance(images, Tensor) or not isinstance(labels, Tensor):
        raise TypeError(f"expected tensors, but got {type(images).__name__} and {type(labels).__name__}")
    if images.dim() != 4 or not images.is_floating_point() or len(images) < 2:
        raise ValueError(
            "expected at least two normalised images, a floating-point tensor (N, channels, height, width), "
            f"but got {images.dtype} of shape {tuple(images.shape)}"
        )
    if labels.shape != (len(images),) or labels.dtype != torch.int64:
        raise ValueError(
            f"expected int64 labels of shape ({len(images)},), one for each image, "
            f"but got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classifier.num_classes:
        raise ValueError(f"expected labels from 0 to {classifier.num_classes - 1}, but they go from {low} to {high}")
    for start in range(0, len(images), 1024):  # a part at a time: the images may fill the memory
        if not torch.isfinite(images[start : start + 1024]).all():
            end = min(start + 1024, len(images)) - 1
            raise ValueError(f"expected finite images, but some of {start} to {end} have NaN or infinite values")
    steps = _num_steps(len(images), config)
    if config.swag_epochs and steps < config.collections_per_epoch:
        raise ValueError(
            f"an epoch of {steps} steps cannot collect weights {config.collections_per_epoch} times; "
            "lower `collections_per_epoch` or `batch_size`"
        )
