"""CIFAR-10, CIFAR-100, SVHN and MNIST, read by torchvision, which knows their files, addresses and checksums."""

import re
import urllib.error
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cafe_tta._install import missing
from cafe_tta.data.arrays import ArraySet
from cafe_tta.data.digits import CLASSES
from cafe_tta.data.imageset import split_and_root
from cafe_tta.models import import_torchvision

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Source:
    """A data set that torchvision reads."""

    reader: str  # the class in torchvision.datasets
    page: str  # for people
    labels: str = "targets"  # the reader's attribute
    takes_split: bool = False  # whether the reader takes split="train"; else train=True
    channels_first: bool = False
    classes: tuple[str, ...] | None = None  # None: the reader knows them


SOURCES = {
    "cifar10": Source("CIFAR10", "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "cifar100": Source("CIFAR100", "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "svhn": Source("SVHN", "http://ufldl.stanford.edu/housenumbers", "labels", True, True, CLASSES),
    "mnist": Source("MNIST", "https://ossci-datasets.s3.amazonaws.com/mnist", classes=CLASSES),
}


def load_torchvision(kind: str, rest: str, download: bool = False) -> ArraySet:
    """A data set by its name, part and folder: `cifar10`, `test@/data`. The part is by default `test`."""
    split, root = split_and_root(kind, rest, SPLITS, "test")
    source = SOURCES[kind]
    dataset = _read(kind, split, root, download)
    pixels = np.asarray(dataset.data)
    if source.channels_first:
        pixels = pixels.transpose(0, 2, 3, 1)  # (N, 3, H, W) -> (N, H, W, 3)
    elif pixels.ndim == 3:  # grey
        pixels = np.repeat(pixels[..., None], 3, axis=3)
    labels = np.asarray(getattr(dataset, source.labels), dtype=np.int64)
    classes = tuple(dataset.classes) if source.classes is None else source.classes
    return ArraySet(f"{kind}:{split}", np.ascontiguousarray(pixels, dtype=np.uint8), labels, classes)


def _read(kind: str, split: str, root: Path, download: bool) -> Any:
    """torchvision's data set, or an error that says which file to put where."""
    reader = getattr(import_torchvision().datasets, SOURCES[kind].reader)
    if not download and _archives_are_there(reader, root):
        download = True  # which only unpacks them
    choice = {"split": split} if SOURCES[kind].takes_split else {"train": split == "train"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the files were pickled by an old NumPy
            return reader(root, download=download, **choice)
    except ModuleNotFoundError as error:
        raise missing(kind, error, "corruptions") from error
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        raise RuntimeError(_not_downloaded(kind, reader, root, split, error)) from error
    except Exception as error:  # damaged files raise errors of every kind
        if isinstance(error, OSError) and error.strerror:
            raise
        complete = all((root / name).is_file() for name, _ in _files(reader, split))
        if download and not complete:
            raise RuntimeError(_not_downloaded(kind, reader, root, split, error)) from error
        raise FileNotFoundError(_what_to_do(kind, reader, root, split)) from error


def _files(reader: Any, split: str) -> list[tuple[str, str | None]]:
    """The files that torchvision reads, below the root, with the checksums it knows."""
    if hasattr(reader, "split_list"):
        return [(reader.split_list[split][1], reader.split_list[split][2])]
    if hasattr(reader, "resources"):
        return [(f"{reader.__name__}/raw/{name.removesuffix('.gz')}", None) for name, _ in reader.resources]
    batches = [*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])]
    return [(f"{reader.base_folder}/{name}", checksum) for name, checksum in batches]


def _archives(reader: Any) -> list[tuple[str, str]]:
    if hasattr(reader, "tgz_md5"):
        return [(reader.filename, reader.tgz_md5)]
    return [(f"{reader.__name__}/raw/{name}", checksum) for name, checksum in getattr(reader, "resources", ())]


def _archives_are_there(reader: Any, root: Path) -> bool:
    check = import_torchvision().datasets.utils.check_integrity
    archives = [(root / name, checksum) for name, checksum in _archives(reader)]
    unpacked = all((root / name).is_file() for name, _ in ([] if not archives else _files(reader, "test")))
    return bool(archives) and not unpacked and all(path.is_file() and check(path, md5) for path, md5 in archives)


def _damaged(reader: Any, root: Path, split: str) -> list[str]:
    check = import_torchvision().datasets.utils.check_integrity
    files = [(root / name, checksum) for name, checksum in _files(reader, split)]
    return [str(path) for path, checksum in files if path.is_file() and checksum and not check(path, checksum)]


def _what_to_do(kind: str, reader: Any, root: Path, split: str) -> str:
    names = [name for name, _ in _files(reader, split)]
    missing = [name for name in names if not (root / name).is_file()]
    if damaged := _damaged(reader, root, split):
        problem = f"{kind} cannot be read: {', '.join(damaged)} is damaged (its checksum differs)"
    elif missing == names:
        problem = f"no {kind} in {root}"
    elif missing:
        problem = f"{kind} is not complete in {root}: {', '.join(missing)} is missing"
    else:
        problem = f"{kind} cannot be read: one of {', '.join(names)} in {root} is damaged"
    archives = [name for name, _ in _archives(reader)]
    put = f"put {', '.join(archives or names)} into {root}" + (" (it is unpacked automatically)" if archives else "")
    return f"{problem}; {put}, from {SOURCES[kind].page}, or let it be downloaded with CAFE_TTA_DOWNLOAD=1"


def _not_downloaded(kind: str, reader: Any, root: Path, split: str, error: Exception) -> str:
    text = " ".join(str(getattr(error, "reason", None) or error).split())
    reason = re.search("<urlopen error (.*?)>", text)  # for MNIST, torchvision lists those of all mirrors
    names = [name for name, _ in _archives(reader)] or [name for name, _ in _files(reader, split)]
    return (
        f"could not download {kind} from {SOURCES[kind].page} ({reason[1] if reason else text}); "
        f"without internet, put {', '.join(names)} into {root}"
    )
