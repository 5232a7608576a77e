"""A column of a table: all runs on one data set under one protocol and mode, which must be comparable."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cafe_tta.bench.report.records import Record
from cafe_tta.methods import METHODS

DATASETS = ("digits", "cifar10", "cifar100", "imagenet", "mnist")  # the order of the columns; others come after
PROTOCOLS = ("separated", "severity-mixed", "all-mixed", "continual", "clean", "shift")
MODES = ("offline", "online")


@dataclass(frozen=True)
class Row:
    """A line of a table: a method under a label. Methods come in the order of `METHODS`."""

    label: str
    method: str
    needs: str | None

    @property
    def is_reference(self) -> bool:
        """Whether it sees source data while it adapts: shown, but not compared with those that do not."""
        return self.needs == "data"

    @property
    def order(self) -> tuple[Any, ...]:
        names = list(METHODS)
        place = names.index(self.method) if self.method in METHODS else len(names)
        return place, self.method, self.label != self.method, natural(self.label)


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
        return sorted({record.episode for record in self.records}, key=natural)

    @property
    def images(self) -> list[int]:
        """Images of an episode: one number, unless the episodes differ."""
        return sorted({record.images for record in self.records})

    @property
    def domains(self) -> list[str]:
        return sorted({domain for record in self.records for domain in record.domains}, key=natural)

    def of(self, label: str) -> list[Record]:
        return [record for record in self.records if record.label == label]


def columns(records: Iterable[Record], mode: str | None = None) -> list[Column]:
    """The columns that the records make, in the order of the paper, each checked to be comparable."""
    dealt: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        if mode in (None, record.mode):
            dealt[record.mode, record.dataset, record.protocol].append(record)
    made = []
    for key in sorted(dealt, key=lambda key: (_rank(MODES, key[0]), _rank(DATASETS, key[1]), _rank(PROTOCOLS, key[2]))):
        column = Column(key[1], key[2], key[0], tuple(dealt[key]))
        _check(column)
        made.append(column)
    return made


def rows(records: Iterable[Record]) -> list[Row]:
    """The labels that occur, in the order of `METHODS`."""
    found = {Row(record.label, record.method, record.needs) for record in records}
    return sorted(found, key=lambda row: row.order)


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts numbers inside a text as numbers.

    >>> sorted(["k=64", "k=128", "k=8"], key=natural)
    ['k=8', 'k=64', 'k=128']
    """
    parts = re.split(r"(\d+)", text)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part)


# What every run of a column must share, and the words for it.
_SAME: dict[str, Callable[[Record], Any]] = {
    "data": lambda record: record.data.get("digest"),
    "model weights": lambda record: record.model.get("weights"),
    "model": lambda record: record.model.get("architecture"),
    "preprocessing": lambda record: record.model.get("preprocessing"),
    "corruption preset": lambda record: record.corruptions.get("preset"),
    "corruption seed": lambda record: record.corruptions.get("seed"),
    "frost textures (`frost_is_standard`)": lambda record: record.corruptions.get("frost_is_standard"),
    "origin of the corrupted images (`official_files`)": lambda record: record.corruptions.get("official_files"),
}


def _check(column: Column) -> None:
    for words, value in _SAME.items():
        _check_equal(column, words, column.records, value)
    episodes, dealt, labelled = defaultdict(list), defaultdict(list), defaultdict(list)
    for record in column.records:
        episodes[record.episode].append(record)
        dealt[record.episode, record.seed].append(record)
        labelled[record.label].append(record)
    for records in episodes.values():
        _check_equal(column, "number of images", records, lambda record: record.images)
    for records in dealt.values():
        _check_equal(
            column, "images and corruptions dealt (episode digest)", records, lambda record: record.episode_digest
        )
    for label, records in labelled.items():
        _check_equal(column, f"method under the label {label!r}", records, lambda record: record.method)
        for key in sorted({key for record in records for key in record.config}):
            _check_equal(column, f"option `{key}` of {label!r}", records, partial(_option, key))
        _check_equal(column, f"source statistics of {label!r}", records, _source)


def _option(key: str, record: Record) -> Any:
    return record.config.get(key)


def _source(record: Record) -> list[Any]:
    return [record.source.get(key) for key in ("data", "count", "num_groups", "max_group_size")]


def _check_equal(column: Column, words: str, records: Iterable[Record], value: Callable[[Record], Any]) -> None:
    found: dict[str, Record] = {}
    for record in records:
        found.setdefault(json.dumps(value(record), sort_keys=True), record)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise ValueError(
            f"{column.name} ({column.mode}): the runs cannot stand in one column, because they differ in the {words}: "
            f"{_short(one)} in {first.place} ({first.label}), but {_short(other)} in {second.place} ({second.label}); "
            "report them separately, or give them different labels if only their options differ"
        )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _rank(known: tuple[str, ...], name: str) -> tuple[int, tuple[tuple[int, int, str], ...]]:
    return (known.index(name) if name in known else len(known)), natural(name)
