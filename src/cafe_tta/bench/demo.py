"""The demonstration: every method on scikit-learn's handwritten digits, corrupted in 15 ways at once."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cafe_tta.bench.experiments import BASES, experiment
from cafe_tta.bench.figures import draw_demo
from cafe_tta.bench.runner import Planned, Runner
from cafe_tta.bench.source_side import SourceSide
from cafe_tta.methods import METHODS


@dataclass(frozen=True)
class MethodResult:
    """What a method did over the seeds."""

    name: str
    needs: str | None
    records: tuple[dict[str, Any], ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self._accuracies)

    @property
    def spread(self) -> float:
        return statistics.stdev(self._accuracies) if len(self.records) > 1 else 0.0

    @property
    def frechet(self) -> float:
        return statistics.mean(record["frechet_after"] for record in self.records)

    @property
    def milliseconds(self) -> float:
        return statistics.mean(1000 / record["images_per_second"] for record in self.records)

    @property
    def images(self) -> int:
        return int(self.records[0]["episode"]["images"])

    @property
    def _accuracies(self) -> list[float]:
        return [100 * record["accuracy"] for record in self.records]


def prepare(output: Path, seeds: Sequence[int], say: Callable[[str], None] = lambda _: None) -> Runner:
    """The source model, trained here where it is not there yet, and the runs that are asked for."""
    source = SourceSide(BASES["digits"], output / "source", say=say)
    one_pass = {"dann": {"iterations": 1}}  # the paper's 400 would take longer than all the rest
    chosen = experiment("mixed", "digits", methods=list(METHODS), options=one_pass, seeds=tuple(seeds))
    return Runner(chosen, source, output)


def compare(runner: Runner, started: Callable[[Planned], None] = lambda _: None) -> list[MethodResult]:
    """Every method, offline, on the mixed stream of every seed. Runs that are done already are not done again."""
    runner.work(started)
    return results(runner.results.records())


def results(records: Iterable[dict[str, Any]]) -> list[MethodResult]:
    by_method: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for record in records:
        by_method[record["method"]].append(record)
    return [MethodResult(name, found[0]["needs"], tuple(found)) for name, found in by_method.items() if found]


def draw(runner: Runner, found: list[MethodResult], output: Path) -> list[Path]:
    """The figure, in `output`."""
    return draw_demo(runner.images, found, output)
