"""Records of finished runs, read back: one JSON object a line, checked before a number of it is believed."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cafe_tta.bench.records import FORMAT, RECORDS

MOMENTS = ("before", "after")
# Experiments, and protocols, with tables of their own. All other runs share the main tables.
OWN_EXPERIMENTS = ("dann", "groups", "group-sizes", "frechet")
OWN_PROTOCOLS = ("shift", "clean")
MAIN = "main"

Facts = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """One method on one episode with one seed. The names are those of the file."""

    place: str  # file and line, for errors
    experiment: str
    dataset: str
    protocol: str
    mode: str
    method: str
    label: str
    needs: str | None
    config: Facts
    seed: int
    episode: str
    images: int
    domains: dict[str, int]
    episode_digest: str
    data: Facts
    corruptions: Facts
    model: Facts
    source: Facts
    accuracy: float
    by_domain: dict[str, float]
    stream: tuple[float, ...]
    frechet_before: float | None
    frechet_after: float | None
    alignment_before: float | None
    alignment_after: float | None
    seconds: float
    peak_memory_mb: float | None
    steps: int
    refused: int
    versions: Facts
    machine: Facts
    command: str
    finished: str

    @property
    def num_groups(self) -> int | None:
        return self.source.get("num_groups")

    @property
    def scope(self) -> str:
        """The tables it belongs to: those of its experiment or protocol, or the main ones."""
        if self.experiment in OWN_EXPERIMENTS:
            return self.experiment
        return self.protocol if self.protocol in OWN_PROTOCOLS else MAIN

    @property
    def run(self) -> str:
        """What makes it this run and no other: two records with the same text are the same run."""
        facts = (self.scope, self.dataset, self.protocol, self.mode, self.method, self.label, self.seed)
        settings = (
            self.episode,
            self.images,
            self.episode_digest,
            self.config,
            self.data,
            self.corruptions,
            self.model,
            self.source,
        )
        return json.dumps([facts, settings], sort_keys=True)


def read(paths: Sequence[Path]) -> tuple[list[Record], list[str]]:
    """The records of files, or of folders that hold a `records.jsonl`, and notes on what was left out.

    The order of the files does not matter: the records come sorted.
    """
    if not paths:
        raise ValueError("expected at least one folder or file of results, but got none")
    records: list[Record] = []
    notes: list[str] = []
    for path in _files(paths):
        records += _read_file(path, notes)
    if not records:
        raise ValueError(f"no finished run in {', '.join(map(str, paths))}; let the benchmark finish at least one")
    return _without_repeats(sorted(records, key=lambda record: (record.run, record.place)), notes), notes


def _files(paths: Iterable[Path]) -> list[Path]:
    files: dict[Path, Path] = {}
    for path in paths:
        file = path / RECORDS if path.is_dir() else path
        if not file.is_file():
            place = f"{path} holds no {RECORDS}" if path.is_dir() else f"there is no file or folder {path}"
            raise FileNotFoundError(f"{place}; expected the folder that a benchmark wrote its results to")
        files.setdefault(file.resolve(), file)  # the same file named twice is read once
    return list(files.values())


def _read_file(path: Path, notes: list[str]) -> list[Record]:
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            raw = json.loads(line.decode())
        except ValueError as error:  # also of UnicodeDecodeError
            if number == len(lines):  # no newline after it: the run that wrote it was stopped
                notes.append(f"{place} is unfinished and was left out")
                continue
            raise ValueError(f"{place} is not a JSON record ({error}); remove the line or restore the file") from None
        records.append(_record(raw, place))
    return records


def _without_repeats(records: list[Record], notes: list[str]) -> list[Record]:
    """One record of each run. Two that disagree are refused: a report does not choose between numbers."""
    kept: dict[str, Record] = {}
    repeated = 0
    for record in records:
        first = kept.setdefault(record.run, record)
        if first is not record:
            if (first.accuracy, first.by_domain) != (record.accuracy, record.by_domain):
                raise ValueError(
                    f"{first.place} and {record.place} are the same run ({record.label}, {record.dataset} "
                    f"{record.protocol}, {record.mode}, {record.episode}, seed {record.seed}) but disagree: accuracy "
                    f"{first.accuracy:.6f} and {record.accuracy:.6f}; remove one of the two lines"
                )
            repeated += 1
    if repeated:
        notes.append(f"{repeated} repeated {'run' if repeated == 1 else 'runs'} counted once")
    return list(kept.values())


def _record(raw: Any, place: str) -> Record:
    if not isinstance(raw, dict):
        raise ValueError(f"{place}: expected a JSON object, but got {type(raw).__name__}")
    if raw.get("format") != FORMAT:
        raise ValueError(
            f"{place}: record format {raw.get('format')!r}, but this release reads format {FORMAT}; "
            "make the report with the release that ran the benchmark, or run it again"
        )
    get = _Getter(raw, place)
    facts: Facts = {name: get.text(name) for name in ("experiment", "dataset", "protocol", "mode", "method")}
    facts |= {name: get.facts(name) for name in ("config", "data", "corruptions", "model", "source")}
    facts |= {name: get.facts(name) for name in ("versions", "machine")}
    facts |= {
        f"{name}_{moment}": get.number(f"{name}_{moment}") for name in ("frechet", "alignment") for moment in MOMENTS
    }
    facts |= {name: get.whole(name) for name in ("seed", "steps", "refused")}
    facts |= {name: get.text(name, "") for name in ("command", "finished")}
    return Record(
        place=place,
        label=get.text("label", get.text("method")),
        needs=get.text("needs", "") or None,
        episode=get.text("episode.name"),
        images=get.whole("episode.images", least=1),
        domains=get.facts("episode.domains"),
        episode_digest=get.text("episode.digest", ""),
        accuracy=get.share("accuracy"),
        by_domain={name: get.share("by_domain", name) for name in get.facts("by_domain")},
        stream=get.shares("stream"),
        seconds=get.number("seconds") or 0.0,
        peak_memory_mb=get.number("peak_memory_mb"),
        **facts,
    )


class _Getter:
    """Fields of a raw record, or an error that names the place, the field and what came."""

    def __init__(self, raw: Facts, place: str) -> None:
        self._raw, self._place = raw, place

    def _find(self, name: str) -> Any:
        value: Any = self._raw
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def _refuse(self, name: str, expected: str, value: Any) -> ValueError:
        return ValueError(f"{self._place}: expected `{name}` to be {expected}, but got {value!r}")

    def text(self, name: str, default: str | None = None) -> str:
        value = self._find(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or (default is None and not value):
            raise self._refuse(name, "a text", value)
        return value

    def facts(self, name: str) -> Facts:
        value = self._find(name)
        if value is not None and not isinstance(value, dict):
            raise self._refuse(name, "an object", value)
        return value or {}

    def whole(self, name: str, least: int = 0) -> int:
        value = self._find(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._refuse(name, f"a whole number of at least {least}", value)
        return value

    def number(self, name: str) -> float | None:
        value = self._find(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._refuse(name, "a finite number or null", value)
        return float(value)

    def share(self, name: str, inside: Any = None) -> float:
        value = self._find(name) if inside is None else self._raw[name][inside]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self._refuse(name if inside is None else f"{name}[{inside!r}]", "a share between 0 and 1", value)
        return float(value)

    def shares(self, name: str) -> tuple[float, ...]:
        value = self._find(name)
        if value is not None and not isinstance(value, list):
            raise self._refuse(name, "a list", value)
        return tuple(self.share(name, place) for place in range(len(value or ())))
