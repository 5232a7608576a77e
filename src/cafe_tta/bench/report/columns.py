"""Columns and rows: records grouped into runs that can be compared, and their means over episodes and seeds."""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cafe_tta import corruptions
from cafe_tta.bench.experiments import DATASETS, MODES, Row
from cafe_tta.bench.protocols import PROTOCOLS
from cafe_tta.bench.records import MAIN, Record
from cafe_tta.methods import METHODS

Value = Callable[[Record], float | None]
Order = tuple[tuple[int, float, str], ...]


@dataclass(frozen=True)
class Column:
    """Runs that may stand in one column: they met the same images with the same model."""

    dataset: str
    protocol: str
    mode: str
    records: tuple[Record, ...]

    @property
    def name(self) -> str:
        return f"{self.dataset} {self.protocol}"

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def seeds(self) -> list[int]:
        return sorted({record.seed for record in self.records})

    @property
    def episodes(self) -> list[str]:
        return sorted({record.episode.name for record in self.records}, key=natural)

    @property
    def images(self) -> list[int]:
        """Images of an episode: one number, unless the episodes differ."""
        return sorted({record.episode.images for record in self.records})

    @property
    def domains(self) -> list[str]:
        return sorted({domain for record in self.records for domain in record.episode.domains}, key=natural)

    def of(self, label: str) -> list[Record]:
        return [record for record in self.records if record.label == label]


def columns(records: Iterable[Record], mode: str | None = None) -> list[Column]:
    """The columns that the records make, in the order of the paper, each checked to be comparable."""
    dealt: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        if mode in (None, record.mode):
            dealt[record.mode, record.dataset, record.stream_name].append(record)
    made = []
    for key in sorted(dealt, key=lambda key: (rank(MODES, key[0]), rank(DATASETS, key[1]), rank(PROTOCOLS, key[2]))):
        column = Column(key[1], key[2], key[0], tuple(dealt[key]))
        _check(column)
        made.append(column)
    return made


def main_columns(records: Iterable[Record], mode: str | None = None) -> list[Column]:
    """The columns of the tables that most experiments share."""
    return columns([record for record in records if record.scope == MAIN], mode)


def rows(records: Iterable[Record]) -> list[Row]:
    """The labels that occur, in the order of `METHODS`; of one method, the label that is its name comes first."""
    return sorted({Row(record.label, record.method, record.needs) for record in records}, key=_order)


def rows_of(made: Iterable[Column]) -> list[Row]:
    """The labels that occur in any of the columns."""
    return rows(record for column in made for record in column.records)


def rank(known: Iterable[str], name: str) -> tuple[int, Order]:
    """Sorts names that are known in their order, and others after them."""
    names = list(known)
    return (names.index(name) if name in names else len(names)), natural(name)


def natural(text: str) -> Order:
    """Sorts numbers inside a text as numbers.

    >>> sorted(["k=64", "k=128", "k=8", "k=0.5"], key=natural)
    ['k=0.5', 'k=8', 'k=64', 'k=128']
    """
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return tuple((0, float(part), "") if part[:1].isdigit() else (1, 0, part) for part in parts if part)


def _order(row: Row) -> tuple[Any, ...]:
    return *rank(METHODS, row.method), row.label != row.method, natural(row.label)


# Means and standard deviations: first over the episodes of a seed, then over the seeds


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds and its sample standard deviation, which one seed does not have."""

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
    """A seed without some of the episodes that others have: its mean would be of something else."""

    seed: int
    finished: int
    expected: int


def over_seeds(values: Mapping[int, float]) -> Estimate | None:
    """Mean and standard deviation (n - 1) of one value per seed."""
    if not values:
        return None
    seeds = tuple(sorted(values))
    numbers = [values[seed] for seed in seeds]
    return Estimate(statistics.fmean(numbers), statistics.stdev(numbers) if len(seeds) > 1 else None, seeds)


def estimate(
    records: Iterable[Record], value: Value, episodes: Sequence[str]
) -> tuple[Estimate | None, list[Incomplete]]:
    """Mean of a value over the seeds that have all the episodes; and the seeds that do not."""
    by_seed: dict[int, dict[str, float]] = defaultdict(dict)
    for record in records:
        number = value(record)
        if number is not None:
            by_seed[record.seed][record.episode.name] = number
    complete = {
        seed: statistics.fmean(values.values()) for seed, values in by_seed.items() if len(values) == len(episodes)
    }
    missing = [Incomplete(seed, len(by_seed[seed]), len(episodes)) for seed in sorted(by_seed) if seed not in complete]
    return over_seeds(complete), missing


def estimates(
    column: Column, lines: Sequence[Row], value: Value
) -> tuple[dict[str, Estimate], dict[str, list[Incomplete]]]:
    """The estimate of each label that has a complete seed, and the seeds that are not complete."""
    complete, incomplete = {}, {}
    for row in lines:
        number, missing = estimate(column.of(row.label), value, column.episodes)
        if number:
            complete[row.label] = number
        if missing:
            incomplete[row.label] = missing
    return complete, incomplete


def accuracy(record: Record) -> float:
    """In per cent."""
    return 100 * record.accuracy


def by_corruption(records: Sequence[Record]) -> dict[str, Estimate]:
    """Accuracy in per cent on each corruption: the mean over its severities, then over seeds."""
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for domain, share in record.by_domain.items():
            values[corruption_of(domain)][record.seed].append(100 * share)
    means = {
        name: over_seeds({seed: statistics.fmean(v) for seed, v in seeds.items()}) for name, seeds in values.items()
    }
    return {name: value for name, value in means.items() if value}


def corruption_of(domain: str) -> str:
    """The corruption of a domain, without its severity.

    >>> corruption_of("fog-5"), corruption_of("clean")
    ('fog', 'clean')
    """
    name, _, severity = domain.rpartition("-")
    return name if severity.isdigit() else domain


def corruptions_of(column: Column) -> list[str]:
    """The corruptions of a column, in the paper's order."""
    names = {corruption_of(domain) for record in column.records for domain in record.by_domain}
    return sorted(names, key=lambda name: rank(corruptions.NAMES, name))


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


def ranked(lines: Sequence[Row], values: Mapping[str, Any], *, lowest: bool = False) -> dict[str, str]:
    """The ranks of estimates, without the rows that are shown only for reference."""
    rivals = {row.label for row in lines if not row.is_reference}
    return ranks({label: value.mean for label, value in values.items() if label in rivals}, lowest=lowest)


# What every run of a column must share, and the words for it

_SAME: dict[str, Callable[[Record], Any]] = {
    "data": lambda record: record.data.get("digest"),
    "model weights": lambda record: record.model.get("weights"),
    "model": lambda record: record.model.get("architecture"),
    "preprocessing": lambda record: record.model.get("preprocessing"),
    "corruption preset": lambda record: record.corruptions.get("preset"),
    "corruption seed": lambda record: record.corruptions.get("seed"),
    "frost textures (`frost_is_standard`)": lambda record: record.corruptions.get("frost_is_standard"),
    "pace of the stream": lambda record: record.pace.get("setting"),
    "origin of the corrupted images (`official_files`)": lambda record: record.corruptions.get("official_files"),
}


# Hashes that records of versions up to 0.2.0 lack.
_SOURCE_HASHES = {"digest": "source images", "chosen": "choice of source images"}


def _check(column: Column) -> None:
    for words, value in _SAME.items():
        _check_equal(column, words, column.records, value)
    episodes, dealt, labelled = defaultdict(list), defaultdict(list), defaultdict(list)
    for record in column.records:
        episodes[record.episode.name].append(record)
        dealt[record.episode.name, record.seed].append(record)
        labelled[record.label].append(record)
    for records in episodes.values():
        _check_equal(column, "number of images", records, lambda record: record.episode.images)
    for records in dealt.values():
        words = "images and corruptions dealt (episode digest)"
        _check_equal(column, words, records, lambda record: record.episode.digest)
        _check_equal(column, "corruptions of an episode", records, lambda record: record.episode.domains)
        _check_once(column, records)
    for label, records in labelled.items():
        _check_equal(column, f"method under the label {label!r}", records, lambda record: record.method)
        for key in sorted({key for record in records for key in record.config}):
            _check_equal(column, f"option `{key}` of {label!r}", records, partial(_option, key))
        _check_equal(column, f"source statistics of {label!r}", records, _source)
        for key, words in _SOURCE_HASHES.items():
            known = [record for record in records if record.source.get(key) is not None]
            _check_equal(column, f"{words} of {label!r}", known, partial(_source_fact, key))


def _option(key: str, record: Record) -> Any:
    return record.config.get(key)


def _source_fact(key: str, record: Record) -> Any:
    return record.source.get(key)


def _check_once(column: Column, records: Iterable[Record]) -> None:
    """One run of a label, episode and seed: a second one would silently take the place of the first."""
    seen: dict[str, Record] = {}
    for record in records:
        first = seen.setdefault(record.label, record)
        if first is not record:
            raise ValueError(
                f"{column.name} ({column.mode}): {first.origin} and {record.origin} are both {record.label} with seed "
                f"{record.seed} on {record.episode.name}, but differ in what they used of the source; report them "
                "separately, or remove one of the two lines"
            )


def _source(record: Record) -> list[Any]:
    return [record.source.get(key) for key in ("data", "count", "num_groups", "max_group_size")]


def _check_equal(column: Column, words: str, records: Iterable[Record], value: Callable[[Record], Any]) -> None:
    values: dict[str, Record] = {}
    for record in records:
        values.setdefault(json.dumps(value(record), sort_keys=True), record)
    if len(values) > 1:
        (one, first), (other, second) = list(values.items())[:2]
        raise ValueError(
            f"{column.name} ({column.mode}): the runs cannot stand in one column, because they differ in the {words}: "
            f"{_short(one)} in {first.origin} ({first.label}), but {_short(other)} in {second.origin} "
            f"({second.label}); report them separately, or give them different labels if only their options differ"
        )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
