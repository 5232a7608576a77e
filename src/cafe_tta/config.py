"""Options that every method has, checked where they are made."""

import math
from dataclasses import dataclass
from typing import Literal

from cafe_tta.normalisation import NORMALISATIONS, Normalisation

Answer = Literal["before", "after", "after-eval"]
ANSWERS = ("before", "after", "after-eval")


@dataclass(frozen=True)
class AdapterConfig:
    """What every method has."""

    batch_size: int = 256  # images a batch: what loaders and benchmarks deal out; any other size works too

    def __post_init__(self) -> None:
        _require(self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)


@dataclass(frozen=True)
class StepConfig(AdapterConfig):
    """What every method with gradients has."""

    lr: float = 1e-3  # Sec. 5.2
    momentum: float = 0.8  # Sec. 5.2
    optimizer: Literal["sgd", "adam"] = "sgd"
    max_change: float | None = None  # a longer gradient is shortened: lr times it is at most this share of the weights
    parameters: Literal["all", "norm"] = "all"  # of the backbone: all, or the normalisation layers' weight and bias
    normalisation: Normalisation = "batch"  # what BatchNorm normalises with while adapting; the paper: batch
    blend: float = 0.5  # weight of the batch's statistics, for normalisation="blend"
    answer: Answer = "before"  # logits of the pass that made the loss; of a second pass; of one in evaluation mode
    min_batch: int = 2  # a smaller batch is answered in evaluation mode where BatchNorm would normalise with it
    adapt_from: str | None = (
        None  # name of a module of the model: what comes before it stays, and costs no backward pass
    )
    sync_batchnorm: bool = True  # many ranks: BatchNorm normalises with the batch of all; off: each rank with its own
    every: int = 1  # a step on each n-th batch only; every batch is answered

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.lr < math.inf, "lr", "at least 0 and finite", self.lr)
        _require(0 <= self.momentum < 1, "momentum", "at least 0 and below 1", self.momentum)
        _choose(self.optimizer, "optimizer", ("sgd", "adam"))
        _choose(self.parameters, "parameters", ("all", "norm"))
        _require(self.max_change is None or self.max_change > 0, "max_change", "above 0 or None", self.max_change)
        _choose(self.normalisation, "normalisation", NORMALISATIONS)
        _require(0 <= self.blend <= 1, "blend", "between 0 and 1", self.blend)
        _choose(self.answer, "answer", ANSWERS)
        _require(self.min_batch >= 1, "min_batch", "at least 1", self.min_batch)
        _require(self.every >= 1, "every", "at least 1", self.every)


def _require(good: bool, name: str, expected: str, value: object) -> None:
    if not good:
        raise ValueError(f"expected `{name}` to be {expected}, but got {value!r}")


def _choose(value: object, name: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, name, f"one of {', '.join(map(repr, allowed))}", value)
