"""One random stream per image, decided by seed, corruption, severity and image index alone."""

from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt


class Streams:
    """Gives, for each image in turn, the generator that all its random numbers come from.

    Philox is a counter cipher: the key is (seed, corruption and severity), and the highest word of the
    counter is the image index, so that no two images ever share a number and no hash is involved. It is one
    generator, set anew for every image (about a microsecond): finish with one image before asking for the
    next.
    """

    def __init__(self, seed: int, corruption_id: int, severity: int, indices: npt.NDArray[np.int64]) -> None:
        self.key = (seed, corruption_id * 8 + severity)  # severities need 3 bits
        self.indices = indices

    def __iter__(self) -> Iterator[np.random.Generator]:
        generator = np.random.Generator(np.random.Philox(key=np.array(self.key, np.uint64)))
        # The stubs know only the states of other bit generators.
        state = cast(dict[str, dict[str, npt.NDArray[np.uint64]]], generator.bit_generator.state)
        counter = state["state"]["counter"]
        for index in self.indices.tolist():
            counter[3] = index
            generator.bit_generator.state = state
            yield generator


def random_words(generator: np.random.Generator, count: int) -> npt.NDArray[np.uint32]:
    """`count` random 32-bit words: the raw output of Philox cut in two, twice as fast as `integers`."""
    raw = generator.bit_generator.random_raw((count + 1) // 2)
    return raw.astype("<u8", copy=False).view("<u4")[:count]


def random_signed(generator: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
    """`count` random numbers, uniform on -1..1."""
    return random_words(generator, count).view(np.int32).astype(np.float32) * np.float32(2**-31)


def random_below(generator: np.random.Generator, bound: int, count: int) -> npt.NDArray[np.intp]:
    """`count` random integers in 0 .. bound - 1; for small bounds even to better than bound / 2^32."""
    product = random_words(generator, count).astype(np.uint64) * np.uint64(bound)
    return (product >> np.uint64(32)).astype(np.intp)
