"""Image sets by name, and their images in batches. Nothing here knows of methods.

>>> from cafe_tta import data
>>> len(data.load("digits:test"))
896
"""

import glob
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, cast

from cafe_tta import plugins
from cafe_tta.data.arrays import ArraySet as ArraySet
from cafe_tta.data.arrays import load_arrays
from cafe_tta.data.corrupted import load_cifar_c, load_imagenet_c
from cafe_tta.data.digits import load_digits
from cafe_tta.data.folder import FittedFolder as FittedFolder
from cafe_tta.data.folder import FolderSet as FolderSet
from cafe_tta.data.folder import left_out as left_out
from cafe_tta.data.folder import load_files, load_folder
from cafe_tta.data.imagenet import load_imagenet
from cafe_tta.data.imageset import CorruptedSet as CorruptedSet
from cafe_tta.data.imageset import ImageSet as ImageSet
from cafe_tta.data.imageset import Labels as Labels
from cafe_tta.data.imageset import Unreadable as Unreadable
from cafe_tta.data.imageset import UnreadableImage as UnreadableImage
from cafe_tta.data.loader import Advance as Advance
from cafe_tta.data.loader import Batch as Batch
from cafe_tta.data.loader import Loader as Loader
from cafe_tta.data.loader import match_labels as match_labels
from cafe_tta.data.torchvision_sets import SOURCES, load_torchvision


@dataclass(frozen=True)
class NamedSet:
    """A data set that has a name: what reads it, and what may be written after the name."""

    load: Callable[..., ImageSet]  # called with the text after the colon and, if it downloads, with `download`
    examples: tuple[str, ...]
    at_folder: bool = True  # whether @DIR may follow the name
    downloads: bool = False


# To add a data set, write its reader, and add a line here.
DATASETS: dict[str, NamedSet] = {
    "folder": NamedSet(load_folder, ("folder:DIR",), at_folder=False),
    "arrays": NamedSet(load_arrays, ("arrays:DIR",), at_folder=False),
    "digits": NamedSet(load_digits, ("digits", "digits:train", "digits:test"), at_folder=False),
    **{
        name: NamedSet(partial(load_torchvision, name), (f"{name}[:train|test][@DIR]",), downloads=True)
        for name in SOURCES
    },
    "imagenet": NamedSet(load_imagenet, ("imagenet[:val|train][@DIR]",)),
    "cifar10-c": NamedSet(partial(load_cifar_c, "cifar10-c"), ("cifar10-c[:DOMAIN][@DIR]",)),
    "cifar100-c": NamedSet(partial(load_cifar_c, "cifar100-c"), ("cifar100-c[:DOMAIN][@DIR]",)),
    "imagenet-c": NamedSet(load_imagenet_c, ("imagenet-c[:DOMAIN][@DIR]",)),
}


def load(spec: str | os.PathLike[str], download: bool = False) -> ImageSet:
    """An image set by its name, `digits:train`, `cifar10:test`, `arrays:DIR`, or the path of a folder or of a file.

    A pattern such as `photos/*.jpg` is all files that it matches (`**` goes through folders, too).
    Data sets are looked for in the folder after an `@`, as in `cifar10:test@/data`, or else in the one that the
    environment variable CAFE_TTA_DATA names, or else in ~/.cache/cafe-tta/data. A missing one is downloaded with
    `download` or with CAFE_TTA_DOWNLOAD=1, and not otherwise. Published corrupted sets, such as `cifar10-c@DIR`, are a
    `CorruptedSet`; `cifar10-c:fog-5@DIR` is one domain of it.

    >>> digits = load("digits:test")
    >>> len(digits), digits.images([0, 1]).shape
    (896, (2, 32, 32, 3))
    """
    text = os.fspath(spec)
    if not text:
        raise ValueError(f"expected the name of an image set, but got nothing; choose from: {_choices()}")
    name = re.match("[a-z0-9-]*", text)[0]  # type: ignore[index] # matches always
    rest = text[len(name) :]
    plugins.add("datasets", name, DATASETS, _as_named)
    named = DATASETS.get(name)
    if named is not None and rest[:1] not in (("", ":", "@") if named.at_folder else ("", ":")):
        named = None
    if named is not None and (rest or not Path(text).is_dir()):  # a folder that is called `digits` is meant as a folder
        if named.downloads:
            return named.load(rest.removeprefix(":"), download or os.environ.get("CAFE_TTA_DOWNLOAD") == "1")
        return named.load(rest.removeprefix(":"))
    path = Path(text).expanduser()
    if path.is_dir():
        return load_folder(text)
    if path.is_file() or glob.has_magic(text):
        return load_files(text)
    if plugins.exists(text):
        return _own(text)
    near = get_close_matches(name, DATASETS, n=1)
    if near and not rest and near[0] in ("arrays", "folder"):
        near = []  # a folder's name was meant
    hint = f"; did you mean {near[0] + rest!r}?" if near else ""
    raise ValueError(f"no folder at {text!r}, and no image set of that name{hint}; choose from: {_choices()}")


def _own(text: str) -> ImageSet:
    """An image set of the user's own code, or what a function of theirs returns."""
    found = plugins.load_object(text)
    made = found() if callable(found) and not hasattr(found, "item_name") else found
    lacking = [
        name for name in ("name", "classes", "labels", "item_name", "images", "digest") if not hasattr(made, name)
    ]
    if lacking:
        raise TypeError(
            f"expected {text} to be an image set, such as data.ArraySet(name, array, labels), or to return one, but "
            f"{type(made).__name__} has no `{lacking[0]}`"
        )
    return cast(ImageSet, made)


def _as_named(name: str, found: Any) -> NamedSet | None:
    if isinstance(found, NamedSet):
        return found
    return NamedSet(found, (name,)) if callable(found) else None  # else it is a data set of the benchmark


def _choices() -> str:
    return ", ".join(
        [
            "a folder of images",
            "an image file",
            "a pattern such as 'photos/*.jpg'",
            *(example for named in DATASETS.values() for example in named.examples),
        ]
    )
