"""Records: one JSON line for every finished run, with everything that decided its number.

A folder of results holds `settings.json`, which says what its runs have in common, and `records.jsonl`. A line is
flushed to disk before the next run begins; a line that was cut off by a crash is dropped, and its run is done again.
Several processes may write to the same folder: they lock the file while they write.
"""

import base64
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from cafe_tta import storage
from cafe_tta.bench.experiments import EXPERIMENTS
from cafe_tta.bench.protocols import PROTOCOLS, EpisodeSummary
from cafe_tta.display import Displayed
from cafe_tta.locking import lock_file

FORMAT = 1
SETTINGS, RECORDS = "settings.json", "records.jsonl"
LOCKED = 60.0  # seconds to wait for a file that another process writes to; it takes milliseconds
MAIN = "main"  # the tables that most experiments share

_VERSION = "versions.cafe_tta"
_LEFT_OUT = {"model.preprocessing.interpolation", "pace"}  # of settings, where they are what they always were

Facts = dict[str, Any]
Hits = npt.NDArray[np.bool_]  # (n,)


@dataclass(frozen=True, repr=False)
class Record(Displayed):
    """One run: a method on one episode with one seed, everything that decided its result, and the result.

    The runner builds it, a line of `records.jsonl` holds it under the same names, and the report reads it.
    """

    experiment: str
    dataset: str
    protocol: str
    mode: str
    method: str
    label: str
    needs: str | None
    config: Facts
    seed: int
    episode: EpisodeSummary
    data: Facts
    corruptions: Facts
    model: Facts
    source: Facts
    limit: int | None
    copies: int
    accuracy: float  # share of images answered right
    by_domain: dict[str, float]
    stream: tuple[float, ...]  # accuracy of consecutive blocks of the answers given while adapting
    frechet_before: float | None
    frechet_after: float | None
    alignment_before: float | None
    alignment_after: float | None
    seconds: float
    peak_memory_mb: float | None  # of the process during the run
    steps: int
    refused: int
    versions: Facts
    machine: Facts
    command: str  # the command line that ran it
    finished: str
    # Records of versions up to 0.2.0 have none of these.
    code: Facts = field(default_factory=dict)  # the commit, and whether files differ from it
    hits: str | None = None  # which images were answered right, in the order of the episode: see `right`
    calibration_error: float | None = None  # see `metrics.calibration_error`
    forward_images: int | None = None  # images through the network, in the time that `seconds` counts
    backward_images: int | None = None  # images through which a gradient came back
    run_memory_mb: float | None = None  # peak of the run, less what was in use when it began
    pace: Facts = field(default_factory=dict)  # of a stream that did not wait: setting, cost of a batch, images missed
    origin: str = ""  # file and line that it was read from, for errors; not recorded

    def facts(self) -> Mapping[str, Any]:
        stream = f"{self.dataset}, {self.protocol}, {self.mode}, {self.episode.name}"
        accuracy = f"{100 * self.accuracy:.2f} %"
        return {"run": f"{self.label} on {stream}", "seed": self.seed, "accuracy": accuracy, "steps": self.steps}

    @property
    def key(self) -> tuple[Any, ...]:
        """What a run is within a folder: two records with the same key are of the same run."""
        return (self.protocol, self.mode, self.label, self.seed, self.episode.name)

    @property
    def num_groups(self) -> int | None:
        return self.source.get("num_groups")

    @property
    def images_per_second(self) -> float | None:
        return self.episode.images / self.seconds if self.seconds else None

    @property
    def stream_name(self) -> str:
        """The protocol, and whether the stream waited for the method: what a column of a table has in common."""
        return f"{self.protocol}, time-limited" if self.pace else self.protocol

    @property
    def right(self) -> Hits | None:
        """Which images were answered right, in the order of the episode; None where it was not recorded."""
        return None if self.hits is None else unpacked(self.hits, self.episode.images)

    @property
    def worst_domain(self) -> str | None:
        """The corruption with the lowest accuracy."""
        return min(self.by_domain, key=lambda name: self.by_domain[name], default=None)

    @property
    def scope(self) -> str:
        """The tables it belongs to: those of its experiment or protocol, or the main ones."""
        if self.experiment in EXPERIMENTS and EXPERIMENTS[self.experiment].own_tables:
            return self.experiment
        return self.protocol if self.protocol in PROTOCOLS and PROTOCOLS[self.protocol].table else MAIN

    @property
    def run(self) -> str:
        """What makes it this run and no other, among the records of all folders."""
        names = (self.scope, self.dataset, self.protocol, self.mode, self.method, self.label, self.seed)
        episode = (self.episode.name, self.episode.images, self.episode.digest)
        pace = (self.pace.get("setting"),) if self.pace else ()
        settings = (*episode, self.config, self.data, self.corruptions, self.model, self.source, *pace)
        return json.dumps([names, settings], sort_keys=True)

    def to_json(self) -> Facts:
        """The record as it stands in the file."""
        facts = {"format": FORMAT, **asdict(self), "images_per_second": self.images_per_second}
        del facts["origin"]
        return facts

    @classmethod
    def from_json(cls, raw: Any, origin: str = "") -> "Record":
        """The record that a line of a file holds, checked; `origin` is where it stands, for errors."""
        if not isinstance(raw, dict):
            raise ValueError(f"{origin}: expected a JSON object, but got {type(raw).__name__}")
        if raw.get("format") != FORMAT:
            raise ValueError(
                f"{origin}: record format {raw.get('format')!r}, but this release reads format {FORMAT}; "
                "make the report with the release that ran the benchmark, or run it again"
            )
        get = _Getter(raw, origin)
        facts: Facts = {name: get.text(name) for name in ("experiment", "dataset", "protocol", "mode", "method")}
        facts |= {name: get.text(name, "") for name in ("command", "finished")}
        facts |= {name: get.facts(name) for name in ("config", "data", "corruptions", "model", "source")}
        facts |= {name: get.facts(name) for name in ("versions", "machine")}
        facts |= {name: get.whole(name) for name in ("seed", "steps", "refused")}
        facts |= {name: get.number(name) for name in ("frechet_before", "frechet_after", "peak_memory_mb")}
        facts |= {name: get.number(name) for name in ("alignment_before", "alignment_after")}
        facts |= {name: get.number(name) for name in ("calibration_error", "run_memory_mb")}
        facts |= {name: get.optional(name) for name in ("forward_images", "backward_images")}
        return cls(
            label=get.text("label", get.text("method")),
            needs=get.text("needs", "") or None,
            episode=EpisodeSummary(
                name=get.text("episode.name"),
                images=get.whole("episode.images", least=1),
                domains=get.facts("episode.domains"),
                digest=get.text("episode.digest", ""),
            ),
            limit=get.optional("limit"),
            copies=1 if raw.get("copies") is None else get.whole("copies"),
            code=get.facts("code"),
            pace=get.facts("pace"),
            hits=get.hits("hits"),
            accuracy=get.share("accuracy"),
            by_domain={name: get.share("by_domain", name) for name in get.facts("by_domain")},
            stream=get.shares("stream"),
            seconds=get.number("seconds") or 0.0,
            origin=origin,
            **facts,
        )


class _Getter:
    """Fields of a raw record, or an error that names the line, the field and what came."""

    def __init__(self, raw: Facts, origin: str) -> None:
        self._raw, self._origin = raw, origin

    def _value(self, name: str) -> Any:
        value: Any = self._raw
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def _error(self, name: str, expected: str, value: Any) -> ValueError:
        return ValueError(f"{self._origin}: expected `{name}` to be {expected}, but got {value!r}")

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or (default is None and not value):
            raise self._error(name, "a text", value)
        return value

    def facts(self, name: str) -> Facts:
        value = self._value(name)
        if value is not None and not isinstance(value, dict):
            raise self._error(name, "an object", value)
        return value or {}

    def whole(self, name: str, least: int = 0) -> int:
        value = self._value(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._error(name, f"a whole number of at least {least}", value)
        return value

    def optional(self, name: str) -> int | None:
        return None if self._value(name) is None else self.whole(name)

    def hits(self, name: str) -> str | None:
        text, images, share = self._value(name), self.whole("episode.images", least=1), self.share("accuracy")
        if text is None:
            return None
        try:
            right = unpacked(text, images)
        except (TypeError, ValueError):
            raise self._error(name, f"{images} bits in base64", text) from None
        if not math.isclose(right.mean(), share, abs_tol=1e-9):
            found = f"{right.sum()} of {images}"
            raise self._error(name, f"as many right answers as the accuracy of {share} says", found)
        return str(text)

    def number(self, name: str) -> float | None:
        value = self._value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._error(name, "a finite number or null", value)
        return float(value)

    def share(self, name: str, inside: Any = None) -> float:
        value = self._value(name) if inside is None else self._raw[name][inside]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self._error(name if inside is None else f"{name}[{inside!r}]", "a share between 0 and 1", value)
        return float(value)

    def shares(self, name: str) -> tuple[float, ...]:
        value = self._value(name)
        if value is not None and not isinstance(value, list):
            raise self._error(name, "a list", value)
        return tuple(self.share(name, index) for index in range(len(value or ())))


class Results:
    """A folder of records that belong together."""

    def __init__(self, folder: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.waiting: Callable[[], None] = lambda: None  # called repeatedly while another process has the file
        self.folder.mkdir(parents=True, exist_ok=True)
        self.settings = json.loads(json.dumps(settings))  # as it comes back from the file
        path = self.folder / SETTINGS
        if path.exists() and read(self.folder / RECORDS):
            _require_same(json.loads(path.read_text()), self.settings, str(path))
        elif not path.exists() and (self.folder / RECORDS).exists():
            raise ValueError(f"{self.folder} has {RECORDS} but no {SETTINGS}: choose another folder for new results")
        else:  # nothing is recorded yet: a first attempt that failed has no say
            storage.write_bytes(path, json.dumps(self.settings, indent=1, sort_keys=True).encode())
        self.dropped = False
        self._done: dict[tuple[Any, ...], Record] = {}
        if (self.folder / RECORDS).exists():
            with lock_file(self.folder / RECORDS, LOCKED, self.waiting) as file:
                self.dropped = _drop_unfinished_line(file)
                self._done = {record.key: record for record in read(self.folder / RECORDS)}

    def __len__(self) -> int:
        return len(self._done)

    def find(self, key: tuple[Any, ...], config: Any, digest: str | None = None) -> Record | None:
        """The record of a run that is done already, made with the same options.

        What the run did where an option did not exist yet is not known here: then the folder is refused. So it is
        where the file of a method from outside, of which there is a `digest`, has changed since.
        """
        record = self._done.get(key)
        if record is not None:
            where = f"{self.folder / RECORDS} ({record.label}, seed {record.seed})"
            _require_same({"config": record.config}, {"config": asdict(config)}, where)
            if digest is not None and record.code.get("method", digest) != digest:
                raise ValueError(
                    f"{where} was recorded before the file of {record.method} was changed; choose another folder for "
                    "new runs (--output DIR)"
                )
        return record

    def add(self, record: Record) -> None:
        """Appends a record to the file and flushes it to disk."""
        line = json.dumps(record.to_json(), sort_keys=True).encode() + b"\n"
        with lock_file(self.folder / RECORDS, LOCKED, self.waiting) as file:
            _drop_unfinished_line(file)  # of a process that has crashed since
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._done[record.key] = Record.from_json(json.loads(line), str(self.folder / RECORDS))


def read(path: Path) -> list[Record]:
    """All records of a file, without an unfinished last line; none where there is no file."""
    return _read_file(path)[0] if path.exists() else []


def collect(paths: Sequence[Path]) -> tuple[list[Record], list[str]]:
    """The records of files, or of folders that hold a `records.jsonl`, and notes on what was left out.

    The order of the files does not matter: the records come sorted.
    """
    if not paths:
        raise ValueError("expected at least one folder or file of results, but got none")
    records: list[Record] = []
    notes: list[str] = []
    for path in files(paths):
        more, remarks = _read_file(path)
        records, notes = records + more, notes + remarks
    if not records:
        raise ValueError(f"no finished run in {', '.join(map(str, paths))}; let the benchmark finish at least one")
    return _without_repeats(sorted(records, key=lambda record: (record.run, record.origin)), notes), notes


def files(paths: Iterable[Path]) -> list[Path]:
    """The files of records that files and folders stand for, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        file = path / RECORDS if path.is_dir() else path
        if not file.is_file():
            problem = f"{path} holds no {RECORDS}" if path.is_dir() else f"there is no file or folder {path}"
            raise FileNotFoundError(f"{problem}; expected the folder that a benchmark wrote its results to")
        found.setdefault(file.resolve(), file)  # the same file named twice is read once
    return list(found.values())


def _read_file(path: Path) -> tuple[list[Record], list[str]]:
    """The records of a file, and a note where its last line is unfinished."""
    records: list[Record] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            raw = json.loads(line.decode())
        except ValueError as error:  # also of UnicodeDecodeError
            if number == len(lines):  # no newline after it: the run that wrote it was stopped
                return records, [f"{origin} is unfinished and was left out"]
            raise ValueError(f"{origin} is not a JSON record ({error}); remove the line or restore the file") from None
        records.append(Record.from_json(raw, origin))
    return records, []


def _without_repeats(records: list[Record], notes: list[str]) -> list[Record]:
    """One record of each run. Two that disagree are refused: a report does not choose between numbers."""
    kept: dict[str, Record] = {}
    repeated = 0
    for record in records:
        first = kept.setdefault(record.run, record)
        if first is not record:
            if (first.accuracy, first.by_domain) != (record.accuracy, record.by_domain):
                raise ValueError(
                    f"{first.origin} and {record.origin} are the same run ({record.label}, {record.dataset} "
                    f"{record.protocol}, {record.mode}, {record.episode.name}, seed {record.seed}) but disagree: "
                    f"accuracy {first.accuracy:.6f} and {record.accuracy:.6f}; remove one of the two lines"
                )
            repeated += 1
    if repeated:
        notes.append(f"{repeated} repeated {'run' if repeated == 1 else 'runs'} counted once")
    return list(kept.values())


def _drop_unfinished_line(file: IO[bytes]) -> bool:
    """Removes what a crash left of a line. Only a whole line ends in a line break."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    if file.read() in (b"", b"\n"):
        return False
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
    return True


def _require_same(theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> None:
    """Raises where settings differ, or where another version of this package recorded them."""
    there, here = storage.flat(theirs), storage.flat(json.loads(json.dumps(ours)))
    common = (there.keys() & here.keys() - {_VERSION}) | ((there.keys() ^ here.keys()) & _LEFT_OUT)
    if shown := storage.differences({n: there.get(n) for n in common}, {n: here.get(n) for n in common}):
        raise ValueError(
            f"{where} belongs to other settings: {shown}; choose another folder for these results (--output DIR)"
        )
    if strange := sorted((there.keys() ^ here.keys()) - common):
        known = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        why = f"only one of the two versions knows {known}"
    elif there.get(_VERSION) != here.get(_VERSION):
        why = f"{there[_VERSION]} there, {here[_VERSION]} here"
    else:
        return
    raise ValueError(
        f"{where} was recorded by another version of cafe-tta ({why}), whose numbers may differ from new ones; choose "
        "another folder for new runs: `cafe-tta report` joins folders, where their runs can be compared"
    )


def packed(right: Hits) -> str:
    """Right and wrong answers as bits in base64: 1.7 kB for 10,000 images.

    >>> packed(np.array([True, False, False, True])), unpacked("kA==", 4).tolist()
    ('kA==', [True, False, False, True])
    """
    return base64.b64encode(np.packbits(right).tobytes()).decode()


def unpacked(text: str, count: int) -> Hits:
    """What `packed` packed."""
    content = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    if len(content) != -(-count // 8):
        raise ValueError(f"expected {count} bits, but got {8 * len(content)}")
    return np.unpackbits(content, count=count).astype(bool)
