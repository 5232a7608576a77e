"""What an image set is, its digest, and the folder that it is looked for in."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8]  # (n, H, W, 3), RGB
Labels = npt.NDArray[np.int64]  # (N,)

WHOLE = 2**30  # bytes of an array that are hashed without sampling
SAMPLED_IMAGES = 1000
SAMPLED_FILES = 64


class ImageSet(Protocol):
    """Images by index, with labels where they are known. An image is read when it is asked for, not before."""

    @property
    def name(self) -> str: ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes."""

    @property
    def labels(self) -> Labels | None:
        """The class of every image, 0 .. C - 1."""

    def __len__(self) -> int: ...

    def item_name(self, index: int) -> str:
        """What a user calls the image: its file, or its number."""

    def images(self, indices: Sequence[int]) -> Images:
        """Some images, all of one size. Raises `UnreadableImage` where one cannot be read."""

    def digest(self) -> str:
        """A SHA-256 of what the set holds, wherever it is stored, for records.

        Two sets with the same digest are the same images with the same labels. Arrays of up to 1 GiB are hashed whole:
        shape, pixels, labels; of larger ones, the shape, the labels and 1000 equally spaced images. Of a folder, the
        names, the sizes and the labels of all files and the content of 64 of them. A corrupted set has such hashes of
        every corruption; ImageNet-C of one domain, and of 8 files of each. Paths above the set play no part, so that a
        copy elsewhere has the same digest.
        """


@runtime_checkable
class CorruptedSet(ImageSet, Protocol):
    """Images that are corrupted already, such as the published CIFAR-10-C.

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


def data_root() -> Path:
    """The folder where data sets are looked for: the one that CAFE_TTA_DATA names, or one in the user's cache."""
    named = os.environ.get("CAFE_TTA_DATA")
    return Path(named or "~/.cache/cafe-tta/data").expanduser()


def split_and_root(kind: str, rest: str, splits: tuple[str, ...], default: str) -> tuple[str, Path]:
    """What `test@/data` means: a part of the data set, and the folder that it is in."""
    split, at, root = rest.partition("@")
    if split and split not in splits:
        near = get_close_matches(split, splits, n=1)
        hint = f"; did you mean '{kind}:{near[0]}'?" if near else ""
        raise ValueError(f"{kind} has no part {split!r}{hint}; choose from: {', '.join(f'{kind}:{s}' for s in splits)}")
    if at and not root:
        raise ValueError(f"expected a folder after the @ of {kind}:{rest}, such as {kind}:{split or default}@/data")
    return split or default, Path(root).expanduser() if root else data_root()


def array_digest(images: Images, labels: Labels | None, whole: int = WHOLE) -> str:
    """The digest of images in one array.

    >>> black = np.zeros((2, 1, 1, 3), np.uint8)
    >>> array_digest(black, None)[:8], array_digest(black, np.array([0, 1]))[:8]
    ('acb673d0', 'a3069480')
    """
    digest = hashlib.sha256(f"images {images.shape}".encode())
    if images.nbytes <= whole:
        step = max(1, 2**24 // max(images[0].nbytes, 1))
        for start in range(0, len(images), step):  # a memory-mapped array need not fit into memory
            digest.update(images[start : start + step].tobytes())
    else:
        digest.update(images[equally_spaced(len(images), SAMPLED_IMAGES)].tobytes())
    _add_labels(digest, labels)
    return digest.hexdigest()


def files_digest(root: Path, files: Sequence[str], labels: Labels | None, read_as: str = "") -> str:
    """The digest of image files under a folder. `read_as` says how they are read, such as a crop."""
    digest = hashlib.sha256(f"files {len(files)} {read_as}".encode())
    sampled = set(equally_spaced(len(files), SAMPLED_FILES).tolist())
    for number, file in enumerate(files):
        path = root / file
        size = path.stat().st_size if path.is_file() else -1  # a link to nowhere
        digest.update(f"\0{file}\0{size}".encode(errors="surrogateescape"))
        if number in sampled and size > 0:
            digest.update(path.read_bytes())
    _add_labels(digest, labels)
    return digest.hexdigest()


def equally_spaced(total: int, count: int) -> npt.NDArray[np.int64]:
    """Equally spaced indices, first and last included.

    >>> equally_spaced(100, 3).tolist(), equally_spaced(2, 3).tolist()
    ([0, 50, 99], [0, 1])
    """
    return np.unique(np.linspace(0, total - 1, min(total, count)).round().astype(np.int64))


def _add_labels(digest: Any, labels: Labels | None) -> None:
    digest.update(b"\0no labels" if labels is None else b"\0labels" + labels.astype("<i8").tobytes())
