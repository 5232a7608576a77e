"""The paper's experiments as data: which methods meet which images under which protocol.

An experiment is a kind (Table 1, the online tables, the sweep over k, …) on a data set. Methods come from the registry;
nothing here knows what any of them does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from cafe_tta import corruptions
from cafe_tta.bench import protocols
from cafe_tta.bench.protocols import Episode
from cafe_tta.bench.run import Mode
from cafe_tta.methods import METHODS, configure

SWEEP = (8, 16, 32, 64, 128, 256, 512, 1024)  # k of the paper's Appendix D.2
Variant = tuple[str, Mapping[str, Any]]  # a method, and options that differ from the experiment's
PROTOCOLS = ("separated", "severity-mixed", "all-mixed", "continual", "clean", "shift")


@dataclass(frozen=True)
class Choice:
    """A method with all its options; its label is its row in the table."""

    method: str
    config: Any
    label: str
    num_groups: int | None = None  # of the source statistics; None: the data set's own


@dataclass(frozen=True)
class Part:
    """One column of a table: a protocol, online or offline, and the methods that go through it."""

    protocol: str
    mode: Mode
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Base:
    """A data set with the paper's model and parameters for it."""

    name: str
    data: str  # test images
    source_data: str  # training images, for the source side of the methods
    model: str
    preset: str  # of the methods' options
    corruption_preset: str
    severities: tuple[int, ...]
    mixtures: tuple[str, ...]  # the protocols of its columns in Table 1
    num_groups: int = 128
    sweep: tuple[int, ...] = SWEEP
    copies: int = 1
    size: int | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    pretrained: bool = False


CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_CIFAR = Base(
    name="cifar10",
    data="cifar10:test",
    source_data="cifar10:train",
    model="timm:resnet26",
    preset="cifar",
    corruption_preset="cifar",
    severities=(5,),
    mixtures=("separated", "all-mixed"),
    size=32,
    mean=CIFAR_MEAN,
    std=CIFAR_STD,
)
BASES: dict[str, Base] = {
    "digits": Base(
        name="digits",
        data="digits:test",
        source_data="digits:train",
        model="digits",
        preset="cifar",
        corruption_preset="cifar",
        severities=(5,),
        mixtures=("separated", "all-mixed"),
        num_groups=8,
        sweep=(1, 2, 4, 8, 16, 32, 64, 128),
        copies=6,
    ),
    "cifar10": _CIFAR,
    "cifar100": replace(_CIFAR, name="cifar100", data="cifar100:test", source_data="cifar100:train"),
    "imagenet": Base(
        name="imagenet",
        data="imagenet:val",
        source_data="imagenet:train",
        model="torchvision:resnet50",
        preset="imagenet",
        corruption_preset="imagenet",
        severities=(1, 2, 3, 4, 5),
        mixtures=("separated", "severity-mixed", "all-mixed"),
        pretrained=True,
    ),
    "mnist": Base(
        name="mnist",
        data="mnist:test",
        source_data="svhn:train",
        model="timm:resnet26",
        preset="cifar",
        corruption_preset="cifar",
        severities=(5,),
        mixtures=("shift",),
        size=32,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    ),
}


@dataclass(frozen=True)
class Kind:
    """A table or figure of the paper."""

    name: str
    shows: str
    bases: tuple[str, ...]
    frechet: bool = True


_CORRUPTED = ("digits", "cifar10", "cifar100", "imagenet")
_KINDS = (
    Kind("table1", "Table 1: every method, separated and mixed, offline", _CORRUPTED),
    Kind("online", "online tables (Appendix D.3)", _CORRUPTED, frechet=False),
    Kind("mixed", "the mixed column of Table 1 alone", _CORRUPTED),
    Kind("separated", "the separated column of Table 1 alone", _CORRUPTED),
    Kind("frechet", "Fig. 2: Fréchet distance, separated and mixed", _CORRUPTED),
    Kind("groups", "accuracy against k, and the sizes of the groups (Appendix D.2)", _CORRUPTED),
    Kind("same", "adapting to the same distribution (Appendix D.5)", _CORRUPTED),
    Kind("dann", "DANN beside CAFe (Appendix D.6)", _CORRUPTED),
    Kind("continual", "one corruption after the other, without reset", _CORRUPTED, frechet=False),
    Kind("shift", "SVHN to MNIST (Appendix D.4)", ("mnist",)),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _KINDS}


@dataclass(frozen=True)
class Experiment:
    """Everything that decides the numbers, but for the model and the images themselves."""

    kind: str
    base: Base
    parts: tuple[Part, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    limit: int | None = None
    corruptions: tuple[str, ...] = corruptions.NAMES
    corruption_seed: int = 0
    frechet: bool = True

    def episodes(self, protocol: str, seed: int, num_images: int) -> list[Episode]:
        """What comes in which order, for one seed."""
        if protocol in ("clean", "shift"):
            return protocols.clean(num_images, seed, self.limit)
        names, severities = self.corruptions, self.base.severities
        if protocol == "all-mixed":
            return protocols.all_mixed(num_images, names, severities, seed, self.limit, self.base.copies)
        deal = {
            "separated": protocols.separated,
            "severity-mixed": protocols.severity_mixed,
            "continual": protocols.continual,
        }[protocol]
        return deal(num_images, names, severities, seed, self.limit)


def experiment(
    kind: str,
    base: str | Base,
    methods: Sequence[str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    sweep: Sequence[int] | None = None,
    mode: Mode | None = None,
    variants: Mapping[str, Variant] | None = None,
    **settings: Any,
) -> Experiment:
    """A kind on a data set, with the paper's methods or those named, and options changed by method.

    Where a name in `methods` is one of `variants`, that method with those options stands in the table under that name.
    """
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown experiment {kind!r}{hint}; choose from: {', '.join(KINDS)}")
    found = _base(base)
    if found.name in BASES and found.name not in KINDS[kind].bases:
        raise ValueError(f"experiment {kind!r} is not for {found.name}; choose from: {', '.join(KINDS[kind].bases)}")
    described = _Described(options or {}, variants or {})
    mode = mode or ("online" if kind in ("online", "continual") else "offline")
    preset = f"{found.preset}-online" if mode == "online" else found.preset
    rivals = [name for name, method in METHODS.items() if method.needs != "data"]
    if kind == "groups":
        names = list(methods or ["cafe"])
        choices = tuple(
            replace(described.choice(name, preset), label=f"{name} k={k}", num_groups=k)
            for name in names
            for k in (sweep or found.sweep)
        )
        parts: tuple[Part, ...] = (Part("all-mixed", mode, choices),)
    else:
        default = ["source", "dann", "cafe"] if kind == "dann" else rivals
        choices = tuple(described.choice(name, preset) for name in (methods or default))
        columns = {
            "table1": found.mixtures,
            "online": found.mixtures,
            "frechet": tuple(p for p in found.mixtures if p != "severity-mixed"),
            "mixed": ("all-mixed",),
            "separated": ("separated",),
            "same": ("clean",),
            "dann": ("all-mixed",),
            "continual": ("continual",),
            "shift": ("shift",),
        }[kind]
        parts = tuple(Part(protocol, mode, choices) for protocol in columns)
    return Experiment(kind, found, parts, frechet=settings.pop("frechet", KINDS[kind].frechet), **settings)


def _base(base: str | Base) -> Base:
    if isinstance(base, Base):
        return base
    if base not in BASES:
        near = get_close_matches(base, BASES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown data set {base!r}{hint}; choose from: {', '.join(BASES)}")
    return BASES[base]


@dataclass(frozen=True)
class _Described:
    """Methods as somebody wants them: options by method, and variants under names of their own."""

    options: Mapping[str, Mapping[str, Any]]
    variants: Mapping[str, Variant]

    def choice(self, label: str, preset: str) -> Choice:
        name, options = self.variants.get(label, (label, {}))
        known = METHODS[name].presets if name in METHODS else {}
        # Methods that do the same online and offline have no preset of their own for it.
        fitting = preset if preset in known else preset.removesuffix("-online")
        return Choice(name, configure(name, fitting, **{**self.options.get(name, {}), **options}), label)
