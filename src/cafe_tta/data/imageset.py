"""What an image set is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8]  # (n, H, W, 3), RGB
Labels = npt.NDArray[np.int64]  # (N,)


class ImageSet(Protocol):
    """Images by their place, with labels where they are known. Reads an image when it is asked for, not before."""

    @property
    def name(self) -> str: ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """What the labels are called."""

    @property
    def labels(self) -> Labels | None:
        """The class of every image, 0 .. C - 1."""

    def __len__(self) -> int: ...

    def item_name(self, index: int) -> str:
        """What a user calls the image: its file, or its number."""

    def images(self, indices: Sequence[int]) -> Images:
        """Some images, all of one size. Raises `UnreadableImage` where one cannot be read."""


class UnreadableImage(ValueError):
    """An image that cannot be read: damaged, empty, too large or no image at all."""


@dataclass(frozen=True)
class Unreadable:
    """An image that was left out, and why."""

    index: int
    name: str
    why: str
