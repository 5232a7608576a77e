"""Protocols: how images and corruptions are dealt into episodes. The adapter is reset before each episode.

The same seed deals the same images. A corrupted image itself is the same in every protocol and for every seed, as in
the published data sets: the seed decides which image gets which corruption, and when it comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, order=True)
class Domain:
    """A corruption at a severity; severity 0 is the clean image."""

    corruption: str
    severity: int

    def __str__(self) -> str:
        return "clean" if self.severity == 0 else f"{self.corruption}-{self.severity}"


CLEAN = Domain("clean", 0)


@dataclass(frozen=True)
class Episode:
    """One stream of images, in the order they come."""

    name: str
    images: Indices  # (n,) numbers of images in the data set
    domains: tuple[Domain, ...]
    domain_of: Indices  # (n,) which of the domains each image comes from

    def __len__(self) -> int:
        return len(self.images)


def domains(corruptions: Sequence[str], severities: Sequence[int]) -> list[Domain]:
    """Every corruption at every severity."""
    return [Domain(corruption, severity) for corruption in corruptions for severity in severities]


def clean(num_images: int, seed: int = 0, limit: int | None = None) -> list[Episode]:
    """One episode of uncorrupted images, shuffled: the same distribution, or another data set as it is."""
    random = np.random.default_rng([seed, 1])
    images = _chosen(num_images, limit, random)
    return [Episode("clean", images, (CLEAN,), np.zeros(len(images), dtype=np.int64))]


def separated(
    num_images: int, corruptions: Sequence[str], severities: Sequence[int], seed: int = 0, limit: int | None = None
) -> list[Episode]:
    """One episode for each corruption and severity, of all the images, shuffled."""
    episodes = []
    for number, domain in enumerate(domains(corruptions, severities)):
        images = _chosen(num_images, limit, np.random.default_rng([seed, 2, number]))
        episodes.append(Episode(str(domain), images, (domain,), np.zeros(len(images), dtype=np.int64)))
    return episodes


def severity_mixed(
    num_images: int, corruptions: Sequence[str], severities: Sequence[int], seed: int = 0, limit: int | None = None
) -> list[Episode]:
    """One episode for each corruption; each image comes at a severity drawn at random."""
    episodes = []
    for number, corruption in enumerate(corruptions):
        random = np.random.default_rng([seed, 3, number])
        episodes.append(_mixed(corruption, num_images, domains([corruption], severities), random, limit, 1))
    return episodes


def all_mixed(
    num_images: int,
    corruptions: Sequence[str],
    severities: Sequence[int],
    seed: int = 0,
    limit: int | None = None,
    copies: int = 1,
) -> list[Episode]:
    """One episode of all images, each with a corruption and a severity drawn at random: the paper's `mixed`.

    With `copies`, each image comes that often, with another draw each time: for small data sets.
    """
    random = np.random.default_rng([seed, 4])
    return [_mixed("mixed", num_images, domains(corruptions, severities), random, limit, copies)]


def continual(
    num_images: int, corruptions: Sequence[str], severities: Sequence[int], seed: int = 0, limit: int | None = None
) -> list[Episode]:
    """One episode of all the separated ones, one after the other: the adapter is never reset."""
    parts = separated(num_images, corruptions, severities, seed, limit)
    images = np.concatenate([part.images for part in parts])
    domain_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return [Episode("continual", images, tuple(part.domains[0] for part in parts), domain_of)]


def _mixed(
    name: str, num_images: int, choices: list[Domain], random: np.random.Generator, limit: int | None, copies: int
) -> Episode:
    if copies < 1:
        raise ValueError(f"expected `copies` to be at least 1, but got {copies}")
    images = np.concatenate([_chosen(num_images, limit, random) for _ in range(copies)])
    images = random.permutation(images)
    return Episode(name, images, tuple(choices), random.integers(0, len(choices), len(images)))


def _chosen(num_images: int, limit: int | None, random: np.random.Generator) -> Indices:
    """A shuffled subset. Without a limit, or with a larger one, all of them."""
    if num_images < 1:
        raise ValueError("expected at least one image, but the data set is empty")
    if limit is not None and limit < 1:
        raise ValueError(f"expected `limit` to be at least 1 or None, but got {limit}")
    return random.permutation(num_images)[:limit].astype(np.int64)
