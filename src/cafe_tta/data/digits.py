"""The embedded data set: scikit-learn's 1797 real handwritten digits. No download.

Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI, 1998.
"""

from difflib import get_close_matches
from functools import cache

import numpy as np
import numpy.typing as npt

from cafe_tta.data.arrays import ArraySet

SPLITS = ("train", "test")
CLASSES = tuple("0123456789")
SIZE = 32  # pixels: what the networks and the corruption parameters of CIFAR expect


def load_digits(split: str = "") -> ArraySet:
    """All digits, or one half of them: `train` or `test`. 32 x 32 pixels, grey as RGB."""
    if split and split not in SPLITS:
        near = get_close_matches(split, SPLITS, n=1)
        hint = f"; did you mean 'digits:{near[0]}'?" if near else ""
        raise ValueError(f"digits have no part {split!r}{hint}; choose from: digits, digits:train, digits:test")
    images, labels = _digits()
    chosen = np.arange(len(labels))
    if split:
        in_train = _in_train(labels)
        chosen = np.flatnonzero(in_train if split == "train" else ~in_train)
    return ArraySet(f"digits:{split}" if split else "digits", images[chosen], labels[chosen], CLASSES)


@cache
def _digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    from PIL import Image  # here, not above: importing the package must not load these
    from sklearn import datasets

    bunch = datasets.load_digits()
    grey = (bunch.images * (255 / 16)).round().astype(np.uint8)  # (N, 8, 8), from 0..16
    large = [np.asarray(Image.fromarray(g).resize((SIZE, SIZE), Image.Resampling.BICUBIC)) for g in grey]
    return np.repeat(np.stack(large)[..., None], 3, axis=3), bunch.target.astype(np.int64)


def _in_train(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """A fixed random half of every class."""
    random = np.random.RandomState(0)  # the old generator: its numbers are promised never to change
    chosen = np.zeros(len(labels), dtype=bool)
    for label in range(len(CLASSES)):
        members = random.permutation(np.flatnonzero(labels == label))
        chosen[members[: (len(members) + 1) // 2]] = True
    return chosen
