"""Scenarios: what honest cameras and attackers send to a server, round by round. No clock and no server here.

Six honest cameras, each with weather of its own, send six images a round; in some scenarios somebody else sends images
too. Only answers to honest cameras are scored. Everything follows from the seed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cafe_tta.simulate import attacks
from cafe_tta.simulate.attacks import Attack, honest_names, many_names, new_names, one_name
from cafe_tta.simulate.images import Images
from cafe_tta.simulate.weather import CLEAN, Domain

ROUNDS = 120
EACH = 6  # images of an honest camera in a round
STRETCH = 15  # rounds in which a camera that sees few classes sees the same ones
WEATHER: tuple[Domain, ...] = (
    CLEAN, ("motion_blur", 5), ("snow", 5), ("frost", 5), ("brightness", 5), ("fog", 5)
)  # fmt: skip
# The server's rules were chosen on these cameras and other seeds, never on those above.
DEVELOPMENT: tuple[Domain, ...] = (
    CLEAN, ("spatter", 5), ("saturate", 5), ("frost", 2), ("brightness", 4), ("contrast", 3)
)  # fmt: skip
Classes = Callable[[int, int, Sequence[int]], Sequence[int]]  # which a camera sees, in a stretch, of all in some order


@dataclass(frozen=True, eq=False)
class Sending:
    """Images of one camera, to be answered together. `honest` is the number of an honest camera, whose labels count."""

    camera: str
    images: np.ndarray  # uint8 (n, H, W, 3), or float32 (n, 3, H, W) as the network receives them
    adapt: bool = True
    honest: int | None = None
    labels: np.ndarray | None = None
    source: np.ndarray | None = None  # the source model's answers


@dataclass(frozen=True)
class HonestCamera:
    """An honest camera: its number, what it sees, and how fast it sends."""

    number: int
    domain: Domain
    rate: float = 20.0  # images a second

    @property
    def name(self) -> str:
        return f"{self.domain[0].replace('_', '-')}-{self.number + 1}"

    @property
    def text(self) -> str:
        """What it sees, in words."""
        return (
            "always clear" if self.domain == CLEAN else f"{self.domain[0].replace('_', ' ')}, severity {self.domain[1]}"
        )

    def describe(self) -> dict[str, Any]:
        """The camera as plain JSON."""
        return {"name": self.name, "domain": list(self.domain), "rate": self.rate}

    def sends(self, pool: Images, chosen: np.ndarray, adapt: bool) -> Sending:
        images, source = pool.take(self.domain, chosen), pool.source[self.domain][chosen]
        return Sending(self.name, images, adapt, self.number, pool.labels[chosen], source)


def _one_class(camera: int, stretch: int, classes: Sequence[int]) -> Sequence[int]:
    """Another class for each camera."""
    return [classes[(camera + 3 * stretch) % len(classes)]]


def _same_few(camera: int, stretch: int, classes: Sequence[int]) -> Sequence[int]:
    """The same two for all cameras."""
    return [classes[(2 * stretch + n) % len(classes)] for n in range(2)]


@dataclass(frozen=True)
class Scenario:
    """What honest cameras see, and who else sends images."""

    name: str
    text: str
    attack: Attack | None = None
    classes: Classes | None = None  # None: all, in any order
    quiet: bool = False  # the honest cameras are silent in the third quarter: they are answered, not adapted to

    def rounds(
        self, pool: Images, weather: Sequence[Domain] = WEATHER, rounds: int = ROUNDS, seed: int = 0
    ) -> Iterator[list[Sending]]:
        """What is sent in each round, honest cameras first."""
        random = np.random.default_rng(seed)
        cameras = honest_cameras(weather)
        names = tuple(camera.name for camera in cameras)
        order = random.permutation(int(pool.labels.max()) + 1).tolist()
        decks = [_Deck(random) for _ in cameras]
        for number in range(rounds):
            sent = []
            for camera, deck in zip(cameras, decks, strict=True):
                wanted = None if self.classes is None else self.classes(camera.number, number // STRETCH, order)
                adapt = not (self.quiet and 4 * number // rounds == 2)
                sent.append(camera.sends(pool, deck.draw(pool.labels, wanted), adapt))
            if self.attack is not None:
                bad = self.attack.sendings(pool, names, (number, rounds), random)
                sent += [Sending(name, images) for name, images in bad]
            yield sent


class _Deck:
    """Draws images of some classes; none comes again before all of them have come, or other classes are wanted."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._classes: Sequence[int] | None = None
        self._rest: list[int] = []

    def draw(self, labels: np.ndarray, classes: Sequence[int] | None) -> np.ndarray:
        if classes != self._classes:
            self._classes, self._rest = classes, []
        usable = np.arange(len(labels)) if classes is None else np.flatnonzero(np.isin(labels, classes))
        while len(self._rest) < EACH:
            self._rest += self._random.permutation(usable).tolist()
        drawn, self._rest = self._rest[:EACH], self._rest[EACH:]
        return np.array(drawn)


def honest_cameras(weather: Sequence[Domain] = WEATHER, rate: float = 20.0) -> list[HonestCamera]:
    """One camera for each weather.

    >>> [camera.name for camera in honest_cameras()][:2]
    ['clean-1', 'motion-blur-2']
    """
    return [HonestCamera(number, domain, rate) for number, domain in enumerate(weather)]


def domains(weather: Sequence[Domain] = WEATHER) -> list[Domain]:
    """All domains that the images are needed in."""
    return sorted({*weather, CLEAN, attacks.SNOW, attacks.FOG})


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("no-attack", "Honest cameras alone, which see all classes in any order."),
        Scenario("one-class", "Each camera sees one class for a while, another one than the others.", None, _one_class),
        Scenario("same-classes", "All cameras see the same two classes for a while.", None, _same_few),
        Scenario("black", "One bad camera sends black frames.", Attack(attacks.black, one_name)),
        Scenario(
            "one-class-flood",
            "One bad camera sends clean images of one class.",
            Attack(attacks.one_class, one_name),
        ),
        Scenario("repeated", "One bad camera sends three images again and again.", Attack(attacks.repeated, one_name)),
        Scenario("noise", "One bad camera sends noise.", Attack(attacks.noise, one_name)),
        Scenario("mosaics", "One bad camera sends blocks of random colours.", Attack(attacks.mosaics, one_name)),
        Scenario("negatives", "One bad camera sends negatives.", Attack(attacks.negatives, one_name)),
        Scenario("ramp", "One bad camera's images turn into noise, slowly.", Attack(attacks.ramp, one_name)),
        Scenario(
            "extreme",
            "One bad camera sends tensors with values of up to 100,000.",
            Attack(attacks.extreme, one_name),
        ),
        Scenario(
            "foreign",
            "Every second image of each honest camera shows something else: parts of photographs.",
            Attack(attacks.photographs, honest_names, len(WEATHER) * EACH, begins=0),
        ),
        Scenario(
            "names-noise-quiet",
            "200 fake names send noise, also while the honest cameras are silent.",
            Attack(attacks.noise, many_names, 100),
            quiet=True,
        ),
        Scenario(
            "names-clean-noise",
            "200 fake names send clean images and noise, from the beginning.",
            Attack(attacks.clean_and_noise, many_names, 100, begins=0),
        ),
        Scenario(
            "new-names",
            "Somebody takes new names all the time, 17 at once, and sends noise.",
            Attack(attacks.noise, new_names, 51),
        ),
        Scenario(
            "honest-names-clean",
            "Somebody sends clean images by the names of the honest cameras, from the beginning.",
            Attack(attacks.clean, honest_names, begins=0),
        ),
        Scenario(
            "honest-names-noise",
            "Somebody sends noise by the names of the honest cameras.",
            Attack(attacks.noise, honest_names),
        ),
        Scenario(
            "honest-names-fog",
            "Somebody sends one foggy class by the names of the honest cameras.",
            Attack(attacks.one_foggy_class, honest_names),
        ),
    )
}  # fmt: skip
