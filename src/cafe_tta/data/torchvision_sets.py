"""CIFAR-10, CIFAR-100, SVHN and MNIST, read by torchvision, which knows their files, addresses and checksums."""

import os
import re
import urllib.error
import warnings
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from cafe_tta.data.arrays import ArraySet
from cafe_tta.data.digits import CLASSES
from cafe_tta.data.imageset import Images
from cafe_tta.models import import_torchvision

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Source:
    """Where a data set comes from."""

    reader: str  # the class in torchvision.datasets
    page: str  # for people


SOURCES = {
    "cifar10": Source("CIFAR10", "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "cifar100": Source("CIFAR100", "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "svhn": Source("SVHN", "http://ufldl.stanford.edu/housenumbers"),
    "mnist": Source("MNIST", "https://ossci-datasets.s3.amazonaws.com/mnist"),
}


def data_root() -> Path:
    """Where data sets are looked for: the folder that CAFE_TTA_DATA names, or one in the user's cache."""
    named = os.environ.get("CAFE_TTA_DATA")
    return Path(named or "~/.cache/cafe-tta/data").expanduser()


def split_and_root(kind: str, rest: str, splits: tuple[str, ...], default: str) -> tuple[str, Path]:
    """What `test@/data` means: a part of the data set, and the folder where it lies."""
    split, at, root = rest.partition("@")
    if split and split not in splits:
        near = get_close_matches(split, splits, n=1)
        hint = f"; did you mean '{kind}:{near[0]}'?" if near else ""
        raise ValueError(f"{kind} has no part {split!r}{hint}; choose from: {', '.join(f'{kind}:{s}' for s in splits)}")
    if at and not root:
        raise ValueError(f"expected a folder after the @ of {kind}:{rest}, such as {kind}:{split or default}@/data")
    return split or default, Path(root).expanduser() if root else data_root()


def load_torchvision(kind: str, rest: str, download: bool = False) -> ArraySet:
    """A data set by its name, part and folder: `cifar10`, `test@/data`. The part is by default `test`."""
    split, root = split_and_root(kind, rest, SPLITS, "test")
    reader = getattr(import_torchvision().datasets, SOURCES[kind].reader)
    if not download and _archives_are_there(reader, root):
        download = True  # which only unpacks them
    choice = {"split": split} if kind == "svhn" else {"train": split == "train"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the files were pickled by a NumPy of long ago
            found = reader(root, download=download, **choice)
    except ModuleNotFoundError as error:
        raise ImportError(f'{kind} needs {error.name}; install it with: pip install "cafe-tta[corruptions]"') from error
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        raise RuntimeError(_not_downloaded(kind, reader, root, split, error)) from error
    except Exception as error:  # damaged files are met with every kind of error there is
        if isinstance(error, OSError) and error.strerror:
            raise
        complete = all((root / name).is_file() for name, _ in _files(reader, split))
        if download and not complete:
            raise RuntimeError(_not_downloaded(kind, reader, root, split, error)) from error
        raise FileNotFoundError(_what_to_do(kind, reader, root, split)) from error
    labels = np.asarray(found.labels if kind == "svhn" else found.targets, dtype=np.int64)
    classes = tuple(found.classes) if kind.startswith("cifar") else CLASSES
    return ArraySet(f"{kind}:{split}", _rgb(np.asarray(found.data), kind), labels, classes)


def _rgb(pixels: Any, kind: str) -> Images:
    if kind == "svhn":
        pixels = pixels.transpose(0, 2, 3, 1)  # (N, 3, H, W) -> (N, H, W, 3)
    elif kind == "mnist":
        pixels = np.repeat(pixels[..., None], 3, axis=3)
    return np.ascontiguousarray(pixels, dtype=np.uint8)


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
        problem = f"{kind} cannot be read: {', '.join(damaged)} is damaged (its checksum is another)"
    elif missing == names:
        problem = f"no {kind} in {root}"
    elif missing:
        problem = f"{kind} is not complete in {root}: {', '.join(missing)} is missing"
    else:
        problem = f"{kind} cannot be read: one of {', '.join(names)} in {root} is damaged"
    archives = [name for name, _ in _archives(reader)]
    put = f"put {', '.join(archives or names)} into {root}" + (" (it is unpacked by itself)" if archives else "")
    return f"{problem}; {put}, from {SOURCES[kind].page}, or let it be downloaded with CAFE_TTA_DOWNLOAD=1"


def _not_downloaded(kind: str, reader: Any, root: Path, split: str, error: Exception) -> str:
    text = " ".join(str(getattr(error, "reason", None) or error).split())
    told = re.search("<urlopen error (.*?)>", text)  # for MNIST, torchvision lists those of all mirrors
    names = [name for name, _ in _archives(reader)] or [name for name, _ in _files(reader, split)]
    return (
        f"could not download {kind} from {SOURCES[kind].page} ({told[1] if told else text}); "
        f"without internet, put {', '.join(names)} into {root}"
    )
