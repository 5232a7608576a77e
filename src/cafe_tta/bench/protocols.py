"""Protocols: how images and corruptions are dealt into episodes. The adapter is reset before each episode.

The same seed deals the same images. A corrupted image itself is the same in every protocol and for every seed, as in
the published data sets: the seed decides which image gets which corruption, and in which order the images come.

A new protocol is a function that takes any of the arguments of `Protocol.episodes` by their names, and a value in
`PROTOCOLS`. Further arguments, with numbers as defaults, are its options: `class-correlated(delta=0.01)` is a protocol.
"""

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cafe_tta import options, plugins

DELTA = 0.1  # parameter of the Dirichlet distribution: the smaller, the longer a class stays
ROUNDS = 5  # of a recurring stream
RATIO = 10.0  # of the most frequent class to the rarest, under label shift
IMAGES = 5000  # of each corruption in `mixed-75k`

Indices = npt.NDArray[np.int64]
Names = Sequence[str]  # of corruptions
Levels = Sequence[int]  # severities
Limit = int | None  # at most this many images of the data set


@dataclass(frozen=True, order=True)
class Domain:
    """A corruption at a severity; severity 0 is the clean image.

    >>> str(Domain("fog", 5)), str(CLEAN)
    ('fog-5', 'clean')
    """

    corruption: str
    severity: int

    def __str__(self) -> str:
        return "clean" if self.severity == 0 else f"{self.corruption}-{self.severity}"


CLEAN = Domain("clean", 0)


@dataclass(frozen=True)
class EpisodeSummary:
    """What an episode contains: images by domain, and a hash of which image comes when with which corruption."""

    name: str
    images: int
    domains: dict[str, int]
    digest: str


@dataclass(frozen=True)
class Episode:
    """One stream of images, in the order in which they come."""

    name: str
    images: Indices  # (n,) indices of images in the data set
    domains: tuple[Domain, ...]
    domain_of: Indices  # (n,) index of the domain of each image

    def __len__(self) -> int:
        return len(self.images)

    def summary(self) -> EpisodeSummary:
        """The contents in short, as they are recorded."""
        counts = np.bincount(self.domain_of, minlength=len(self.domains))
        domains = {str(domain): int(count) for domain, count in zip(self.domains, counts, strict=True) if count}
        digest = hashlib.sha256(self.images.astype("<i8").tobytes() + self.domain_of.astype("<i8").tobytes())
        return EpisodeSummary(self.name, len(self), domains, digest.hexdigest()[:16])


@dataclass(frozen=True)
class Protocol:
    """How images are dealt into episodes, and how its results are shown.

    >>> [len(episode) for episode in PROTOCOLS["separated"].episodes(10, ["fog", "snow"], [5], limit=8)]
    [8, 8]
    """

    name: str
    deal: Callable[..., list[Episode]]  # takes those arguments of `episodes` that it names
    meaning: str = ""  # its episodes, in words
    table: str = ""  # title of its own table; without one, it is a column of the main tables
    colour: str | None = None  # in figures; None: the next one of the palette

    def episodes(
        self,
        num_images: int,
        corruptions: Names,
        severities: Levels,
        seed: int = 0,
        limit: Limit = None,
        copies: int = 1,
        labels: Indices | None = None,
    ) -> list[Episode]:
        """The episodes of a data set. `labels` are those of its images, for streams that come class by class."""
        given = {name: value for name, value in locals().items() if name != "self"}
        parameters = inspect.signature(self.deal).parameters
        needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
        if unknown := [name for name in needed if name not in given]:
            raise TypeError(
                f"the protocol {self.name} takes {unknown[0]!r}; expected arguments among: {', '.join(given)}"
            )
        if "labels" in parameters and labels is None:
            raise ValueError(f"the protocol {self.name} needs labels, which the data set does not have")
        return self.deal(**{name: value for name, value in given.items() if name in parameters})

    def options(self) -> dict[str, float]:
        """What can be changed about it, with its defaults.

        >>> PROTOCOLS["recurring"].options()
        {'rounds': 5}
        """
        own = inspect.signature(Protocol.episodes).parameters
        return {
            name: parameter.default
            for name, parameter in inspect.signature(self.deal).parameters.items()
            if name not in own and isinstance(parameter.default, int | float)
        }

    def changed(self, settings: Mapping[str, str]) -> "Protocol":
        """The same protocol with other options, which are in its name.

        >>> PROTOCOLS["class-correlated"].changed({"delta": "1e-2"}).name
        'class-correlated(delta=0.01)'
        """
        defaults = self.options()
        options.require_known(settings, defaults, self.name)
        values: dict[str, float] = {}
        for name, text in settings.items():
            try:
                values[name] = type(defaults[name])(text)
            except ValueError:
                kind = "a whole number" if isinstance(defaults[name], int) else "a number"
                raise ValueError(f"expected `{name}` of {self.name} to be {kind}, but got {text!r}") from None
        shown = ",".join(f"{name}={value}" for name, value in values.items())
        return replace(self, name=f"{self.name}({shown})", deal=partial(self.deal, **values), colour=None)


def domains(corruptions: Names, severities: Levels) -> list[Domain]:
    """Every corruption at every severity."""
    return [Domain(corruption, severity) for corruption in corruptions for severity in severities]


def separated(
    num_images: int, corruptions: Names, severities: Levels, seed: int = 0, limit: Limit = None, copies: int = 1
) -> list[Episode]:
    """One episode for each corruption and severity, of all the images, shuffled."""
    episodes = []
    for number, domain in enumerate(domains(corruptions, severities)):
        images = _chosen(num_images, limit, np.random.default_rng([seed, 2, number]))
        episodes.append(Episode(str(domain), images, (domain,), np.zeros(len(images), dtype=np.int64)))
    return episodes


def severity_mixed(
    num_images: int, corruptions: Names, severities: Levels, seed: int = 0, limit: Limit = None, copies: int = 1
) -> list[Episode]:
    """One episode for each corruption; the severity of each image is drawn at random."""
    episodes = []
    for number, corruption in enumerate(corruptions):
        random = np.random.default_rng([seed, 3, number])
        episodes.append(_mixed(corruption, num_images, domains([corruption], severities), random, limit, 1))
    return episodes


def all_mixed(
    num_images: int, corruptions: Names, severities: Levels, seed: int = 0, limit: Limit = None, copies: int = 1
) -> list[Episode]:
    """One episode of all images, each with a corruption and a severity drawn at random: the paper's `mixed`.

    With `copies`, each image comes that many times, with another draw each time: for small data sets.
    """
    random = np.random.default_rng([seed, 4])
    return [_mixed("mixed", num_images, domains(corruptions, severities), random, limit, copies)]


def continual(
    num_images: int, corruptions: Names, severities: Levels, seed: int = 0, limit: Limit = None, copies: int = 1
) -> list[Episode]:
    """One episode of all the separated ones, one after the other: the adapter is never reset."""
    parts = separated(num_images, corruptions, severities, seed, limit)
    images = np.concatenate([part.images for part in parts])
    domain_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return [Episode("continual", images, tuple(part.domains[0] for part in parts), domain_of)]


def recurring(
    num_images: int,
    corruptions: Names,
    severities: Levels,
    seed: int = 0,
    limit: Limit = None,
    rounds: int = ROUNDS,
) -> list[Episode]:
    """One episode of `rounds` continual ones: every corruption comes back, with its images in another order."""
    _at_least("rounds", rounds, 1)
    parts = [
        continual(num_images, corruptions, severities, _seed(seed, 5, number), limit)[0] for number in range(rounds)
    ]
    images, domain_of = (np.concatenate([getattr(part, name) for part in parts]) for name in ("images", "domain_of"))
    return [Episode("recurring", images, parts[0].domains, domain_of)]


def class_correlated(
    num_images: int,
    corruptions: Names,
    severities: Levels,
    labels: Indices,
    seed: int = 0,
    limit: Limit = None,
    delta: float = DELTA,
) -> list[Episode]:
    """The separated episodes, each with its images in a class-correlated order: see `correlated_order`."""
    episodes = []
    for number, episode in enumerate(separated(num_images, corruptions, severities, seed, limit)):
        random = np.random.default_rng([seed, 6, number])
        order = correlated_order(labels[episode.images], random, delta)
        episodes.append(replace(episode, images=episode.images[order]))
    return episodes


def mixed_correlated(
    num_images: int,
    corruptions: Names,
    severities: Levels,
    labels: Indices,
    seed: int = 0,
    limit: Limit = None,
    copies: int = 1,
    delta: float = DELTA,
) -> list[Episode]:
    """The mixed episode in a class-correlated order: the corruptions come by chance, the classes do not."""
    (episode,) = all_mixed(num_images, corruptions, severities, seed, limit, copies)
    order = correlated_order(labels[episode.images], np.random.default_rng([seed, 7]), delta)
    return [replace(episode, images=episode.images[order], domain_of=episode.domain_of[order])]


def label_shift(
    num_images: int,
    corruptions: Names,
    severities: Levels,
    labels: Indices,
    seed: int = 0,
    limit: Limit = None,
    copies: int = 1,
    ratio: float = RATIO,
) -> list[Episode]:
    """The mixed episode with a part of its images left out, so that some classes are rarer than others.

    Of the r-th of C classes, in an order drawn by the seed, a share ratio^(-r / (C - 1)) is kept, r = 0 … C - 1: all
    images of the most frequent one, 1 / ratio of the rarest. Which ones is drawn by the seed.
    """
    _at_least("ratio", ratio, 1)
    (episode,) = all_mixed(num_images, corruptions, severities, seed, limit, copies)
    random, own = np.random.default_rng([seed, 8]), labels[episode.images]
    classes = random.permutation(np.unique(own))
    shares = float(ratio) ** (-np.arange(len(classes)) / max(1, len(classes) - 1))
    kept = [
        random.permutation(np.flatnonzero(own == c))[: round(s * (own == c).sum())]
        for c, s in zip(classes, shares, strict=True)
    ]
    order = np.sort(np.concatenate(kept))
    return [replace(episode, images=episode.images[order], domain_of=episode.domain_of[order])]


def mixed_75k(
    num_images: int,
    corruptions: Names,
    severities: Levels,
    seed: int = 0,
    limit: Limit = None,
    images: int = IMAGES,
) -> list[Episode]:
    """One episode of `images` images with each corruption, shuffled: the same ones for all corruptions and seeds."""
    _at_least("images", images, 1)
    chosen = _chosen(num_images, limit, np.random.default_rng(0))[:images]
    return _every_pair(chosen, domains(corruptions, severities), np.random.default_rng([seed, 9]))


def mixed_full(
    num_images: int, corruptions: Names, severities: Levels, seed: int = 0, limit: Limit = None
) -> list[Episode]:
    """One episode of all images, each with every corruption, shuffled."""
    random = np.random.default_rng([seed, 10])
    return _every_pair(_chosen(num_images, limit, random), domains(corruptions, severities), random)


def correlated_order(labels: Indices, random: np.random.Generator, delta: float = DELTA) -> Indices:
    """An order of images in which those of a class come together, as on a road or in a video.

    Time is cut into as many slots as there are classes. The images of a class are divided among the slots by shares
    that are drawn from a Dirichlet distribution with all parameters `delta`; in a slot, they come class by class. The
    smaller `delta`, the fewer slots a class is in.

    >>> labels = np.repeat([0, 1, 2], 4)
    >>> labels[correlated_order(labels, np.random.default_rng(0), delta=1e-3)].tolist()
    [1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 2, 2]
    """
    if not delta > 0:
        raise ValueError(f"expected `delta` to be above 0, but got {delta}")
    classes = np.unique(labels)
    slots: list[list[Indices]] = [[] for _ in classes]
    for label in classes:
        own = random.permutation(np.flatnonzero(labels == label))
        shares = random.dirichlet(np.full(len(slots), delta))
        edges = (np.cumsum(shares)[:-1] * len(own)).round().astype(np.int64)
        for slot, part in zip(slots, np.split(own, edges), strict=True):
            slot.append(part)
    return np.concatenate([slot[i] for slot in slots for i in random.permutation(len(slot))])


def clean(
    num_images: int,
    corruptions: Names = (),
    severities: Levels = (),
    seed: int = 0,
    limit: Limit = None,
    copies: int = 1,
) -> list[Episode]:
    """One episode of uncorrupted images, shuffled: the same distribution, or another data set as it is."""
    images = _chosen(num_images, limit, np.random.default_rng([seed, 1]))
    return [Episode("clean", images, (CLEAN,), np.zeros(len(images), dtype=np.int64))]


_PROTOCOLS = (
    Protocol("separated", separated, "one for each corruption and severity", colour="#0072B2"),
    Protocol(
        "severity-mixed",
        severity_mixed,
        "one for each corruption; each image at a severity drawn at random",
        colour="#56B4E9",
    ),
    Protocol(
        "all-mixed", all_mixed, "one; each image with a corruption and a severity drawn at random", colour="#D55E00"
    ),
    Protocol("continual", continual, "one: the separated ones in a row", colour="#E69F00"),
    Protocol("recurring", recurring, f"one: `continual` {ROUNDS} times over (`rounds`), each time in another order"),
    Protocol(
        "class-correlated",
        class_correlated,
        f"the separated ones, where images of a class come together (Dirichlet, `delta` = {DELTA})",
    ),
    Protocol(
        "mixed-correlated",
        mixed_correlated,
        f"`all-mixed`, where images of a class come together (Dirichlet, `delta` = {DELTA})",
    ),
    Protocol(
        "label-shift",
        label_shift,
        f"`all-mixed`, where the most frequent class has {RATIO:g} times as many images as the rarest (`ratio`)",
    ),
    Protocol(
        "mixed-75k", mixed_75k, f"one of {IMAGES:,} images (`images`) with each corruption: 75,000 with 15 of them"
    ),
    Protocol("mixed-full", mixed_full, "one of all images, each with every corruption"),
    Protocol(
        "shift",
        clean,
        "one, of the images of another data set as they are",
        table="Test accuracy [%] on another data set (the paper's: from SVHN to MNIST)",
        colour="#CC79A7",
    ),
    Protocol(
        "clean",
        clean,
        "one, of the images as they are",
        table="Test accuracy [%] on the same distribution: nothing has shifted",
        colour="#009E73",
    ),
)
# In the order of the report's columns.
PROTOCOLS: dict[str, Protocol] = {protocol.name: protocol for protocol in _PROTOCOLS}


def protocol_name(text: str) -> str:
    """The key in `PROTOCOLS` of a protocol by its name, or by package.module:function, which is then added.

    Either may have options, as in `class-correlated(delta=0.01)`: these make another protocol, which is added too.
    """
    match = re.fullmatch(r"([^()]+)\((.+)\)", text)
    base = match[1].strip() if match else text
    name = plugins.add("protocols", base, PROTOCOLS, _as_protocol)
    if name is None:
        raise plugins.unknown("protocol", "protocols", base, PROTOCOLS)
    if match is None:
        return name
    changed = PROTOCOLS[name].changed(options.split_assignments(match[2].split(","), example="delta=0.01"))
    PROTOCOLS.setdefault(changed.name, changed)
    return changed.name


def _as_protocol(name: str, found: Any) -> Protocol:
    if isinstance(found, Protocol):
        return found
    if isinstance(found, type) or not callable(found):
        raise TypeError(f"expected {name} to be a Protocol or a function that returns episodes, but got {found!r}")
    return Protocol(name, found, " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split()))


def _mixed(
    name: str, num_images: int, choices: list[Domain], random: np.random.Generator, limit: Limit, copies: int
) -> Episode:
    if copies < 1:
        raise ValueError(f"expected `copies` to be at least 1, but got {copies}")
    images = np.concatenate([_chosen(num_images, limit, random) for _ in range(copies)])
    images = random.permutation(images)
    return Episode(name, images, tuple(choices), random.integers(0, len(choices), len(images)))


def _every_pair(chosen: Indices, choices: list[Domain], random: np.random.Generator) -> list[Episode]:
    """All images with every domain, shuffled."""
    pairs = random.permutation(len(chosen) * len(choices))
    return [Episode("mixed", chosen[pairs // len(choices)], tuple(choices), pairs % len(choices))]


def _seed(seed: int, *numbers: int) -> int:
    """A seed for a part of a stream."""
    return int(np.random.SeedSequence([seed, *numbers]).generate_state(1)[0])


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"expected `{name}` to be at least {least}, but got {value}")


def _chosen(num_images: int, limit: Limit, random: np.random.Generator) -> Indices:
    """A shuffled subset; all images without a limit, or with a larger one."""
    if num_images < 1:
        raise ValueError("expected at least one image, but the data set is empty")
    if limit is not None and limit < 1:
        raise ValueError(f"expected `limit` to be at least 1 or None, but got {limit}")
    return random.permutation(num_images)[:limit].astype(np.int64)
