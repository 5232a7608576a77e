"""Means and standard deviations: first over the episodes of a seed, then over the seeds."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cafe_tta.bench.report.records import Record

Measure = Callable[[Record], float | None]


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds and its sample standard deviation, of which one seed has none."""

    mean: float
    std: float | None
    seeds: tuple[int, ...]

    def text(self, decimals: int = 2) -> str:
        """As the paper prints it.

        >>> Estimate(70.064, 0.251, (0, 1, 2)).text(), Estimate(63.75, None, (0,)).text()
        ('70.06 ± 0.25', '63.75')
        """
        mean = f"{self.mean:.{decimals}f}"
        return mean if self.std is None else f"{mean} ± {self.std:.{decimals}f}"


@dataclass(frozen=True)
class Incomplete:
    """A seed that lacks episodes which others have: its mean would be of something else."""

    seed: int
    found: int
    expected: int


def over_seeds(values: Mapping[int, float]) -> Estimate | None:
    """Mean and standard deviation (n - 1) of one value a seed."""
    if not values:
        return None
    seeds = tuple(sorted(values))
    numbers = [values[seed] for seed in seeds]
    return Estimate(statistics.fmean(numbers), statistics.stdev(numbers) if len(seeds) > 1 else None, seeds)


def estimate(
    records: Iterable[Record], measure: Measure, episodes: Sequence[str]
) -> tuple[Estimate | None, list[Incomplete]]:
    """Of a measure over the seeds that have all the episodes; and the seeds that do not."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for record in records:
        value = measure(record)
        if value is not None:
            found[record.seed][record.episode] = value
    complete = {
        seed: statistics.fmean(values.values()) for seed, values in found.items() if len(values) == len(episodes)
    }
    missing = [Incomplete(seed, len(found[seed]), len(episodes)) for seed in sorted(found) if seed not in complete]
    return over_seeds(complete), missing


def ranks(values: Mapping[str, float], *, lowest: bool = False) -> dict[str, str]:
    """Which names are `best` and `second`. What looks equal in the table, with two decimals, ranks equal.

    >>> ranks({"a": 70.061, "b": 70.059, "c": 69.1, "d": 60.0})
    {'a': 'best', 'b': 'best', 'c': 'second'}
    """
    if len(values) < 2:
        return {}
    rounded = {name: round(value, 2) for name, value in values.items()}
    order = sorted(set(rounded.values()), reverse=not lowest)
    titles = dict(zip(order, ("best", "second"), strict=False))
    return {name: titles[value] for name, value in rounded.items() if value in titles}
