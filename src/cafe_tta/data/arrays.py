"""Image sets that are plain arrays: in memory, or memory-mapped from .npy files."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cafe_tta.data.imageset import Images, Labels, array_digest

LAYOUT = (
    "images.npy (uint8, N x H x W x 3, RGB) and, where known, labels.npy (N integers), classes.txt (one name per line)"
)


@dataclass(frozen=True, eq=False)
class ArraySet:
    """Images in one array, which may be memory-mapped."""

    name: str
    array: Images
    labels: Labels | None = None
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        array = self.array
        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3:
            raise ValueError(
                f"{self.name}: expected images of uint8 and shape (N, H, W, 3), but got {array.dtype}, {array.shape}"
            )
        if 0 in array.shape:
            raise ValueError(f"{self.name}: expected at least one image, but got shape {array.shape}")
        if self.labels is not None:
            object.__setattr__(self, "labels", _checked_labels(self.name, self.labels, len(array), self.classes))

    def __len__(self) -> int:
        return len(self.array)

    def item_name(self, index: int) -> str:
        return str(index)

    def images(self, indices: Sequence[int]) -> Images:
        return np.ascontiguousarray(self.array[np.asarray(indices, dtype=np.int64)])

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return array_digest(self.array, self.labels)


def load_arrays(folder: str) -> ArraySet:
    """The images of a folder that holds images.npy. They stay on disk until they are asked for."""
    root = Path(folder).expanduser()
    if not folder or not (root / "images.npy").is_file():
        raise FileNotFoundError(f"no image arrays at {folder or 'arrays:'!r}; expected a folder with {LAYOUT}")
    labels, classes = None, None
    if (root / "classes.txt").is_file():
        classes = tuple((root / "classes.txt").read_text(encoding="utf-8").split("\n"))
        classes = tuple(name.strip() for name in classes if name.strip())
    if (root / "labels.npy").is_file():
        labels = read_npy(root / "labels.npy", mapped=False)
    return ArraySet(f"arrays:{folder}", read_npy(root / "images.npy", mapped=True), labels, classes)


def read_npy(path: Path, mapped: bool, layout: str = LAYOUT) -> npt.NDArray[Any]:
    """The array in a .npy file, or an error that says what was expected there."""
    try:
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)  # pickles could run code
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a whole .npy file of numbers ({error}); expected {layout}") from error


def _checked_labels(name: str, labels: npt.NDArray[Any], count: int, classes: tuple[str, ...] | None) -> Labels:
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected {count} integer labels, but got {labels.dtype}, {labels.shape}")
    checked = labels.astype(np.int64)
    if checked.min() < 0 or (classes is not None and checked.max() >= len(classes)):
        expected = "at least 0" if classes is None else f"from 0 to {len(classes) - 1}, one for each class"
        raise ValueError(f"{name}: expected labels {expected}, but got {checked.min()} to {checked.max()}")
    return checked
