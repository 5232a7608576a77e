"""CIFAR-10-C and CIFAR-100-C in their published layout (https://arxiv.org/abs/1903.12261).

A .npy file for each corruption: all images at severity 1, then all at severity 2, and so on, and labels.npy to match.
What `cafe-tta corrupt` makes of an array is the same; its settings.json says which severities there are if not all.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from cafe_tta.corruptions import HELD_OUT, NAMES
from cafe_tta.data.arrays import read_npy
from cafe_tta.data.corrupted import check_domain, domain_or_all, refuse_clean
from cafe_tta.data.digest import array_digest
from cafe_tta.data.imageset import Images, ImageSet, Labels
from cafe_tta.data.torchvision_sets import data_root

SOURCES = {
    "cifar10-c": ("CIFAR-10-C", "https://zenodo.org/records/2535967"),
    "cifar100-c": ("CIFAR-100-C", "https://zenodo.org/records/3555552"),
}
LAYOUT = "<corruption>.npy (uint8, 5 N x 32 x 32 x 3, severity 1 first) and labels.npy (5 N integers)"
_DIGEST_WHOLE = 2**24  # bytes of a corruption's file that are hashed without sampling


class CifarCSet:
    """Corrupted images in one memory-mapped array for each corruption."""

    def __init__(self, root: Path, name: str, source: str) -> None:
        self.root, self.name, self.source = root, name, source
        names = [n for n in (*NAMES, *HELD_OUT) if (root / f"{n}.npy").is_file()]
        if not names:
            raise FileNotFoundError(
                f"no corrupted images at {root}; expected {LAYOUT}, from {source}; "
                f"missing: {', '.join(f'{name}.npy' for name in NAMES)}"
            )
        settings = _settings(root)
        self._severities = tuple(settings.get("severities", (1, 2, 3, 4, 5)))
        self.classes: tuple[str, ...] | None = tuple(settings["classes"]) if settings.get("classes") else None
        self._arrays = {n: read_npy(root / f"{n}.npy", mapped=True, layout=LAYOUT) for n in names}
        self._check_arrays()
        rows = len(self._arrays[names[0]])
        self._count = rows // len(self._severities)
        self.labels = self._read_labels(rows, needed=not settings)

    def __len__(self) -> int:
        return self._count

    def item_name(self, index: int) -> str:
        return str(index)

    def corruptions(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def severities(self) -> tuple[int, ...]:
        return self._severities

    def images(self, indices: Sequence[int]) -> Images:
        raise refuse_clean(self)

    def corrupted(self, indices: Sequence[int], corruption: str, severity: int) -> Images:
        check_domain(self, corruption, severity, self.source)
        places = np.asarray(indices, dtype=np.int64)
        if len(places) and not (places.min() >= 0 and places.max() < self._count):  # else the next severity's images
            raise IndexError(f"{self.name} has images 0 to {self._count - 1}, got {places.min()} to {places.max()}")
        start = self._severities.index(severity) * self._count
        return np.ascontiguousarray(self._arrays[corruption][start + places])

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        parts = [f"{n} {array_digest(array, self.labels, _DIGEST_WHOLE)}" for n, array in self._arrays.items()]
        return sha256("\n".join([str(self._severities), *parts]).encode()).hexdigest()

    def _check_arrays(self) -> None:
        shape = next(iter(self._arrays.values())).shape
        for name, array in self._arrays.items():
            good = array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] == 3 and 0 not in array.shape
            if not good or len(array) % len(self._severities):
                raise ValueError(f"{self.root / name}.npy: expected {LAYOUT}, but got {array.dtype}, {array.shape}")
            if array.shape != shape:
                raise ValueError(
                    f"{self.root / name}.npy: expected the same shape as the other files, {shape}, got {array.shape}"
                )

    def _read_labels(self, rows: int, needed: bool) -> Labels | None:
        path = self.root / "labels.npy"
        if not path.is_file():
            if needed:
                raise FileNotFoundError(f"no labels.npy in {self.root}; expected {LAYOUT}, from {self.source}")
            return None  # made from images that had none
        labels = read_npy(path, mapped=False, layout=LAYOUT)
        if labels.shape != (rows,) or labels.dtype.kind not in "iu":
            raise ValueError(f"{path}: expected {rows} integer labels, but got {labels.dtype}, {labels.shape}")
        by_severity = labels.reshape(len(self._severities), self._count).astype(np.int64)
        if (by_severity != by_severity[0]).any():
            raise ValueError(f"{path}: expected the same labels for every severity; are the files from {self.source}?")
        return by_severity[0]


def _settings(root: Path) -> dict[str, Any]:
    """What `cafe-tta corrupt` wrote beside its arrays; nothing beside the published ones."""
    try:
        found = json.loads((root / "settings.json").read_text(encoding="utf-8"))
        return found if isinstance(found["severities"], list) and found["severities"] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def load_cifar_c(kind: str, rest: str) -> ImageSet:
    """CIFAR-10-C or CIFAR-100-C by folder, `@DIR`; or one domain of it by name, `fog-5@DIR`."""
    domain, at, root = rest.partition("@")
    name, source = SOURCES[kind]
    folder = Path(root).expanduser() if at else data_root() / name
    return domain_or_all(CifarCSet(folder, f"{kind}@{folder}", source), kind, domain, source)
