"""Writes the tables and commands of the docs, from the records under docs/results/: python docs/tables.py.

A page has `<!-- table: NAME -->` or `<!-- command: NAME … -->`, then what this script writes, then `<!-- end -->`.
Tables are those of `TABLES` below; commands are those of docs/results/commands.toml. tests/test_results.py asserts that
every page is what this script would write.
"""

import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from cafe_tta.bench import paper
from cafe_tta.bench.experiments import Row, labelled
from cafe_tta.bench.rates import accuracies, best_rate
from cafe_tta.bench.records import RECORDS, Record, collect
from cafe_tta.bench.report.columns import (
    Column,
    Value,
    accuracy,
    by_corruption,
    columns,
    corruptions_of,
    estimates,
    ranked,
    rows,
)
from cafe_tta.bench.report.formats import markdown_grid
from cafe_tta.bench.report.paired import Interval, by_seed, paired
from cafe_tta.bench.report.searched import rates_tables
from cafe_tta.bench.report.tables import (
    Cell,
    Line,
    Table,
    calibration_error,
    cost,
    needs_text,
    printed,
    published_text,
    worst_corruption,
)

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from reproduce import RESULTS, ROOT, Declared, Words  # noqa: E402 - beside this script

BLOCK = re.compile(r"^(<!-- (table|command): ([^>]+?) -->\n).*?^(<!-- end -->)$", re.DOTALL | re.MULTILINE)
WIDTH = 116  # of a line of a command
EARLIER = "cafe-plus of 0.1"  # the row `cafe-plus` of records that version 0.1 made
BEFORE = 20_000  # images: the default window of `unmix` when some of the records were made
RIVALS = ("rivals-cifar10-online", "rivals-cifar10-cotta", "rivals-cifar10-ttac", "unmix-cifar10-online")
RIVALS_OFFLINE = ("cifar10-mixed", "rivals-cifar10-offline")
SEARCHED, TUNED = "rates-held-out", "rivals-cifar10-tuned"
FIRST_MIXED = "superseded/version-0.1/cifar10-mixed"  # beside other records of version 0.1
SEPARATED_ONLINE = "separated-cifar10-online"
# By a network whose modes agree:
AGREE, AGREE_OFFLINE, AGREE_CLEAN = "agree-cifar10-online", "agree-cifar10-offline", "agree-cifar10-clean"
AGREE_RIVALS, AGREE_GROUPS, AGREE_PLUS = "agree-cifar10-rivals", "agree-groups-held-out", "agree-plus-held-out"
AGREE_SEARCHED, AGREE_TUNED = "agree-rates-held-out", "agree-cifar10-tuned"
GROUPNORM = "groupnorm-cifar10-online"


@cache
def column(*folders: str) -> Column:
    """The one column that the records of some folders make together."""
    declared = Declared.load().folders
    places = [declared[name].place if name in declared else RESULTS / name for name in folders]
    records, _ = collect([ROOT / place / RECORDS for place in places])
    (made,) = columns(records)
    return made


def name_of(label: str, source: Column) -> str:
    """What a row is called in the docs."""
    record = source.of(label)[0]
    if label == RECIPE:
        return "infomax, options of cafe-plus"
    if label == "unmix" and record.config["window"] == BEFORE:
        return f"unmix(window={BEFORE})"
    return label.replace("cafe-plus", EARLIER) if record.versions.get("cafe_tta", "").startswith("0.1.") else label


def only(source: Column, labels: Sequence[str]) -> Column:
    """Some of the rows."""
    return replace(source, records=tuple(record for record in source.records if record.label in labels))


# Fields: what stands in a column of a table, by the label of the row


@dataclass(frozen=True)
class Field:
    """A column of a table: a text for each row that has one, and the rows that are best."""

    head: str
    texts: Mapping[str, str]
    best: Iterable[str] = ()

    def cell(self, key: str) -> Cell:
        return Cell(self.texts.get(key, ""), "best" if key in self.best else "")


def measured(head: str, source: Column, value: Value, lowest: bool = False, bold: bool = True) -> Field:
    """The mean over seeds of a value of the records, with its spread."""
    lines = rows(source.records)
    found, _ = estimates(source, lines, value)
    best = [label for label, rank in ranked(lines, found, lowest=lowest).items() if rank == "best"] if bold else []
    return Field(head, {label: number.text() for label, number in found.items()}, best)


def share(head: str, *folders: str, bold: bool = True) -> Field:
    return measured(head, column(*folders), accuracy, bold=bold)


def frechet(*folders: str, bold: bool = True) -> Field:
    return measured("Fréchet distance", column(*folders), _distance, lowest=True, bold=bold)


def papers(*folders: str, head: str = "the paper's") -> Field:
    source = column(*folders)
    return Field(head, {row.label: published_text(printed(source, row)) for row in rows(source.records)})


def counted(head: str, folder: str, value: Callable[[Record], object]) -> Field:
    """Of the first run of a row."""
    source = column(folder)
    return Field(head, {row.label: str(value(source.of(row.label)[0])) for row in rows(source.records)})


def picked(head: str, source: Field, keys: Mapping[str, str]) -> Field:
    """The cells of some rows of a field, under other keys."""
    texts = {key: source.texts[label] for key, label in keys.items()}
    return Field(head, texts, [key for key, label in keys.items() if label in source.best])


def grid(stub: str | Sequence[str], lines: Mapping[str, str | Sequence[str]], fields: Sequence[Field]) -> str:
    """The table as Markdown: a line for each key, with its heads."""
    names = (stub,) if isinstance(stub, str) else tuple(stub)
    heads = {key: (head,) if isinstance(head, str) else tuple(head) for key, head in lines.items()}
    made = tuple(Line(head, tuple(field.cell(key) for field in fields)) for key, head in heads.items())
    return plain(markdown_grid(Table("", "", names, tuple((field.head,) for field in fields), made)))


def plain(text: str) -> str:
    """Markdown whose own texts mean what they say."""
    return re.sub(r"\\([\[\]`_])", r"\1", text)


def by_method(source: Column, *fields: Field) -> str:
    """A line for each row of a column, in the order of the reports."""
    return grid("method", {row.label: name_of(row.label, source) for row in rows(source.records)}, fields)


# The paper's claims


@dataclass(frozen=True)
class Stream:
    """What a claim is looked at on: the records of some folders."""

    title: str
    folders: tuple[str, ...]
    compared: bool = True  # with the paper's difference


@dataclass(frozen=True)
class Claim:
    """That one row is better than another."""

    text: str
    row: str
    than: str
    streams: tuple[Stream, ...]
    value: Value = accuracy
    lower: bool = False  # is better

    def lines(self) -> Iterator[tuple[str, ...]]:
        for number, stream in enumerate(self.streams):
            source = column(*stream.folders)
            differences, image = paired(source, self.row, self.than, self.value)
            interval = image.interval if image and self.value is accuracy else by_seed(list(differences.values()))
            mean = statistics.fmean(differences.values())
            how = "by image" if image and self.value is accuracy else "by seed"
            seeds = "one seed" if len(differences) == 1 else f"{len(differences)} seeds"
            found = f"{mean:+.2f} {interval.text()} {how}, {seeds}" if interval else f"{mean:+.2f}, one seed"
            theirs = self._printed(source) if stream.compared else "–"
            yield "" if number else self.text, stream.title, theirs, found, self.verdict(mean, interval)

    def _printed(self, source: Column) -> str:
        """The paper's difference, where it prints both rows."""
        if self.value is not accuracy:
            return "–"
        ours, theirs = (printed(source, Row(label, label, None)) for label in (self.row, self.than))
        both = isinstance(ours, paper.Accuracy) and isinstance(theirs, paper.Accuracy)
        return f"{ours.mean - theirs.mean:+.2f}" if both else "–"

    def verdict(self, mean: float, interval: Interval | None) -> str:
        holds = (mean < 0) == self.lower
        if interval is None:
            return f"{'so' if holds else 'not so'} in the one seed run; no interval"
        if interval.includes_zero:
            return "not shown: the interval includes 0"
        return "yes" if holds else "no, the opposite"


def _distance(record: Record) -> float | None:
    return record.frechet_after


AGREEING = "[modes agree](agree.md)"
OFFLINE = Stream("CIFAR-10 mixed, offline", ("cifar10-mixed",))
ONLINE = Stream("CIFAR-10 mixed, online", RIVALS)
OTHER_ONLINE = Stream(f"{ONLINE.title}, {AGREEING}", (AGREE,), compared=False)
OTHER_OFFLINE = Stream(f"{OFFLINE.title}, {AGREEING}", (AGREE_OFFLINE,), compared=False)
SEPARATED = Stream("CIFAR-10 separated, 1,000 images each", ("cifar10-separated",))
SINGLE = Stream("CIFAR-10 separated, online", (SEPARATED_ONLINE,))
CLEAN = (
    Stream("CIFAR-10 clean, offline", ("cifar10-gate-same",)),
    Stream("CIFAR-10 clean, online", ("unmix-cifar10-clean",), compared=False),
    Stream(f"CIFAR-10 clean, online, {AGREEING}", (AGREE_CLEAN,), compared=False),
)
NO_BATCHNORM = Stream(f"{ONLINE.title}, [no BatchNorm](groupnorm.md)", (GROUPNORM,), compared=False)
CIFAR100 = Stream("CIFAR-100 mixed, offline", ("cifar100-mixed",))
IMAGENET = Stream("ImageNet mixed, 1,000 images", ("imagenet-mixed",))
MNIST = Stream("SVHN to MNIST, offline", ("svhn-mnist",))
WITH_BATCHNORM = (OFFLINE, ONLINE, OTHER_OFFLINE, OTHER_ONLINE)
MIXED = (*WITH_BATCHNORM, NO_BATCHNORM)
DISTANCES = (OFFLINE, OTHER_OFFLINE, SEPARATED)
CLAIMS = (
    Claim("CAFe is better than Infomax", "cafe", "infomax", (*MIXED, SINGLE, CIFAR100, IMAGENET, MNIST)),
    Claim("CAFe is better than AdaBN", "cafe", "adabn", (*WITH_BATCHNORM, SINGLE)),
    Claim("CAFe is better than T3A", "cafe", "t3a", MIXED),
    Claim("CAFe is better than Tent", "cafe", "tent", (*MIXED, SINGLE)),
    Claim("CAFe is better than BACS", "cafe", "bacs", MIXED),
    Claim("CAFe is better than FR", "cafe", "fr", MIXED),
    Claim("CAFe is better than the model as trained", "cafe", "source", (*MIXED, SINGLE, CIFAR100, MNIST)),
    Claim("Covariances of groups are better than single dimensions", "cafe", "cafe-dimwise", MIXED),
    Claim("Single dimensions are better than groups", "cafe-dimwise", "cafe", (MNIST,)),
    Claim("Infomax helps CAFe", "cafe", "cafe-no-infomax", (*MIXED, CIFAR100, MNIST)),
    Claim("On clean images, CAFe costs accuracy", "cafe", "source", CLEAN, lower=True),
    Claim("Fréchet distance: CAFe ends below the model", "cafe", "source", DISTANCES, _distance, lower=True),
    Claim("… below Infomax", "cafe", "infomax", DISTANCES, _distance, lower=True),
    Claim("… below CAFe on single dimensions", "cafe", "cafe-dimwise", DISTANCES, _distance, lower=True),
    Claim("… below CAFe without infomax", "cafe", "cafe-no-infomax", DISTANCES[:2], _distance, lower=True),
)
OURS = (
    Claim("`unmix` is better than the model", "unmix", "source", (*WITH_BATCHNORM, CIFAR100)),
    Claim("`unmix` is better than CAFe", "unmix", "cafe", WITH_BATCHNORM),
    Claim("`cafe-plus` is better than the model", "cafe-plus", "source", (*MIXED, SINGLE, CIFAR100)),
    Claim("`cafe-plus` is better than CAFe", "cafe-plus", "cafe", (*MIXED, MNIST, CIFAR100)),
    Claim("`cafe-plus` is better than `unmix`", "cafe-plus", "unmix", (*WITH_BATCHNORM, SINGLE, CIFAR100)),
    Claim("`cafe-plus` is better than ROID", "cafe-plus", "roid", (ONLINE, SINGLE, NO_BATCHNORM)),
    Claim("`cafe-plus` is better than EATA", "cafe-plus", "eata", (ONLINE, SINGLE, NO_BATCHNORM)),
    Claim("`cafe-plus` is better than ActMAD", "cafe-plus", "actmad", (ONLINE, NO_BATCHNORM)),
)


def claims_table(claims: Sequence[Claim], stub: str) -> str:
    head = (stub, "stream", "the paper's difference", "here: difference, 95 % interval", "verdict")
    lines = [head, ("---", "---", "---:", "---:", "---"), *(line for claim in claims for line in claim.lines())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# What adapting changes, by corruption


def losses_table(folders: Sequence[str], labels: Sequence[str], unadapted: str = "source") -> str:
    """Differences against the unadapted model, corruption by corruption; losses in bold."""
    source = column(*folders)
    names = corruptions_of(source)
    before = by_corruption(source.of(unadapted))
    fields = [Field("the model, %", {name: f"{before[name].mean:.2f}" for name in names})]
    for label in labels:
        after = by_corruption(source.of(label))
        changes = {name: after[name].mean - before[name].mean for name in names}
        texts = {name: f"{change:+.2f}" for name, change in changes.items()}
        fields.append(Field(name_of(label, source), texts, [name for name, change in changes.items() if change < 0]))
    return grid("corruption", {name: name.replace("_", " ") for name in names}, fields)


# The tables


def mixed_table() -> str:
    shown = [*PAPER, "unmix", "cafe-plus"]
    offline, online = (only(column(*folders), shown) for folders in (("cifar10-mixed",), RIVALS))
    fields = [
        measured("offline %", offline, accuracy),
        papers("cifar10-mixed"),
        measured("online %", online, accuracy),
        papers(*RIVALS),
        measured("Fréchet distance, offline", offline, _distance, lowest=True),
    ]
    return by_method(offline, *fields)


def separated_table() -> str:
    source = column(SEPARATED_ONLINE)
    return by_method(source, *qualities(source), papers(SEPARATED_ONLINE))


def separated_offline_table() -> str:
    """Accuracy on each corruption alone."""
    source = column("unmix-cifar10-separated")
    lines = rows(source.records)
    fields = []
    for name in corruptions_of(source):
        found = {row.label: by_corruption(source.of(row.label))[name] for row in lines}
        best = [label for label, rank in ranked(lines, found).items() if rank == "best"]
        fields.append(Field(name.replace("_", " "), {label: number.text() for label, number in found.items()}, best))
    return by_method(source, *fields)


def beside_the_paper(folder: str, bold: bool = True) -> str:
    """Accuracy with the paper's, and the distance."""
    fields = [share("accuracy %", folder, bold=bold), papers(folder), frechet(folder, bold=bold)]
    return by_method(column(folder), *fields)


def groups_table() -> str:
    source = column("cifar10-groups")
    labels = {row.label: str(source.of(row.label)[0].num_groups) for row in rows(source.records)}
    theirs = {
        label: published_text(paper.published("cifar100", "all-mixed", "offline", "cafe", int(k)))
        for label, k in labels.items()
    }
    fields = [
        share("accuracy %", "cifar10-groups", bold=False),
        frechet("cifar10-groups", bold=False),
        counted("widest group", "cifar10-groups", lambda record: max(record.source["group_sizes"])),
        counted("groups of 100 or more", "cifar10-groups", _wide_groups),
        Field("the paper, CIFAR-100", theirs),
        picked("no group above 128: %", share("", "cifar10-groups-limited", bold=False), _limited(labels)),
        picked("Fréchet distance", frechet("cifar10-groups-limited", bold=False), _limited(labels)),
    ]
    return grid("k", labels, fields)


def _wide_groups(record: Record) -> int:
    return sum(size >= 100 for size in record.source["group_sizes"])


def _limited(labels: Mapping[str, str]) -> dict[str, str]:
    known = {row.label for row in rows(column("cifar10-groups-limited").records)}
    return {label: label for label in labels if label in known}


def normalisation_table() -> str:
    parts = (
        ("mixed, offline", ("cifar10-normalisation-mixed",), (FIRST_MIXED,)),
        ("mixed, online", ("cifar10-normalisation-mixed-online",), RIVALS),
        ("separated, offline", ("cifar10-normalisation-separated",), ()),
        ("separated, online", ("cifar10-normalisation-separated-online",), ()),
    )
    methods = ("tent", "infomax", "cafe")
    lines, fields = {}, {kind: {} for kind in ("batch", "blend", "source")}
    for words, folders, plain in parts:
        for method in methods:
            key = f"{words} {method}"
            lines[key] = (words if method == methods[0] else "", method)
            fields["batch"][key] = _first_seed(plain or folders, method)
            for kind in ("blend", "source"):
                fields[kind][key] = _first_seed(folders, f"{method}(normalisation={kind})")
    made = [
        Field({"batch": "batch (the paper)", "blend": "blend, half of each"}.get(k, k), t) for k, t in fields.items()
    ]
    return grid(("stream", "method"), lines, made)


def _first_seed(folders: Sequence[str], label: str) -> str:
    """Accuracy of seed 0: the mean over its episodes."""
    found = [accuracy(record) for record in column(*folders).of(label) if record.seed == 0]
    return f"{statistics.fmean(found):.2f}"


def small_batches_table() -> str:
    source = column("cifar10-small-batches")
    labels = sorted(source.records, key=lambda record: -record.config["batch_size"])
    fields = [
        share("accuracy %", "cifar10-small-batches", bold=False),
        frechet("cifar10-small-batches", bold=False),
        counted("steps", "cifar10-small-batches", lambda record: record.steps),
        counted("refused", "cifar10-small-batches", lambda record: record.refused),
        _without_minimum(),
    ]
    return grid("batch", {record.label: str(record.config["batch_size"]) for record in labels}, fields)


def _without_minimum() -> Field:
    """Of the same batches before `min_samples` was there."""
    superseded = column("superseded/cifar10-small-batches")
    of_size = {record.config["batch_size"]: f"{accuracy(record):.2f}" for record in superseded.records}
    sizes = {record.label: record.config["batch_size"] for record in column("cifar10-small-batches").records}
    return Field("without `min_samples` %", {label: of_size[size] for label, size in sizes.items()})


def gate_table() -> str:
    keys = {"source": "source", "cafe": "cafe", "cafe(gate=yes)": "cafe, gate"}
    keys |= {"cafe-plus": EARLIER, "cafe-plus(gate=yes)": f"{EARLIER}, gate"}
    mixed = {label: _first_seed((FIRST_MIXED,), label) for label in ("source", "cafe", "cafe-plus")}
    mixed |= {
        row.label: _first_seed(("cifar10-gate-mixed",), row.label) for row in rows(column("cifar10-gate-mixed").records)
    }
    first = column("superseded/cifar10-gate-first-version")
    fields = [
        share("clean %", "cifar10-gate-same", bold=False),
        counted("steps, of 40", "cifar10-gate-same", lambda record: record.steps),
        Field("mixed, seed 0 %", mixed),
        counted("steps, of 40", "cifar10-gate-mixed", lambda record: record.steps),
        Field("mixed, the gate's first version %", {r.label: f"{accuracy(r):.2f}" for r in first.records}),
        Field("steps, of 40", {r.label: str(r.steps) for r in first.records}),
    ]
    return grid("method", keys, fields)


def imagenet_table() -> str:
    source = column("imagenet-mixed")
    fields = [
        counted("batch", "imagenet-mixed", lambda record: record.config["batch_size"]),
        counted("steps", "imagenet-mixed", lambda record: record.steps),
        share("accuracy %", "imagenet-mixed"),
        papers("imagenet-mixed"),
        frechet("imagenet-mixed"),
    ]
    return by_method(source, *fields)


def answers_table() -> str:
    offered = {"before": "(answer=before)", "after": "(answer=after)", "after-eval": ""}
    shown = {"before": "1", "after": "2", "after-eval": "2"}
    found = share("", "held-out-answer", bold=False)
    infomax, cafe = ({key: f"{method}{own}" for key, own in offered.items()} for method in ("infomax", "cafe"))
    leads = {key: f"{float(found.texts[cafe[key]]) - float(found.texts[infomax[key]]):+.2f}" for key in offered}
    fields = [
        Field("forward passes a batch", shown),
        picked("infomax %", found, infomax),
        picked("cafe %", found, cafe),
        Field("cafe − infomax", leads),
    ]
    return grid("answer", {key: f'"{key}"' for key in offered}, fields)


def halves_table() -> str:
    """CAFe - Infomax in the first and the second half of each stream, as answered while it goes by."""
    lines, fields = {}, {"first half": {}, "second half": {}}
    for folders, words in (
        (RIVALS, "after the step, running statistics"),
        (("cifar10-mixed",), "before the step"),
    ):
        source = column(*folders)
        for seed in source.seeds:
            key = f"{words} {seed}"
            lines[key] = (words if seed == source.seeds[0] else "", str(seed))
            ours, theirs = (next(r for r in source.of(label) if r.seed == seed).stream for label in ("cafe", "infomax"))
            middle = len(ours) // 2
            for name, part in (("first half", slice(None, middle)), ("second half", slice(middle, None))):
                lead = 100 * (statistics.fmean(ours[part]) - statistics.fmean(theirs[part]))
                fields[name][key] = f"{lead:+.2f}"
    return grid(("answer", "seed"), lines, [Field(name, texts) for name, texts in fields.items()])


def held_out_normalisation_table() -> str:
    found = share("", "held-out-normalisation", bold=False).texts
    lines = {
        "tent": "",
        "infomax": "",
        "cafe": "lr=0.001",
        "cafe 2": "lr=0.002",
        "cafe 3": "lr=0.003",
        "cafe 4": "lr=0.004",
    }
    kinds = {
        "batch": "",
        "blend, 0.5": "normalisation=blend,blend=0.5",
        "blend, 0.25": "normalisation=blend,blend=0.25",
        "blend, 0.1": "normalisation=blend,blend=0.1",
        "source": "normalisation=source",
    }

    def text(key: str, setting: str) -> str:
        rate = "" if key in ("tent", "infomax", "cafe") else lines[key]
        options = ",".join(filter(None, (setting, rate)))
        return found.get(f"{key.split()[0]}({options})" if options else key, "")

    fields = [Field(kind, {key: text(key, setting) for key in lines}) for kind, setting in kinds.items()]
    heads = {key: key.split()[0] + (f", {rate.replace('=', ' ')}" if rate else "") for key, rate in lines.items()}
    return grid("method", heads, fields)


def held_out_batches_table() -> str:
    """A minimum of at most the batch pads nothing: such cells are one run."""
    found = {
        (record.config["batch_size"], record.config.get("min_samples", 0)): f"{accuracy(record):.2f}"
        for record in column("held-out-small-batches").records
        if record.method == "cafe" and record.config["lr"] == 0.001
    }

    def text(batch: int, minimum: int) -> str:
        same = [
            value for (size, least), value in found.items() if size == batch and max(least, size) == max(minimum, size)
        ]
        return same[0] if same else ""

    sizes, minima = (16, 32, 64, 128, 256), (0, 64, 128, 256)
    fields = [Field(f"min_samples={minimum}", {str(size): text(size, minimum) for size in sizes}) for minimum in minima]
    return grid("batch", {str(size): str(size) for size in sizes}, fields)


def held_out_cures_table() -> str:
    labels = {
        "cafe(batch_size=16,samples_per_dim=2)": "cafe",
        "cafe(batch_size=16,samples_per_dim=2,lr=0.00025)": "cafe, a quarter of the learning rate",
        "cafe-no-infomax(batch_size=16,samples_per_dim=2)": "cafe-no-infomax",
        "infomax(batch_size=16)": "infomax",
        "cafe(batch_size=16,samples_per_dim=2,min_samples=128)": "cafe, min_samples=128",
    }
    return grid("batches of 16", labels, [share("accuracy %", "held-out-small-batches", bold=False)])


def svhn_weights_table() -> str:
    """CAFe with other weights of the alignment, on single dimensions and in one direction."""
    lines = {
        "infomax": ("infomax alone", "0"),
        "cafe-dimwise": ("single dimensions", "1"),
        "weighted-dimwise(weight=2)": ("", "2: as in `cafe`"),
        "weighted-dimwise(weight=16)": ("", "16"),
        "cafe": ("groups, with covariances", "1"),
        "weighted(weight=8)": ("", "8: as single dimensions with 16"),
        "one-sided(weight=8)": ("groups, KL(target ‖ source) alone", "8"),
    }
    source = column("svhn-weights")
    against = Field("against infomax, points", {label: difference(source, label, "infomax") for label in lines})
    return grid(("alignment", "its weight"), lines, [share("accuracy %", "svhn-weights"), against])


def unmix_table() -> str:
    lines = ["source", "adabn", "cafe", "unmix", "tent(normalisation=unmix)", "roid(normalisation=unmix)", "cafe-plus"]
    fields = [share("mixed, offline %", *RIVALS_OFFLINE), share("mixed, online %", *RIVALS)]
    return grid(
        "method", {label: label for label in lines}, [*fields, share("clean %", "unmix-cifar10-clean", bold=False)]
    )


def batches_table(folder: str) -> str:
    """Every method with batches of these sizes, on the same images."""
    found, sizes = share("", folder, bold=False), ("256", "64", "16", "1")
    plain = ("adabn", "tent", "infomax", "cafe", "eata", "roid", "rotta", "cafe-plus", "unmix")
    rows_of = {method: f"{method}(batch_size=%s)" for method in plain}
    rows_of["cafe, padded"] = "cafe(batch_size=%s,samples_per_dim=2,min_samples=128)"
    order = sorted(rows_of, key=lambda name: (*plain, "").index(name.split(",")[0]))
    texts = {size: {name: found.texts[rows_of[name] % size] for name in order} for size in sizes}
    texts = {size: {"source": found.texts["source"], **of_size} for size, of_size in texts.items()}
    best = {size: max(of_size, key=lambda name: float(of_size[name])) for size, of_size in texts.items()}
    fields = [Field(f"batches of {size} %", texts[size], [best[size]]) for size in sizes]
    return grid("method", {name: name for name in ("source", *order)}, fields)


def side_by_side(heads: Mapping[str, str]) -> str:
    """A column for each folder, a line for each row that one of them has."""
    records = [record for folder in heads for record in column(folder).records]
    return grid("method", {r.label: r.label for r in rows(records)}, [share(h, folder) for folder, h in heads.items()])


def windows_table() -> str:
    """`unmix` with other windows, on held-out corruptions."""
    networks = {"ResNet-26": ("windows-held-out", "continual-held-out")}
    networks["cafe:cifar10"] = ("agree-windows-held-out", "agree-continual-held-out")
    fields = []
    for network, folders in networks.items():
        for words, folder in zip(("mixed", "one after the other"), folders, strict=True):
            found = {
                str(record.config["window"]): f"{100 * record.accuracy:.2f}"
                for record in column(folder).records
                if record.method == "unmix"
            }
            best = max(found, key=lambda window: float(found[window]))
            fields.append(Field(f"{network}, {words} %", found, [best]))
    return grid("window", {str(window): f"{window:,}" for window in (1000, 2000, 4000, BEFORE)}, fields)


def unmix_imagenet_table() -> str:
    """Of two folders, whose rows `cafe-plus` are two methods."""
    ours = share("", "unmix-imagenet", bold=False).texts
    others = share("", "imagenet-mixed", bold=False).texts
    texts = {**{label: text for label, text in others.items() if label != "cafe-plus"}, **ours}
    return grid("method", {label: label for label in texts}, [Field("accuracy %", texts)])


def difference(source: Column, label: str, than: str) -> str:
    """The difference of two rows in points, paired by image, with its interval; empty where it is not known."""
    differences, image = paired(source, label, than) if label != than else ({}, None)
    return f"{statistics.fmean(differences.values()):+.2f} {image.interval.text()}" if image else ""


def qualities(source: Column) -> list[Field]:
    """Accuracy, also against `cafe`, calibration, and the worst corruption."""
    lines = rows(source.records)
    worst = {row.label: found[1].text() for row in lines if (found := worst_corruption(source, row))}
    return [
        measured("accuracy %", source, accuracy),
        Field("against cafe, points", {row.label: difference(source, row.label, "cafe") for row in lines}),
        measured("ECE %", source, calibration_error, bold=False),
        Field("worst corruption %", worst),
    ]


def rivals_table() -> str:
    """Every row against `cafe`, with what it costs."""
    source = column(*RIVALS)
    lines = rows(source.records)
    passes, times, memory = {}, {}, {}
    for row in lines:
        spent = cost(source.of(row.label))
        passes[row.label] = f"{spent.forward:.2f} / {spent.backward:.2f}"
        times[row.label] = f"{spent.milliseconds_per_image:.2f}"
        memory[row.label] = f"{spent.run_memory_mb:,.0f}"
    fields = [
        *qualities(source),
        Field("passes", passes),
        Field("ms / image", times),
        Field("memory MB", memory),
    ]
    return grid(("method", "needs from the source"), {r.label: (r.label, needs_text(r)) for r in lines}, fields)


def rates_table(folder: str) -> str:
    """The search for learning rates: as the report has it, and how far the best rate is above the method's own."""
    (table,) = rates_tables(collect([ROOT / RESULTS / folder / RECORDS])[0])
    return plain(markdown_grid(table))


def tuned_table(published: Sequence[str], searched: str, tuned: str) -> str:
    """Every method at its published learning rate, and at the one that the search found, with the same seeds."""
    both, found = column(*published, tuned), accuracies(column(searched).records)
    seeds = column(tuned).seeds
    source = replace(both, records=tuple(record for record in both.records if record.seed in seeds))
    means, _ = estimates(source, rows(source.records), accuracy)
    fields: dict[str, dict[str, str]] = {
        head: {} for head in ("accuracy %", "rate found", "accuracy % with it", "change, points")
    }
    lines = {}
    for row in rows(source.records):
        if len(found.get(row.label, ())) < 2:
            continue
        own = source.of(row.label)[0].config["lr"]
        best = best_rate(found[row.label], own)
        label = row.label if best == own else labelled(row.label, f"lr={best:g}")
        lines[row.label] = (row.label, f"{own:g}")
        texts = (means[row.label].text(), f"{best:g}", means[label].text(), difference(source, label, row.label))
        for texts_of, text in zip(fields.values(), texts, strict=True):
            texts_of[row.label] = text
    return grid(("method", "published rate"), lines, [Field(head, texts) for head, texts in fields.items()])


def rivals_offline_table() -> str:
    """Every method, answering after the stream is over."""
    source = column(*RIVALS_OFFLINE)
    return by_method(source, *qualities(source))


def agree_clean_table() -> str:
    source = column(AGREE_CLEAN)
    against = {row.label: difference(source, row.label, "source") for row in rows(source.records)}
    return by_method(source, share("clean %", AGREE_CLEAN), Field("against the model, points", against))


def plus_table(networks: Mapping[str, str], lines: Mapping[str, str]) -> str:
    """Steps on top of `unmix`, against it, on held-out corruptions."""
    fields = []
    for head, folder in networks.items():
        source = column(folder)
        fields.append(measured(f"{head} %", source, accuracy))
        fields.append(Field("against unmix, points", {label: difference(source, label, "unmix") for label in lines}))
    return grid("steps on top of `unmix`", lines, fields)


def quarters_table() -> str:
    """How steps on top of `unmix` differ from it as a long stream goes on."""
    lines, fields = {}, {quarter: {} for quarter in ("first quarter", "second", "third", "last")}
    for network, folder in (("ResNet-26", "plus-long"), ("cafe:cifar10", "agree-plus-long")):
        base = np.array(column(folder).of("unmix")[0].stream)
        for label in (ALL_WEIGHTS, "cafe-plus"):
            key = f"{folder} {label}"
            lines[key] = (network if label == ALL_WEIGHTS else "", STEPS[label])
            change = 100 * (np.array(column(folder).of(label)[0].stream) - base)
            for number, texts in enumerate(fields.values()):
                texts[key] = f"{np.array_split(change, 4)[number].mean():+.2f}"
    return grid(("network", "steps"), lines, [Field(head, texts) for head, texts in fields.items()])


def agree_groups_table() -> str:
    source = column(AGREE_GROUPS)
    labels = {row.label: str(source.of(row.label)[0].num_groups) for row in rows(source.records)}
    widest = counted("widest group", AGREE_GROUPS, lambda record: max(record.source["group_sizes"]))
    return grid("k", labels, [share("accuracy %", AGREE_GROUPS, bold=False), widest])


ALL_WEIGHTS, WITH_INFOMAX, RECIPE = (
    Declared.load().words[name] for name in ("all_weights", "with_infomax", "recipe_infomax")
)
PAPER = Declared.load().words["paper"].split(",")
STEPS = {
    "source": "the model",
    "unmix": "none: `unmix`",
    ALL_WEIGHTS: "alignment and infomax move all weights (`cafe-plus` before)",
    WITH_INFOMAX: "alignment and infomax move the normalisation layers",
    "cafe-plus(parameters=all,lr=0.002,max_change=0.0005)": "alignment moves all weights",
    "cafe-plus": "alignment moves the normalisation layers (`cafe-plus`)",
}
STREAMS = {
    "unmix-cifar10-correlated": "classes in runs %",
    "unmix-cifar10-continual": "one corruption after the other %",
    "cifar10-severities": "all severities %",
}
AGREE_STREAMS = {
    f"agree-cifar10-{name}": head
    for name, head in zip(("correlated", "continual", "severities"), STREAMS.values(), strict=True)
}
LOSSES = ("infomax", "cafe", "actmad", "unmix", "cafe-plus")
TABLES: dict[str, Callable[[], str]] = {
    "claims": lambda: claims_table(CLAIMS, "the paper's claim"),
    "ours": lambda: claims_table(OURS, "ours"),
    "mixed": mixed_table,
    "losses-offline": lambda: losses_table(["cifar10-mixed"], ["adabn", "infomax", "cafe", "cafe-plus"]),
    "losses-online": lambda: losses_table(RIVALS, LOSSES),
    "halves": halves_table,
    "answers": answers_table,
    "separated": separated_table,
    "separated-losses": lambda: losses_table(
        [SEPARATED_ONLINE], [row.label for row in rows(column(SEPARATED_ONLINE).records) if row.label != "source"]
    ),
    "separated-offline": separated_offline_table,
    "separated-distances": lambda: beside_the_paper("cifar10-separated"),
    "groups": groups_table,
    "normalisation": normalisation_table,
    "small-batches": small_batches_table,
    "same": lambda: beside_the_paper("cifar10-same"),
    "gate": gate_table,
    "svhn-mnist": lambda: beside_the_paper("svhn-mnist"),
    "svhn-weights": svhn_weights_table,
    "cifar100": lambda: beside_the_paper("cifar100-mixed"),
    "imagenet": imagenet_table,
    "dann": lambda: beside_the_paper("cifar10-dann", bold=False),
    "held-out-normalisation": held_out_normalisation_table,
    "held-out-batches": held_out_batches_table,
    "held-out-cures": held_out_cures_table,
    "unmix": unmix_table,
    "batches": lambda: batches_table("unmix-cifar10-batches"),
    "agree-batches": lambda: batches_table("agree-cifar10-batches"),
    "streams": lambda: side_by_side(STREAMS),
    "agree-streams": lambda: side_by_side(AGREE_STREAMS),
    "windows": windows_table,
    "unmix-imagenet": unmix_imagenet_table,
    "rivals": rivals_table,
    "rivals-offline": rivals_offline_table,
    "rates": lambda: rates_table(SEARCHED),
    "agree": lambda: by_method(column(AGREE, AGREE_RIVALS), *qualities(column(AGREE, AGREE_RIVALS))),
    "agree-offline": lambda: by_method(
        column(AGREE_OFFLINE), *qualities(column(AGREE_OFFLINE)), frechet(AGREE_OFFLINE, bold=False)
    ),
    "agree-clean": agree_clean_table,
    "agree-losses": lambda: losses_table(
        [AGREE], ["adabn", "infomax", "cafe-no-infomax", "cafe", "unmix", "cafe-plus"]
    ),
    "agree-groups": agree_groups_table,
    "groupnorm": lambda: by_method(column(GROUPNORM), *qualities(column(GROUPNORM))),
    "groupnorm-losses": lambda: losses_table([GROUPNORM], ["tent", "infomax", "cafe-no-infomax", "cafe", "cafe-plus"]),
    "plus": lambda: plus_table(
        {"ResNet-26": "plus-held-out", "cafe:cifar10": AGREE_PLUS, "CIFAR-100": "cifar100-plus-held-out"}, STEPS
    ),
    "plus-long": quarters_table,
    "tuned": lambda: tuned_table(RIVALS, SEARCHED, TUNED),
    "agree-rates": lambda: rates_table(AGREE_SEARCHED),
    "agree-tuned": lambda: tuned_table((AGREE, AGREE_RIVALS), AGREE_SEARCHED, AGREE_TUNED),
}


# Commands


@dataclass
class Shell:
    """Commands as a block for a shell: what several of them share is a variable."""

    declared: Declared
    used: dict[str, str] = field(default_factory=dict)

    def block(self, names: Sequence[str]) -> str:
        """Of folders, and of models as `models/NAME`."""
        commands = [words for name in names for words in self._commands(name)]
        variables = {f"${n}": tuple(t.split()) for n, t in self.declared.words.items() if t.startswith("--")}
        shared = {name: value for name, value in variables.items() if sum(_has(words, value) for words in commands) > 1}
        lines = [f'{name[1:]}="{" ".join(value)}"' for name, value in shared.items()]
        for words in commands:
            for name, value in shared.items():
                words = _replaced(words, value, name)
            lines.append(" ".join(word if word in shared else shlex.quote(word) for word in words))
        return "".join(f"    {line}\n" for text in lines for line in wrapped(text))

    def _commands(self, name: str) -> Sequence[Words]:
        if name.startswith("models/"):
            return [self.declared.models[name.removeprefix("models/")]]
        return self.declared.folders[name].commands


def _place(words: Words, part: Words) -> int | None:
    return next((i for i in range(len(words)) if words[i : i + len(part)] == part), None)


def _has(words: Words, part: Words) -> bool:
    return _place(words, part) is not None


def _replaced(words: Words, part: Words, name: str) -> Words:
    place = _place(words, part)
    return words if place is None else (*words[:place], name, *words[place + len(part) :])


def wrapped(command: str) -> list[str]:
    """A command in lines, which end in backslashes where it goes on; never between a flag and its value."""
    parts = re.split(r" (?=--|\$)", command)
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) <= WIDTH - 6:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def filled(text: str, declared: Declared) -> str:
    """A page with its tables and commands as they should be."""

    def block(match: re.Match[str]) -> str:
        kind, names = match[2], match[3].split()
        made = "\n".join(TABLES[name]() for name in names) if kind == "table" else Shell(declared).block(names)
        return f"{match[1]}\n{made}\n{match[4]}"

    return BLOCK.sub(block, text)


def pages() -> list[Path]:
    return [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text())]


def main() -> None:
    declared = Declared.load()
    for page in pages():
        before = page.read_text()
        after = filled(before, declared)
        if after != before:
            page.write_text(after)
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
