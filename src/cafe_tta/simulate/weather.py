"""What cameras see and when: weather, light and poor links that change, and requests at random times. No clock here.

Everything follows from the seed: the same cameras send the same images in the same order, however fast the server is.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Domain = tuple[str, int]  # a corruption and its severity; ("clean", 0): none
CLEAN: Domain = ("clean", 0)


@dataclass(frozen=True)
class Weather:
    """How the domain of a camera changes; time is counted in periods."""

    name: str
    text: str
    at: Callable[[float], Domain]

    def domains(self) -> set[Domain]:
        """All domains that occur."""
        return {self.at(step / 1000) for step in range(1000)}


def _comes_and_goes(corruption: str, worst: int) -> Callable[[float], Domain]:
    """Clear for half of the time; then it thickens, and thins out again."""

    def at(time: float) -> Domain:
        severity = math.ceil(worst * math.sin(2 * math.pi * time) - 0.25)
        return (corruption, severity) if severity > 0 else CLEAN

    return at


def _by_turns(corruption: str, severities: tuple[int, ...]) -> Callable[[float], Domain]:
    """Stretches of equal length, each at its severity; 0 is clean."""

    def at(time: float) -> Domain:
        severity = severities[int(time % 1 * len(severities))]
        return (corruption, severity) if severity else CLEAN

    return at


WEATHER = {
    kind.name: kind
    for kind in (
        Weather("fog", "fog comes and goes", _comes_and_goes("fog", 5)),
        Weather("clear", "always clear", lambda time: CLEAN),
        Weather("night", "noise at night", _by_turns("gaussian_noise", (0, 0, 3, 5, 5, 3))),
        Weather("link", "JPEG when the link is poor", _by_turns("jpeg_compression", (0, 5, 0, 0, 4, 0))),
        Weather("frost", "frost in the morning", _by_turns("frost", (4, 3, 2, 1, 0, 0, 0, 0))),
        Weather("glare", "the low sun", _comes_and_goes("brightness", 5)),
        Weather("haze", "haze that thickens and clears", _comes_and_goes("contrast", 3)),
        Weather("snow", "showers of snow", _by_turns("snow", (0, 5, 0, 0, 4, 0, 5, 0))),
    )
}


@dataclass(frozen=True)
class Camera:
    """A camera: its name, its weather, and how fast it sends."""

    name: str
    weather_name: str  # the weather itself cannot be sent to another process
    rate: float  # images a second, on average
    phase: float  # where in its weather it begins, in periods
    seed: tuple[int, int]  # the simulation's, and the camera's own

    @property
    def weather(self) -> Weather:
        return WEATHER[self.weather_name]

    @property
    def text(self) -> str:
        """What it sees, in words."""
        return self.weather.text

    def describe(self) -> dict[str, Any]:
        """The camera as plain JSON."""
        return {
            "name": self.name,
            "story_name": self.weather_name,  # the key that files have had from the beginning
            "rate": self.rate,
            "phase": self.phase,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Shot:
    """One request of a camera: when, which images, in which domain."""

    time: float  # seconds since the beginning
    images: np.ndarray  # indices of the images
    domain: Domain


def make_cameras(count: int, rate: float, seed: int = 0) -> list[Camera]:
    """Cameras that take the kinds of weather in turn, each with its own rate around `rate` and its own phase.

    >>> [(camera.name, camera.weather.text) for camera in make_cameras(2, rate=20)]
    [('fog-1', 'fog comes and goes'), ('clear-1', 'always clear')]
    """
    if count < 1:
        raise ValueError(f"expected at least one camera, but got {count}")
    if not rate > 0:
        raise ValueError(f"expected a rate above 0 images a second, but got {rate}")
    cameras = []
    for number in range(count):
        weather = list(WEATHER)[number % len(WEATHER)]
        random = np.random.default_rng((seed, number, 0))
        own = rate * float(random.uniform(0.5, 1.5))
        name = f"{weather}-{number // len(WEATHER) + 1}"
        cameras.append(Camera(name, weather, own, float(random.uniform()), (seed, number)))
    return cameras


def shots(camera: Camera, *, duration: float, period: float, pool: int, images_per_request: int) -> Iterator[Shot]:
    """The requests of a camera: Poisson arrivals, with images drawn from `pool` of them."""
    random = np.random.default_rng((*camera.seed, 1))
    time = 0.0
    while True:
        time += float(random.exponential(images_per_request / camera.rate))
        if time >= duration:
            return
        images = random.integers(pool, size=images_per_request)
        yield Shot(time, images, camera.weather.at(time / period + camera.phase))
