"""Protocols: how images and corruptions are dealt into episodes. The adapter is reset before each episode.

The same seed deals the same images. A corrupted image itself is the same in every protocol and for every seed, as in
the published data sets: the seed decides which image gets which corruption, and in which order the images come.

A new protocol is a function that takes any of the arguments of `Protocol.episodes` by their names, and a value in
`PROTOCOLS`.
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cafe_tta import plugins

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
        if unknown := [name for name in parameters if name not in given]:
            raise TypeError(
                f"the protocol {self.name} takes {unknown[0]!r}; expected arguments among: {', '.join(given)}"
            )
        if "labels" in parameters and labels is None:
            raise ValueError(f"the protocol {self.name} needs labels, which the data set does not have")
        return self.deal(**{name: given[name] for name in parameters})


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
    """The key in `PROTOCOLS` of a protocol by its name, or by package.module:function, which is then added."""
    name = plugins.add("protocols", text, PROTOCOLS, _as_protocol)
    if name is None:
        raise plugins.unknown("protocol", "protocols", text, PROTOCOLS)
    return name


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


def _chosen(num_images: int, limit: Limit, random: np.random.Generator) -> Indices:
    """A shuffled subset; all images without a limit, or with a larger one."""
    if num_images < 1:
        raise ValueError("expected at least one image, but the data set is empty")
    if limit is not None and limit < 1:
        raise ValueError(f"expected `limit` to be at least 1 or None, but got {limit}")
    return random.permutation(num_images)[:limit].astype(np.int64)
