"""CIFAR-10-C, CIFAR-100-C and ImageNet-C in their published layouts (https://arxiv.org/abs/1903.12261).

CIFAR-C has a .npy file for each corruption: all images at severity 1, then all at severity 2, and so on, and a
labels.npy to match. `cafe-tta corrupt` writes arrays in the same layout; its settings.json says which severities there
are if not all. ImageNet-C has a folder for each corruption and severity.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from cafe_tta.corruptions import CORRUPTIONS, NAMES
from cafe_tta.data.arrays import read_npy
from cafe_tta.data.folder import FolderSet, read_image, stack
from cafe_tta.data.imagenet import NUM_CLASSES
from cafe_tta.data.imageset import (
    CorruptedSet,
    Images,
    ImageSet,
    Labels,
    array_digest,
    data_root,
    equally_spaced,
    files_digest,
)
from cafe_tta.options import did_you_mean

_CIFAR_C = {
    "cifar10-c": ("CIFAR-10-C", "https://zenodo.org/records/2535967"),
    "cifar100-c": ("CIFAR-100-C", "https://zenodo.org/records/3555552"),
}
_CIFAR_LAYOUT = "<corruption>.npy (uint8, 5 N x 32 x 32 x 3, severity 1 first) and labels.npy (5 N integers)"
_DIGEST_WHOLE = 2**24  # bytes of a corruption's file that are hashed without sampling
_DIGEST_FILES = 8  # of every domain of ImageNet-C, beside what is hashed of a folder


@dataclass(frozen=True, eq=False)
class DomainSet:
    """The images of a corrupted set with one corruption at one severity."""

    name: str
    origin: CorruptedSet
    corruption: str
    severity: int

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.origin.classes

    @property
    def labels(self) -> Labels | None:
        return self.origin.labels

    def __len__(self) -> int:
        return len(self.origin)

    def item_name(self, index: int) -> str:
        return self.origin.item_name(index)

    def images(self, indices: Sequence[int]) -> Images:
        return self.origin.corrupted(indices, self.corruption, self.severity)

    def digest(self) -> str:
        return sha256(f"{self.origin.digest()} {self.corruption} {self.severity}".encode()).hexdigest()


def domain_or_all(whole: CorruptedSet, kind: str, domain: str, source: str) -> ImageSet:
    """The whole corrupted set, or the domain of it that has a name such as `fog-5`."""
    if not domain:
        return whole
    corruption, dash, severity = domain.rpartition("-")
    if not dash or not severity.isdecimal():
        raise ValueError(f"expected a corruption and a severity, such as {kind}:fog-5@DIR, but got {domain!r}")
    check_domain(whole, corruption, int(severity), source)
    return DomainSet(whole.name.replace(kind, f"{kind}:{domain}", 1), whole, corruption, int(severity))


def check_domain(whole: CorruptedSet, corruption: str, severity: int, source: str) -> None:
    """Refuses a corruption or a severity that is not there, and says what is."""
    there = whole.corruptions()
    if corruption not in there:
        hint = did_you_mean(corruption, there)
        missing = [name for name in NAMES if name not in there]
        lacking = f"; missing of the {len(NAMES)}: {', '.join(missing)}, from {source}" if missing else ""
        raise ValueError(f"{whole.name} has no corruption {corruption!r}{hint}; it has {', '.join(there)}{lacking}")
    if severity not in whole.severities():
        have = ", ".join(map(str, whole.severities()))
        raise ValueError(f"{whole.name} has no severity {severity!r}; it has {have}")


def refuse_clean(whole: CorruptedSet) -> ValueError:
    kind, _, folder = whole.name.partition("@")
    example = f"{kind}:{whole.corruptions()[0]}-{whole.severities()[-1]}@{folder}"
    return ValueError(f"{whole.name} holds no clean images; for those of one corruption and severity, say {example}")


class CifarCSet:
    """Corrupted images in one memory-mapped array for each corruption."""

    def __init__(self, root: Path, name: str, source: str) -> None:
        self.root, self.name, self.source = root, name, source
        there = [path.stem for path in sorted(root.glob("*.npy")) if path.stem != "labels"]
        names = [*(n for n in CORRUPTIONS if n in there), *(n for n in there if n not in CORRUPTIONS)]
        if not names:
            raise FileNotFoundError(
                f"no corrupted images at {root}; expected {_CIFAR_LAYOUT}, from {source}; "
                f"missing: {', '.join(f'{name}.npy' for name in NAMES)}"
            )
        settings = _settings(root)
        self._severities = tuple(settings.get("severities", (1, 2, 3, 4, 5)))
        self.classes: tuple[str, ...] | None = tuple(settings["classes"]) if settings.get("classes") else None
        self._arrays = {n: read_npy(root / f"{n}.npy", mapped=True, layout=_CIFAR_LAYOUT) for n in names}
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
        rows = np.asarray(indices, dtype=np.int64)
        if len(rows) and not (rows.min() >= 0 and rows.max() < self._count):  # else the next severity's images
            raise IndexError(f"{self.name} has images 0 to {self._count - 1}, got {rows.min()} to {rows.max()}")
        start = self._severities.index(severity) * self._count
        return np.ascontiguousarray(self._arrays[corruption][start + rows])

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
                raise ValueError(
                    f"{self.root / name}.npy: expected {_CIFAR_LAYOUT}, but got {array.dtype}, {array.shape}"
                )
            if array.shape != shape:
                raise ValueError(
                    f"{self.root / name}.npy: expected the same shape as the other files, {shape}, got {array.shape}"
                )

    def _read_labels(self, rows: int, needed: bool) -> Labels | None:
        path = self.root / "labels.npy"
        if not path.is_file():
            if needed:
                raise FileNotFoundError(f"no labels.npy in {self.root}; expected {_CIFAR_LAYOUT}, from {self.source}")
            return None  # copies of images without labels
        labels = read_npy(path, mapped=False, layout=_CIFAR_LAYOUT)
        if labels.shape != (rows,) or labels.dtype.kind not in "iu":
            raise ValueError(f"{path}: expected {rows} integer labels, but got {labels.dtype}, {labels.shape}")
        by_severity = labels.reshape(len(self._severities), self._count).astype(np.int64)
        if (by_severity != by_severity[0]).any():
            raise ValueError(f"{path}: expected the same labels for every severity; are the files from {self.source}?")
        return by_severity[0]


def _settings(root: Path) -> dict[str, Any]:
    """What `cafe-tta corrupt` wrote beside its arrays; nothing beside the published ones."""
    try:
        settings = json.loads((root / "settings.json").read_text(encoding="utf-8"))
        return settings if isinstance(settings["severities"], list) and settings["severities"] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def load_cifar_c(kind: str, rest: str) -> ImageSet:
    """CIFAR-10-C or CIFAR-100-C by folder, `@DIR`; or one domain of it by name, `fog-5@DIR`."""
    domain, at, root = rest.partition("@")
    name, source = _CIFAR_C[kind]
    folder = Path(root).expanduser() if at else data_root() / name
    return domain_or_all(CifarCSet(folder, f"{kind}@{folder}", source), kind, domain, source)


class ImageNetCSet:
    """The published ImageNet-C: DIR/<corruption>/<severity>/<class>/*.JPEG, the same files for every domain."""

    source = "https://zenodo.org/records/2235448"

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self._folders: dict[str, Path] = {}
        groups = ("", *dict.fromkeys(row.group for row in CORRUPTIONS.values()))  # an archive may be a folder
        for corruption in CORRUPTIONS:
            folders = (root / group / corruption for group in groups)
            if folder := next((folder for folder in folders if folder.is_dir()), None):
                self._folders[corruption] = folder
        for folder in sorted(root.iterdir()) if root.is_dir() else ():  # corruptions of the user's own
            if folder.name not in self._folders and any((folder / level).is_dir() for level in "12345"):
                self._folders[folder.name] = folder
        by_severity = [
            {int(f.name) for f in folder.iterdir() if f.name in set("12345")} for folder in self._folders.values()
        ]
        self._severities = tuple(sorted(set.intersection(*by_severity))) if by_severity else ()
        if not self._severities:
            raise FileNotFoundError(
                f"no ImageNet-C at {root}; expected {root}/<corruption>/<severity>/<class>/*.JPEG, such as "
                f"{root}/fog/5/n01440764/ILSVRC2012_val_00000293.JPEG, from {self.source}; "
                f"the corruptions are {', '.join(NAMES)}"
            )
        first = next(iter(self._folders.values())) / str(self._severities[0])
        every = FolderSet(first)
        if every.labels is None or every.classes is None:
            raise ValueError(f"the images of {first} are not in class folders; expected {first}/n01440764/*.JPEG")
        self.files, self.labels = every.files, every.labels
        self.classes = every.classes if len(every.classes) != NUM_CLASSES else None
        self._checked = {first}

    def __len__(self) -> int:
        return len(self.files)

    def item_name(self, index: int) -> str:
        return self.files[index]

    def corruptions(self) -> tuple[str, ...]:
        return tuple(self._folders)

    def severities(self) -> tuple[int, ...]:
        return self._severities

    def images(self, indices: Sequence[int]) -> Images:
        raise refuse_clean(self)

    def corrupted(self, indices: Sequence[int], corruption: str, severity: int) -> Images:
        check_domain(self, corruption, severity, self.source)
        folder = self._folders[corruption] / str(severity)
        if folder not in self._checked:
            self._check_files(folder)
            self._checked.add(folder)
        return stack(self.name, [read_image(folder / self.files[index]) for index in indices])

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        domains = [(c, folder / str(s)) for c, folder in self._folders.items() for s in self._severities]
        digest = sha256(files_digest(domains[0][1], self.files, self.labels).encode())
        for corruption, folder in domains:
            digest.update(f"\0{corruption}/{folder.name}".encode())
            for index in equally_spaced(len(self), _DIGEST_FILES):
                path = folder / self.files[index]
                digest.update(path.read_bytes() if path.is_file() else b"\0missing")
        return digest.hexdigest()

    def _check_files(self, folder: Path) -> None:
        there = set(FolderSet(folder).files)
        if missing := [file for file in self.files if file not in there]:
            raise FileNotFoundError(
                f"{len(missing)} images are missing in {folder}, such as {missing[0]}; unpack it again"
            )
        if more := len(there) - len(self.files):
            first = self._folders[self.corruptions()[0]] / str(self._severities[0])
            raise FileNotFoundError(f"{folder} has {more} images that {first} has not; unpack both again")


def load_imagenet_c(rest: str) -> ImageSet:
    """ImageNet-C by folder, `@DIR`; or one of its domains by name, `fog-5@DIR`."""
    domain, at, root = rest.partition("@")
    folder = Path(root).expanduser() if at else data_root() / "ImageNet-C"
    whole = ImageNetCSet(folder, f"imagenet-c@{folder}")
    return domain_or_all(whole, "imagenet-c", domain, whole.source)
