"""What an experiment will cost on this machine, measured on a few batches before it starts."""

import time
from dataclasses import dataclass

import torch

from cafe_tta.bench.experiments import Experiment
from cafe_tta.classifier import SplitClassifier
from cafe_tta.gradient import GradientAdapter, StepConfig
from cafe_tta.methods import METHODS

BATCH = 64
REPEATS = 3


@dataclass(frozen=True)
class Cost:
    """Seconds an image."""

    forward: float
    step: float  # forward, backward and the optimiser


class _Probe(GradientAdapter):
    """A step with the cheapest loss there is: what any step of this network costs at least."""

    name = "probe"

    def loss(self, features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return features.square().mean()


def measure(classifier: SplitClassifier, size: int) -> Cost:
    """Times a forward pass and a step of the network, on noise."""
    images = torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0))
    probe = _Probe(classifier, config=StepConfig(lr=1e-6))
    forward = _seconds(lambda: probe.predict(images))
    step = _seconds(lambda: probe(images))
    return Cost(forward / BATCH, step / BATCH)


def seconds(experiment: Experiment, cost: Cost, num_images: int) -> float:
    """What all the runs of an experiment take, about: passes over the images by what each method does with one."""
    total = 0.0
    for part in experiment.parts:
        images = sum(len(episode) for episode in experiment.episodes(part.protocol, 0, num_images))
        for choice in part.choices:
            kind = METHODS[choice.method]
            moves = isinstance(choice.config, StepConfig)
            passes = cost.step if moves else cost.forward
            if kind.needs == "data":
                passes *= 2  # a source batch beside every target batch
            if part.mode == "offline" or experiment.frechet or (moves and choice.config.answer != "before"):
                passes += cost.forward
            total += images * passes
        if experiment.frechet:
            total += images * 2 * cost.forward  # the source classifier's features, once for each episode
    return total * len(experiment.seeds)


def _seconds(function) -> float:  # type: ignore[no-untyped-def]
    function()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[REPEATS // 2]
