"""What a plan will cost on this machine, measured on a few batches before it starts."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cafe_tta import data
from cafe_tta.bench.experiments import EXPERIMENTS, Dataset, Plan, plan
from cafe_tta.bench.protocols import Indices
from cafe_tta.bench.source_side import Say, SourceSide, SourceSideOptions
from cafe_tta.classifier import SplitClassifier
from cafe_tta.gradient import GradientAdapter, StepConfig

BATCH = 64
REPEATS = 3


@dataclass(frozen=True)
class Cost:
    """Seconds per image."""

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


def seconds(plan: Plan, cost: Cost, num_images: int, labels: Indices | None = None) -> float:
    """About how long all the runs of a plan take: passes over the images, times what each method does with one."""
    total = 0.0
    for protocol in plan.protocols:
        images = sum(len(episode) for episode in plan.episodes(protocol, 0, num_images, labels))
        for row in plan.rows:
            moves = isinstance(row.config, StepConfig)
            passes = cost.step if moves else cost.forward
            if row.is_reference:
                passes *= 2  # a source batch beside every target batch
            if plan.mode == "offline" or plan.frechet or (moves and row.config.answer != "before"):
                passes += cost.forward
            total += images * passes
        if plan.frechet:
            total += images * cost.forward  # the source classifier's features, once for each episode
    return total * len(plan.seeds)


def every_experiment(dataset: Dataset, options: SourceSideOptions, say: Say = lambda _: None) -> dict[str, float]:
    """Seconds that each experiment takes on a data set; none where its model or its images are not there."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = SourceSide(dataset, Path(folder), options, say)
            cost = measure(source.classifier, source.preprocessing.size)
        images = data.load(dataset.data)
        names = [name for name, experiment in EXPERIMENTS.items() if dataset.name in experiment.datasets]
        costs = {name: seconds(plan(name, dataset), cost, len(images), images.labels) for name in names}
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        say(f"note: no costs for {dataset.name}: {error}")
        return {}
    say(f"measured: {1000 * cost.forward:.2f} ms an image forward, {1000 * cost.step:.2f} ms a step")
    return costs


def _seconds(function: Callable[[], object]) -> float:
    function()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[REPEATS // 2]
