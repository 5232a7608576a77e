"""What an image set is, and what a set of images that are corrupted already is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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

    def digest(self) -> str:
        """A SHA-256 of what the set holds, wherever it lies; `data.digest` says of what exactly."""


@runtime_checkable
class CorruptedSet(ImageSet, Protocol):
    """Images that were corrupted by somebody else, such as the published CIFAR-10-C.

    Its length and its labels are those of the clean images behind it, which it does not have: `images` refuses.
    """

    def corruptions(self) -> tuple[str, ...]:
        """The corruptions there are."""

    def severities(self) -> tuple[int, ...]:
        """The severities that all of them come in."""

    def corrupted(self, indices: Sequence[int], corruption: str, severity: int) -> Images:
        """Some images with a corruption at a severity."""


class UnreadableImage(ValueError):
    """An image that cannot be read: damaged, empty, too large or no image at all."""


@dataclass(frozen=True)
class Unreadable:
    """An image that was left out, and why."""

    index: int
    name: str
    why: str
