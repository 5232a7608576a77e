"""The paper's experiments as data: which methods meet which images under which protocol.

An `Experiment` (Table 1, the online tables, the sweep over k, …) on a `Dataset` gives a `Plan`. Adding an experiment or
a data set is one value below. Methods come from the registry; nothing here knows what any of them does.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from cafe_tta import corruptions, plugins
from cafe_tta import data as image_sets
from cafe_tta import options as text_options
from cafe_tta.bench.pace import Pace
from cafe_tta.bench.protocols import PROTOCOLS, Episode, Indices, protocol_name
from cafe_tta.copies.job import preset_for
from cafe_tta.methods import METHODS, configure, method, method_name
from cafe_tta.models import CIFAR

Mode = Literal["online", "offline"]
MODES: tuple[Mode, ...] = ("offline", "online")
SWEEP = (8, 16, 32, 64, 128, 256, 512, 1024)  # k of the paper's Appendix D.2


@dataclass(frozen=True)
class Dataset:
    """A data set with the paper's model and parameters for it."""

    name: str
    data: str  # test images
    source_data: str  # training images, for the source side of the methods
    model: str
    protocols: tuple[str, ...]  # its columns in Table 1
    preset: str = "cifar"  # of the methods' options
    corruption_preset: str = "cifar"
    severities: tuple[int, ...] = (5,)
    num_groups: int | None = 128  # None: by the number of features
    sweep: tuple[int, ...] = SWEEP
    copies: int = 1  # of each image in a mixed stream: for small data sets
    size: int | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    pretrained: bool = False
    corrupted: bool = True  # False: the images as they are are the shift
    changed: tuple[str, ...] = ()  # fields that are not the data set's own


_CIFAR = Dataset(
    name="cifar10",
    data="cifar10:test",
    source_data="cifar10:train",
    model="timm:resnet26",
    protocols=("separated", "all-mixed"),
    size=CIFAR.size,
    mean=CIFAR.mean,
    std=CIFAR.std,
)
_DATASETS = (
    Dataset(
        name="digits",
        data="digits:test",
        source_data="digits:train",
        model="digits",
        protocols=("separated", "all-mixed"),
        num_groups=8,
        sweep=(1, 2, 4, 8, 16, 32, 64, 128),
        copies=6,
    ),
    _CIFAR,
    replace(_CIFAR, name="cifar100", data="cifar100:test", source_data="cifar100:train"),
    Dataset(
        name="imagenet",
        data="imagenet:val",
        source_data="imagenet:train",
        model="torchvision:resnet50",
        protocols=("separated", "severity-mixed", "all-mixed"),
        preset="imagenet",
        corruption_preset="imagenet",
        severities=(1, 2, 3, 4, 5),
        pretrained=True,
    ),
    Dataset(
        name="mnist",
        data="mnist:test",
        source_data="svhn:train",
        model="timm:resnet26",
        protocols=("shift",),
        size=32,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        corrupted=False,
    ),
)
DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in _DATASETS}  # in the order of the report's columns


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper: what is run for it, and where the report shows it.

    >>> Experiment("noise", "noise alone", ("all-mixed",), methods=("source", "tent")).datasets
    ('digits', 'cifar10', 'cifar100', 'imagenet')
    """

    name: str
    shows: str
    protocols: tuple[str, ...] = ()  # its columns; empty: those of the data set in Table 1
    methods: tuple[str, ...] = ()  # its rows; empty: all `in_tables` that need no source data while they adapt
    mode: Mode = "offline"
    frechet: bool = True  # whether distances from the source are measured
    sweep: bool = False  # one row for each number of groups
    corrupted: bool = True  # whether it is for data sets that get corrupted
    distances_only: bool = False  # the report shows its distances from the source, not its accuracy
    table: str = ""  # title of an accuracy table of its own

    @property
    def own_tables(self) -> bool:
        """Whether its runs are shown apart from the main tables."""
        return self.sweep or self.distances_only or bool(self.table)

    @property
    def datasets(self) -> tuple[str, ...]:
        """The data sets that it is for."""
        return tuple(name for name, dataset in DATASETS.items() if dataset.corrupted == self.corrupted)


_EXPERIMENTS = (
    Experiment("table1", "Table 1: every method, separated and mixed, offline"),
    Experiment("online", "online tables (Appendix D.3)", mode="online", frechet=False),
    Experiment("mixed", "the mixed column of Table 1 alone", ("all-mixed",)),
    Experiment("separated", "the separated column of Table 1 alone", ("separated",)),
    Experiment(
        "frechet", "Fig. 2: Fréchet distance, separated and mixed", ("separated", "all-mixed"), distances_only=True
    ),
    Experiment(
        "groups",
        "accuracy against k, and the sizes of the groups (Appendix D.2)",
        ("all-mixed",),
        methods=("cafe",),
        sweep=True,
    ),
    Experiment("same", "adapting to the same distribution (Appendix D.5)", ("clean",)),
    Experiment(
        "dann",
        "DANN beside CAFe (Appendix D.6)",
        ("all-mixed",),
        methods=("source", "dann", "cafe"),
        table="Test accuracy [%] beside unsupervised domain adaptation",
    ),
    Experiment(
        "continual", "one corruption after the other, without reset", ("continual",), mode="online", frechet=False
    ),
    Experiment("recurring", "the continual stream, over and over", ("recurring",), mode="online", frechet=False),
    Experiment(
        "correlated",
        "images of a class come together: one corruption at a time, and mixed",
        ("class-correlated", "mixed-correlated"),
        mode="online",
        frechet=False,
    ),
    Experiment("label-shift", "mixed, with frequent and rare classes", ("label-shift",), mode="online", frechet=False),
    Experiment(
        "mixed-75k", "mixed, online, 5,000 images of each corruption", ("mixed-75k",), mode="online", frechet=False
    ),
    Experiment(
        "mixed-full", "mixed, online, all images with every corruption", ("mixed-full",), mode="online", frechet=False
    ),
    Experiment("shift", "SVHN to MNIST (Appendix D.4)", ("shift",), corrupted=False),
)
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _EXPERIMENTS}


@dataclass(frozen=True)
class Row:
    """A row of a table: a method under a label, with the options of its runs."""

    label: str
    method: str
    needs: str | None
    config: Any = None  # None where the row was read back from records
    num_groups: int | None = None  # of the source statistics; None: the data set's own

    @property
    def is_reference(self) -> bool:
        """Whether it sees source data while it adapts: shown, but not compared with those that do not."""
        return self.needs == "data"


@dataclass(frozen=True)
class Plan:
    """Everything that decides the numbers of an experiment, except the model and the images themselves."""

    experiment: str
    dataset: Dataset
    protocols: tuple[str, ...]
    mode: Mode
    rows: tuple[Row, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    limit: int | None = None
    corruptions: tuple[str, ...] = corruptions.NAMES
    corruption_seed: int = 0
    frechet: bool = True
    pace: Pace | None = None  # of the stream; None: it waits for every method

    def __post_init__(self) -> None:
        if self.pace is None:
            return
        if self.mode != "online":
            raise ValueError(f"expected `mode` to be 'online' with `pace`, but got {self.mode!r}: offline nobody waits")
        for row in self.rows:
            self.pace.cost(row.label)

    def episodes(self, protocol: str, seed: int, num_images: int, labels: Indices | None = None) -> list[Episode]:
        """The episodes of one protocol and seed, over a data set of `num_images` images with these labels."""
        severities, copies = self.dataset.severities, self.dataset.copies
        return PROTOCOLS[protocol].episodes(num_images, self.corruptions, severities, seed, self.limit, copies, labels)

    def notes(self) -> list[str]:
        """What a reader of the numbers should know."""
        preset = _preset(self.dataset, self.mode)
        lacking = dict.fromkeys(row.method for row in self.rows if _fitting(row.method, preset) is None)
        return [f"note: {name} has no preset {preset!r}: its default options are used" for name in lacking]


def plan(
    experiment: str,
    dataset: str | Dataset = "digits",
    methods: str | Sequence[str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    sweep: Sequence[int] | None = None,
    mode: str | None = None,
    frechet: bool | None = None,
    protocols: Sequence[str] | None = None,
    pace: str | None = None,
    **settings: Any,
) -> Plan:
    """An experiment on a data set, with the paper's methods and protocols or those named.

    A method may come with options, and is then a row of its own: `["cafe", "cafe(lr=0.01)"]`, or the same as one text.
    `options` changes options of a method in all of its rows. With `pace`, the stream does not wait: see `bench.pace`.
    `settings` are other fields of `Plan`: seeds, limit, ….

    >>> [row.label for row in plan("mixed", "digits", "source, cafe(lr=0.01,every=2), cafe").rows]
    ['source', 'cafe(lr=0.01,every=2)', 'cafe']
    """
    chosen = _named(experiment, EXPERIMENTS, "experiment")
    data = choose_dataset(dataset) if isinstance(dataset, str) else dataset
    if data.name in DATASETS and data.name not in chosen.datasets:
        raise ValueError(f"experiment {experiment!r} is not for {data.name}; choose from: {', '.join(chosen.datasets)}")
    if mode not in (None, *MODES):
        raise ValueError(f"expected `mode` to be 'online' or 'offline', but got {mode!r}")
    mode = cast(Mode, mode or chosen.mode)
    preset = _preset(data, mode)
    labels = row_labels(methods) if methods else chosen.methods or _rivals()
    rows = [_row(label, preset, options or {}) for label in labels]
    if chosen.sweep:
        ks = sweep or data.sweep
        rows = [replace(row, label=f"{row.label} k={k}", num_groups=k) for row in rows for k in ks]
    protocols = tuple(protocol_name(name) for name in protocols or ())
    protocols = protocols or chosen.protocols or data.protocols
    frechet = chosen.frechet if frechet is None else frechet
    limited = None if pace is None else Pace.parse(pace)
    return Plan(experiment, data, protocols, mode, tuple(rows), frechet=frechet, pace=limited, **settings)


def choose_dataset(name: str | None = None, **changes: Any) -> Dataset:
    """A data set by name, with those of its fields changed that are given and not None.

    A name of your own, or none, is for images of your own: with `data`, `source_data` and `model`.

    >>> own = choose_dataset("mine", data="digits:test", source_data="digits:train", model="nets:build")
    >>> own.name, own.copies, own.corruption_preset
    ('mine', 1, 'cifar')
    """
    changes = {field: value for field, value in changes.items() if value is not None}
    if name is None and "data" not in changes:
        name = "digits"
    known = None if name is None else plugins.add("datasets", name, DATASETS, _as_dataset)
    if known is not None:
        return replace(DATASETS[known], **changes, changed=tuple(changes))
    if missing := [field for field in ("data", "source_data", "model") if field not in changes]:
        what = f"unknown data set {name!r}{text_options.did_you_mean(name, DATASETS)}" if name else "data of your own"
        raise ValueError(
            f"{what}; choose from: {', '.join(DATASETS)}; images of your own need `data`, `source_data` and `model`, "
            f"but {' and '.join(f'`{field}`' for field in missing)} {'is' if len(missing) == 1 else 'are'} not given"
        )
    images = image_sets.load(changes["data"])
    corrupted = isinstance(images, image_sets.CorruptedSet)
    preset = "cifar" if corrupted else preset_for(images, np.arange(len(images)))
    own = Dataset(
        name=name or _name_of(changes["data"]),
        **{field: changes[field] for field in ("data", "source_data", "model")},
        protocols=("separated", "all-mixed"),
        preset="imagenet" if preset == "imagenet" else "cifar",
        corruption_preset=preset,
        num_groups=None,
    )
    return replace(own, **changes, changed=tuple(changes))


def _as_dataset(name: str, found: Any) -> Dataset | None:
    return found if isinstance(found, Dataset) else None  # else it is a set of images


def _name_of(text: str) -> str:
    """A name for images of the user's own, for titles and folders.

    >>> _name_of("arrays:/data/roads"), _name_of("photos/test/"), _name_of("cifar10-c@/data"), _name_of("my.py:load")
    ('roads', 'test', 'cifar10-c', 'load')
    """
    word, _, rest = text.partition("@")[0].partition(":")
    named = word in image_sets.DATASETS and word not in ("folder", "arrays")
    return word if named else Path(rest or word).name


def row_labels(methods: str | Iterable[str]) -> list[str]:
    """The rows that a text names, separated by commas outside parentheses.

    >>> row_labels("cafe, tent(lr=0.1,every=2)")
    ['cafe', 'tent(lr=0.1,every=2)']
    """
    texts = re.split(r",(?![^()]*\))", methods) if isinstance(methods, str) else methods
    return [text.strip() for text in texts if text.strip()]


def parse_options(settings: Iterable[str], methods: str | Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """Options by method, from texts: `cafe.lr=0.1` for one method, `lr=0.1` for all of `methods` that have it.

    >>> parse_options(["lr=0.1", "cafe.momentum=0.5"], ["source", "tent", "cafe(every=2)"])
    {'tent': {'lr': 0.1}, 'cafe': {'lr': 0.1, 'momentum': 0.5}}
    """
    names = [method_name(_split_row(label)[0]) for label in row_labels(methods)] if methods else list(METHODS)
    options: dict[str, dict[str, Any]] = {}
    for setting in settings:
        target, dot, _ = setting.partition("=")[0].rpartition(".")
        text = setting[len(target) + len(dot) :]
        option = text.partition("=")[0].strip()
        having = [name for name in names if hasattr(METHODS[name].Config(), option)]
        chosen = [method_name(target)] if dot else having
        if not chosen:
            raise ValueError(f"no method has an option {option!r} ({setting})")
        for name in chosen:
            options.setdefault(name, {}).update(_parse(name, [text]))
    return options


def labelled(label: str, setting: str) -> str:
    """The label of a row with one more option.

    >>> labelled("tent", "lr=0.1"), labelled("tent(every=2)", "lr=0.1")
    ('tent(lr=0.1)', 'tent(every=2,lr=0.1)')
    """
    return f"{label[:-1]},{setting})" if label.endswith(")") else f"{label}({setting})"


def usual_config(name: str, dataset: str, mode: str) -> Any:
    """The options of a method in an experiment where nobody sets any; on images of the user's own, those for CIFAR."""
    return configure(name, _fitting(name, _preset(DATASETS.get(dataset, _CIFAR), cast(Mode, mode))))


def _row(label: str, preset: str, options: Mapping[str, Mapping[str, Any]]) -> Row:
    text, own = _split_row(label)
    name = method_name(text)
    config = configure(name, _fitting(name, preset), **{**options.get(name, {}), **own})
    return Row(label.replace(text, name, 1), name, METHODS[name].needs, config)


def _preset(dataset: Dataset, mode: Mode) -> str:
    return f"{dataset.preset}-online" if mode == "online" else dataset.preset


def _fitting(name: str, preset: str) -> str | None:
    """The preset of a method for an experiment; None where it has none, and its defaults are used."""
    # Methods that do the same online and offline have no preset of their own for it.
    wanted = (preset, preset.removesuffix("-online"))
    return next((fitting for fitting in wanted if fitting in METHODS[name].presets), None)


def _split_row(label: str) -> tuple[str, dict[str, Any]]:
    """The method of a row, and its options."""
    match = re.fullmatch(r"([^()]+)\((.+)\)", label)
    if match is None:
        return label, {}
    name = match[1].strip()
    return name, _parse(name, match[2].split(","))


def _parse(name: str, settings: Iterable[str]) -> dict[str, Any]:
    return text_options.parse(method(name).Config, text_options.split_assignments(settings), name)


def _rivals() -> list[str]:
    return [name for name, kind in METHODS.items() if kind.in_tables and kind.needs != "data"]


def _named(name: str, known: Mapping[str, Any], what: str) -> Any:
    if name not in known:
        hint = text_options.did_you_mean(name, known)
        raise ValueError(f"unknown {what} {name!r}{hint}; choose from: {', '.join(known)}")
    return known[name]
