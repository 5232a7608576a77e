"""The demonstration: every method on scikit-learn's handwritten digits, corrupted in 15 ways at once."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cafe_tta import corruptions, data, models, storage
from cafe_tta.bench.figures import draw_demo
from cafe_tta.bench.protocols import all_mixed
from cafe_tta.bench.run import Outcome, Reference, run
from cafe_tta.bench.stream import Stream
from cafe_tta.classifier import SplitClassifier, split_classifier
from cafe_tta.gaussians import SourceGaussians
from cafe_tta.losses import EIGENVALUE_FLOOR
from cafe_tta.methods import METHODS, create
from cafe_tta.source.histograms import SourceHistograms
from cafe_tta.source.train import TrainConfig, train
from cafe_tta.stats import FeatureStats

ARCHITECTURE = "cafe:digits-resnet"
TRAINING = TrainConfig(epochs=12, swag_epochs=4, batch_size=64, lr=0.1, swag_lr=0.01, augment="crop")
NUM_GROUPS = 8  # for 128 features, as many dimensions a group as 128 groups give 2048 features
SEVERITY = 5
COPIES = 6  # times that each of the 896 test images comes, each time with another corruption

Say = Callable[[str], None]
Advance = Callable[[int], None]


@dataclass(frozen=True)
class MethodResult:
    """What a method did over the seeds."""

    name: str
    needs: str | None
    outcomes: tuple[Outcome, ...]

    @property
    def accuracies(self) -> list[float]:
        return [100 * outcome.accuracy for outcome in self.outcomes]

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.accuracies) if len(self.outcomes) > 1 else 0.0

    @property
    def frechet(self) -> float:
        return statistics.mean(outcome.frechet or 0.0 for outcome in self.outcomes)

    @property
    def milliseconds(self) -> float:
        return statistics.mean(outcome.milliseconds_per_image for outcome in self.outcomes)


@dataclass(frozen=True)
class Demo:
    """A source classifier, all that the methods need of its source domain, and the test images."""

    classifier: SplitClassifier
    preprocessing: models.Preprocessing
    needs: dict[str | None, Any]
    reference: Reference
    clean_accuracy: float
    test: data.ImageSet

    def stream(self, seed: int) -> Stream:
        (episode,) = all_mixed(len(self.test), corruptions.NAMES, [SEVERITY], seed, copies=COPIES)
        return Stream(self.test, episode, self.preprocessing)


def prepare(say: Say = lambda _: None, advance: Advance = lambda _: None) -> Demo:
    """Trains the source classifier and computes the source side of every method. `advance` counts epochs."""
    say("training a small ResNet on 901 clean digits")
    training, test = data.load("digits:train"), data.load("digits:test")
    preprocessing = models.Preprocessing(size=32, mean=(0.3, 0.3, 0.3), std=(0.35, 0.35, 0.35))
    images = preprocessing(training.images(range(len(training))))
    labels = torch.from_numpy(training.labels)
    torch.manual_seed(0)
    classifier = split_classifier(models.build(ARCHITECTURE, num_classes=10))
    result = train(classifier, images, labels, TRAINING, progress=lambda _: advance(1))
    say("computing source statistics, histograms and groups")
    loader = list(zip(images.split(128), labels.split(128), strict=True))
    stats = FeatureStats.fit(classifier, loader)
    source = stats.group(NUM_GROUPS, seed=0)
    needs = {
        None: None,
        "stats": source,
        "histograms": SourceHistograms.fit(classifier, loader),
        "posterior": result.posterior,
        "data": loader,
    }
    reference = Reference(stats, SourceGaussians(source, EIGENVALUE_FLOOR))
    with torch.no_grad():
        answers = classifier(preprocessing(test.images(range(len(test))))).argmax(1)
    clean = (answers == torch.from_numpy(test.labels)).double().mean().item()
    return Demo(classifier, preprocessing, needs, reference, clean, test)


def compare(demo: Demo, seeds: Sequence[int], advance: Advance = lambda _: None) -> list[MethodResult]:
    """Every method, offline, on the mixed stream of every seed. `advance` counts runs."""
    streams = {seed: demo.stream(seed) for seed in seeds}
    results = []
    for name, kind in METHODS.items():
        adapter = create(name, demo.classifier, demo.needs[kind.needs], preset="cifar")
        outcomes = []
        for seed in seeds:
            outcomes.append(run(adapter, streams[seed], "offline", demo.reference))
            advance(1)
        results.append(MethodResult(name, kind.needs, tuple(outcomes)))
    return results


def write(demo: Demo, results: list[MethodResult], seeds: Sequence[int], output: Path) -> list[Path]:
    """The figure and the numbers, in `output`."""
    output.mkdir(parents=True, exist_ok=True)
    stream = demo.stream(seeds[0])
    numbers = {
        "clean_accuracy": demo.clean_accuracy,
        "images": len(stream),
        "severity": SEVERITY,
        "seeds": list(seeds),
        "num_groups": NUM_GROUPS,
        "frost_is_standard": corruptions.frost_is_standard(),
        "methods": {
            result.name: {
                "needs": result.needs,
                "accuracy": [outcome.accuracy for outcome in result.outcomes],
                "by_corruption": [outcome.by_domain for outcome in result.outcomes],
                "frechet": [outcome.frechet for outcome in result.outcomes],
                "alignment": [outcome.alignment for outcome in result.outcomes],
                "milliseconds_per_image": [outcome.milliseconds_per_image for outcome in result.outcomes],
                "refused_steps": [outcome.refused for outcome in result.outcomes],
            }
            for result in results
        },
    }
    path = output / "results.json"
    storage.write_bytes(path, json.dumps(numbers, indent=1).encode())
    return [path, *draw_demo(demo, results, output)]
