"""Makes the records under docs/results/ again, in another folder: `make results OUTPUT=DIR`.

Runs the commands of docs/results/commands.toml one after the other, writes a report for each folder, and compares the
new records with the committed ones (DIR/compare.md). Stopped and started again, it goes on where it was.
"""

import argparse
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from string import Template

from cafe_tta.bench import report
from cafe_tta.bench.records import RECORDS, Record, read
from cafe_tta.bench.report.columns import accuracy, over_seeds
from cafe_tta.bench.report.formats import markdown_grid
from cafe_tta.bench.report.tables import Sheet

ROOT = Path(__file__).parents[1]
RESULTS = Path("docs/results")
MODELS = Path("models")
Words = tuple[str, ...]  # of a command

# The embedded digits in place of any other images: what becomes of a flag. None: it is left out, with its value.
_STAND_IN_BENCH = {"--dataset": "digits", "--model": None, "--weights": None, "--mean": None, "--std": None}
_STAND_IN_TRAIN = {
    **dict.fromkeys(["--recipe", "--weights", "--new-head", "--image-size", "--mean", "--std"]),
    "--model": "cafe:digits-resnet",
    "--epochs": "1",
    "--swag-epochs": "1",
}
_WITHOUT_VALUE = ("--new-head",)


@dataclass(frozen=True)
class Folder:
    """A folder of records: the commands that make it, and rows that have another label in it than in the commands."""

    name: str
    commands: tuple[Words, ...]
    renamed: Mapping[str, str]
    made_by: str | None  # an earlier version, whose records no run can go on in

    @property
    def place(self) -> Path:
        """Of the committed records."""
        return RESULTS / (f"superseded/version-{self.made_by}/{self.name}" if self.made_by else self.name)

    def records(self) -> list[Record]:
        """As committed."""
        return read(ROOT / self.place / RECORDS)

    @property
    def models(self) -> list[str]:
        """The models that must be trained first."""
        words = (Path(word).parts for command in self.commands for word in command)
        return list(dict.fromkeys(parts[1] for parts in words if len(parts) > 2 and parts[0] == str(MODELS)))


@dataclass(frozen=True)
class Declared:
    """What commands.toml says."""

    words: Mapping[str, str]
    data: Mapping[str, str]
    models: Mapping[str, Words]
    folders: Mapping[str, Folder]

    @classmethod
    def load(cls, path: Path = ROOT / RESULTS / "commands.toml") -> "Declared":
        found = tomllib.loads(path.read_text())
        words: dict[str, str] = {}
        for name, text in found["words"].items():
            words[name] = Template(text).substitute(words)

        def split(text: str, output: Path) -> Words:
            return (*shlex.split(Template(text).substitute(words)), "--output", str(output))

        models = {name: split(entry["command"], MODELS / name) for name, entry in found["models"].items()}
        folders = {
            name: Folder(
                name,
                tuple(split(text, RESULTS / name) for text in entry["commands"]),
                {old: Template(new).substitute(words) for old, new in entry.get("renamed", {}).items()},
                entry.get("made_by"),
            )
            for name, entry in found["folders"].items()
        }
        return cls(words, found["data"], models, folders)

    def chosen(self, patterns: Sequence[str]) -> list[Folder]:
        """The folders whose names match one of the patterns, in the order of the file; all, where there are none."""
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in self.folders):
                raise ValueError(
                    f"expected names of folders, but got {pattern!r}; there are: {', '.join(self.folders)}"
                )
        return [f for f in self.folders.values() if not patterns or any(fnmatch(f.name, p) for p in patterns)]

    def commands(self, folders: Sequence[Folder]) -> Iterator[Words]:
        """Those of the folders, each model before the first folder that needs it."""
        trained: set[str] = set()
        for folder in folders:
            for model in folder.models:
                if model not in trained:
                    yield self.models[model]
                    trained.add(model)
            yield from folder.commands

    def missing(self, commands: Iterable[Words]) -> list[str]:
        """The data that commands read and that are not there, with what is expected."""
        names = {word.removeprefix("arrays:") for words in commands for word in words}
        missing = []
        for name, meaning in self.data.items():
            file = Path("data") / name if Path(name).suffix else Path("data") / name / "images.npy"
            if f"data/{name}" in names and not (ROOT / file).exists():
                missing.append(f"{file}: {meaning}")
        return missing


def moved(words: Words, output: Path) -> Words:
    """A command that writes to `output`, and reads from there what earlier commands have made."""

    def place(word: str) -> str:
        path = Path(word)
        if path.is_relative_to(RESULTS) and (word == words[-1] or (output / path.name / RECORDS).exists()):
            return str(output / path.relative_to(RESULTS))
        return str(output / path) if path.is_relative_to(MODELS) else word

    return tuple(map(place, words))


def limited(words: Words, limit: int) -> Words:
    """A `bench` with at most this many images in each episode."""
    if words[1] != "bench":
        return words
    if "--limit" not in words:
        return (*words, "--limit", str(limit))
    place = words.index("--limit") + 1
    return (*words[:place], str(min(limit, int(words[place]))), *words[place + 1 :])


def with_digits(words: Words) -> Words:
    """A command on the embedded digits, which need no data."""
    own_model = any(Path(word).is_relative_to(MODELS) for word in words)
    changes = _STAND_IN_TRAIN if words[1] == "train" else _STAND_IN_BENCH
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in changes and not (own_model and words[1] == "bench"):
            value = changes[word]
            if word not in _WITHOUT_VALUE:
                next(rest)
            kept += [word, value] if value else []
        elif word.startswith("arrays:data/"):
            kept.append("digits:train" if any(part in word for part in ("train", "first")) else "digits:test")
        else:
            kept.append(word)
    if own_model and words[1] == "bench":  # the data set's number is for larger networks
        kept[-2:-2] = ["--num-groups", "8"]
    return tuple(kept)


def compare(folder: Folder, output: Path) -> str:
    """The committed accuracies beside the new ones, as Markdown."""
    new = {record.key: record for record in read(output / folder.name / RECORDS)}
    sheet = Sheet(folder.name)
    sheet.heads = [("committed %",), ("here %",), ("difference",), ("answers that differ",)]
    pairs: dict[str, list[tuple[Record, Record]]] = {}
    for record in folder.records():
        protocol, mode, label, *rest = record.key
        found = new.get((protocol, mode, folder.renamed.get(label, label), *rest))
        if found is not None:
            pairs.setdefault(label, []).append((record, found))
    if not pairs:
        return f"## {folder.name}\n\nNo run in common with the committed records.\n"
    if any(_stream(old) != _stream(now) for rows in pairs.values() for old, now in rows):
        return f"## {folder.name}\n\nOther images or another model than in the committed records: not compared.\n"
    for label, rows in pairs.items():
        committed, here = (_mean(records) for records in zip(*rows, strict=True))
        sheet.put(label, f"{committed:.2f}")
        sheet.put(label, f"{here:.2f}")
        sheet.put(label, f"{here - committed:+.2f}")
        sheet.put(label, _differing(rows))
    return f"## {folder.name}\n\n{markdown_grid(sheet.table('', ('method',), {label: (label,) for label in pairs}))}"


def _stream(record: Record) -> tuple[object, ...]:
    return record.data.get("digest"), record.model.get("weights"), record.episode.digest


def _mean(records: Sequence[Record]) -> float:
    found = over_seeds(dict(enumerate(map(accuracy, records))))
    assert found is not None
    return found.mean


def _differing(rows: Sequence[tuple[Record, Record]]) -> str | None:
    """How many images only one of the two answered right; unknown where the records do not say which were."""
    hits = [(old.right, new.right) for old, new in rows]
    known = [int((old != new).sum()) for old, new in hits if old is not None and new is not None]
    images = sum(record.episode.images for record, _ in rows)
    return f"{sum(known):,} of {images:,}" if len(known) == len(rows) else None


def run(declared: Declared, folders: Sequence[Folder], output: Path, limit: int | None, stand_in: bool) -> None:
    """Runs what is missing, then writes the reports and the comparison."""
    commands = list(declared.commands(folders))
    if not stand_in and (missing := declared.missing(commands)):
        raise ValueError(
            f"expected the images and weights that the commands read, but these are missing in {ROOT}:\n  "
            + "\n  ".join(missing)
            + "\nPut them there, choose folders that do without (NAMES='unmix-cifar10-*'), or try the commands on the "
            "embedded digits (STAND_IN=1)"
        )
    for number, words in enumerate(commands, start=1):
        words = with_digits(words) if stand_in else words
        words = moved(words, output)
        words = words if limit is None else limited(words, limit)
        print(f"[{number}/{len(commands)}] {shlex.join(words)}", flush=True)
        if subprocess.run([sys.executable, "-m", "cafe_tta", *words[1:]], cwd=ROOT).returncode:
            raise ValueError(
                f"the command above failed; the same call goes on from there ({output} keeps what is done)"
            )
    for folder in folders:
        report.write(report.make([output / folder.name]))
    text = "# The committed records and the new ones\n\n" + "\n".join(compare(folder, output) for folder in folders)
    (output / "compare.md").write_text(text)
    print(f"{text}\nreports: {output}/NAME/report; this comparison: {output / 'compare.md'}")


def arguments(declared: Declared) -> argparse.ArgumentParser:
    data = "\n".join(f"  data/{name}: {meaning}" for name, meaning in declared.data.items())
    names = "\n".join(f"  {name}" for name in declared.folders)
    parser = argparse.ArgumentParser(
        prog="make results",
        usage="make results OUTPUT=DIR [NAMES='NAME …'] [LIMIT=N] [STAND_IN=1]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"The commands expect, in the folder of the repository:\n{data}\n"
        f"Arrays are images.npy (uint8, N × H × W × 3) and labels.npy in a folder of that name.\n\nNames:\n{names}",
    )
    parser.add_argument("names", nargs="*", help="NAMES: folders of docs/results, or patterns such as 'unmix-*'")
    parser.add_argument("--output", type=Path, help="OUTPUT: folder for the new records; not docs/results")
    parser.add_argument("--limit", type=int, help="LIMIT: images in each episode; the numbers are then others")
    parser.add_argument("--stand-in", action="store_true", help="STAND_IN=1: the embedded digits instead of all data")
    return parser


def main() -> None:
    declared = Declared.load()
    parser = arguments(declared)
    given = parser.parse_args()
    if given.output is None:
        parser.error("expected OUTPUT=DIR, a folder for the new records, but got none")
    output = given.output.resolve()
    if output.is_relative_to(ROOT / "docs"):
        parser.error(f"expected OUTPUT to be a folder outside docs/, but got {given.output}: committed records stay")
    try:
        run(declared, declared.chosen(given.names), output, given.limit, given.stand_in)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
