"""What cameras see and when: stories of weather, light and poor links, and requests at random moments. No clock here.

Everything follows from the seed: the same cameras send the same images in the same order, however fast the server is.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

Condition = tuple[str, int]  # a corruption and its severity; ("clean", 0): none
CLEAN: Condition = ("clean", 0)


@dataclass(frozen=True)
class Story:
    """How the condition of a camera changes; time is counted in periods."""

    name: str
    tale: str
    at: Callable[[float], Condition]

    def conditions(self) -> set[Condition]:
        """All conditions that come up."""
        return {self.at(step / 1000) for step in range(1000)}


def _comes_and_goes(corruption: str, worst: int) -> Callable[[float], Condition]:
    """Clear for half of the time; then it thickens, and thins out again."""

    def at(time: float) -> Condition:
        severity = math.ceil(worst * math.sin(2 * math.pi * time) - 0.25)
        return (corruption, severity) if severity > 0 else CLEAN

    return at


def _by_turns(corruption: str, severities: tuple[int, ...]) -> Callable[[float], Condition]:
    """Stretches of equal length, each at its severity; 0 is clean."""

    def at(time: float) -> Condition:
        severity = severities[int(time % 1 * len(severities))]
        return (corruption, severity) if severity else CLEAN

    return at


STORIES = {
    story.name: story
    for story in (
        Story("fog", "fog comes and goes", _comes_and_goes("fog", 5)),
        Story("clear", "always clear", lambda time: CLEAN),
        Story("night", "noise at night", _by_turns("gaussian_noise", (0, 0, 3, 5, 5, 3))),
        Story("link", "JPEG when the link is poor", _by_turns("jpeg_compression", (0, 5, 0, 0, 4, 0))),
        Story("frost", "frost in the morning", _by_turns("frost", (4, 3, 2, 1, 0, 0, 0, 0))),
        Story("glare", "the low sun", _comes_and_goes("brightness", 5)),
        Story("haze", "haze that thickens and clears", _comes_and_goes("contrast", 3)),
        Story("snow", "showers of snow", _by_turns("snow", (0, 5, 0, 0, 4, 0, 5, 0))),
    )
}


@dataclass(frozen=True)
class Camera:
    """A camera: its name, its story, how fast it sends."""

    name: str
    story_name: str  # a story itself does not go from process to process
    rate: float  # images a second, on average
    phase: float  # where in its story it begins, in periods
    seed: tuple[int, int]  # the simulation's, and the camera's own

    @property
    def story(self) -> Story:
        return STORIES[self.story_name]


@dataclass(frozen=True)
class Shot:
    """One request of a camera: when, which images, in what condition."""

    time: float  # seconds since the beginning
    images: np.ndarray  # numbers of the images
    condition: Condition


def make_cameras(count: int, rate: float, seed: int = 0) -> list[Camera]:
    """Cameras with stories in turn, each with a rate of its own (around `rate`) and a place of its own in its story."""
    if count < 1:
        raise ValueError(f"expected at least one camera, but got {count}")
    if not rate > 0:
        raise ValueError(f"expected a rate above 0 images a second, but got {rate}")
    made = []
    for number in range(count):
        story = list(STORIES)[number % len(STORIES)]
        random = np.random.default_rng((seed, number, 0))
        own = rate * float(random.uniform(0.5, 1.5))
        name = f"{story}-{number // len(STORIES) + 1}"
        made.append(Camera(name, story, own, float(random.uniform()), (seed, number)))
    return made


def shots(camera: Camera, *, duration: float, period: float, pool: int, images_per_request: int) -> Iterator[Shot]:
    """The requests of a camera: Poisson arrivals, images drawn from a pool of so many."""
    random = np.random.default_rng((*camera.seed, 1))
    time = 0.0
    while True:
        time += float(random.exponential(images_per_request / camera.rate))
        if time >= duration:
            return
        images = random.integers(pool, size=images_per_request)
        yield Shot(time, images, camera.story.at(time / period + camera.phase))
