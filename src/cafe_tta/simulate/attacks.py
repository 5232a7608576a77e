"""Images that a server should not learn from, or should not learn too much from: what bad cameras send.

Every kind is a function of the labelled images, a random generator, how many images are wanted, and how far the attack
has come (0 to 1). Images are uint8 (n, H, W, 3), or float32 (n, 3, H, W) as the network receives them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from cafe_tta.simulate.images import Images
from cafe_tta.simulate.weather import CLEAN, Domain

Kind = Callable[[Images, np.random.Generator, int, float], np.ndarray]
Names = Callable[[int, tuple[str, ...], np.random.Generator], list[str]]  # of a round, beside these honest cameras
SNOW: Domain = ("snow", 5)
FOG: Domain = ("fog", 5)
LASTS = 6  # rounds in which a name that is soon given up is used: 18 images, three a round


@dataclass(frozen=True)
class Attack:
    """What is sent beside honest cameras: a kind of images, by which names, how many a round, and from when on."""

    kind: Kind
    names: Names
    images: int = 48  # a round, of all names together: eight times as many as an honest camera sends
    begins: float = 0.25  # share of the rounds

    def sendings(
        self, pool: Images, honest: tuple[str, ...], time: tuple[int, int], random: np.random.Generator
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Name and images of every request in one round: `time` is its number, and that of all rounds."""
        number, rounds = time
        progress = (number / rounds - self.begins) / (1 - self.begins)
        if progress < 0:
            return
        names = self.names(number, honest, random)
        made = self.kind(pool, random, self.images, progress)
        for place, name in enumerate(names):
            part = made[place * len(made) // len(names) : (place + 1) * len(made) // len(names)]
            if len(part):
                yield name, part


# Names


def one_name(number: int, honest: tuple[str, ...], random: np.random.Generator) -> list[str]:
    return ["bad"]


def honest_names(number: int, honest: tuple[str, ...], random: np.random.Generator) -> list[str]:
    return list(honest)


def new_names(number: int, honest: tuple[str, ...], random: np.random.Generator) -> list[str]:
    """17 at once, each of which is given up as soon as it has sent a few images."""
    return [f"new-{number // LASTS}-{place}" for place in range(17)]


def many_names(number: int, honest: tuple[str, ...], random: np.random.Generator) -> list[str]:
    """Half of 200, drawn at random."""
    return [f"fake-{name}" for name in random.permutation(200)[:100]]


# Images


def noise(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    return random.integers(0, 256, (count, *pool.shape), dtype=np.uint8)


def black(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    return np.zeros((count, *pool.shape), dtype=np.uint8)


def clean(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    return pool.take(CLEAN, random.integers(0, len(pool), count))


def clean_and_noise(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    """Every second one is noise."""
    made = clean(pool, random, count, progress)
    made[::2] = noise(pool, random, len(made[::2]), progress)
    return made


def one_class(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    """Clean images of one class, moved and lit a little differently each time."""
    chosen = pool.take(CLEAN, random.choice(np.flatnonzero(pool.labels == pool.labels[0]), count))
    moved = [np.roll(image, tuple(random.integers(-2, 3, 2)), (0, 1)) for image in chosen]
    return np.clip(np.stack(moved) * random.uniform(0.8, 1.2, (count, 1, 1, 1)), 0, 255).astype(np.uint8)


def one_foggy_class(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    return pool.take(FOG, random.choice(np.flatnonzero(pool.labels == pool.labels[0]), count))


def repeated(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    """Three images again and again, each time with a little noise, so that no two are the same."""
    chosen = pool.take(SNOW, random.integers(0, 3, count))
    return np.clip(chosen + random.normal(0, 4, chosen.shape), 0, 255).astype(np.uint8)


def mosaics(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    """Random colours in blocks of random size: no two images are alike."""
    height, width, _ = pool.shape
    made = []
    for side in random.choice([1, 2, 4, 8, 16], count):
        blocks = random.integers(0, 256, (-(-height // side), -(-width // side), 3), dtype=np.uint8)
        made.append(blocks.repeat(side, 0).repeat(side, 1)[:height, :width])
    return np.stack(made)


def negatives(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    return 255 - clean(pool, random, count, progress)


def ramp(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    """Snowy images that turn into noise so slowly that no two rounds differ much."""
    snowy = pool.take(SNOW, random.integers(0, len(pool), count))
    return ((1 - progress) * snowy + progress * noise(pool, random, count, progress)).astype(np.uint8)


def photographs(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    """Parts of photographs of something else: a temple and a flower, of scikit-learn."""
    height, width, _ = pool.shape
    made = []
    for _ in range(count):
        photo = _photos()[int(random.integers(2))]
        step = int(random.integers(1, min(photo.shape[0] // height, photo.shape[1] // width) + 1))
        top = int(random.integers(photo.shape[0] - step * height + 1))
        left = int(random.integers(photo.shape[1] - step * width + 1))
        made.append(photo[top : top + step * height : step, left : left + step * width : step])
    return np.stack(made)


@cache
def _photos() -> list[np.ndarray]:
    from sklearn.datasets import load_sample_images  # here, not above: importing the package must not load it

    return list(load_sample_images().images)


def extreme(pool: Images, random: np.random.Generator, count: int, progress: float) -> np.ndarray:
    """Tensors with values of up to 10⁵, where those of ordinary images are about 1."""
    height, width, channels = pool.shape
    size = 10.0 ** random.uniform(0, 5, (count, 1, 1, 1))
    return (size * random.standard_normal((count, channels, height, width))).astype(np.float32)
