"""Image sets by name, and their images in batches. Nothing here knows of methods."""

import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from cafe_tta.data.arrays import ArraySet as ArraySet
from cafe_tta.data.arrays import load_arrays
from cafe_tta.data.batches import Batch as Batch
from cafe_tta.data.batches import batches as batches
from cafe_tta.data.cifar_c import load_cifar_c
from cafe_tta.data.digits import load_digits
from cafe_tta.data.folder import FolderSet as FolderSet
from cafe_tta.data.folder import load_folder
from cafe_tta.data.imagenet import load_imagenet, load_imagenet_c
from cafe_tta.data.imageset import CorruptedSet as CorruptedSet
from cafe_tta.data.imageset import ImageSet as ImageSet
from cafe_tta.data.imageset import Unreadable as Unreadable
from cafe_tta.data.imageset import UnreadableImage as UnreadableImage
from cafe_tta.data.torchvision_sets import SOURCES, load_torchvision

# A new kind of data set is a line here: what stands before the colon, and what reads the rest.
KINDS: dict[str, Callable[[str], ImageSet]] = {
    "digits": load_digits,
    "arrays": load_arrays,
    "folder": load_folder,
    "imagenet": load_imagenet,
    "cifar10-c": partial(load_cifar_c, "cifar10-c"),
    "cifar100-c": partial(load_cifar_c, "cifar100-c"),
    "imagenet-c": load_imagenet_c,
}
# These can be downloaded.
DOWNLOADS: dict[str, Callable[[str, bool], ImageSet]] = {name: partial(load_torchvision, name) for name in SOURCES}
EXAMPLES = (
    *("a folder of images", "folder:DIR", "arrays:DIR", "digits", "digits:train", "digits:test"),
    *(f"{name}[:train|test][@DIR]" for name in DOWNLOADS),
    *(
        "imagenet[:val|train][@DIR]",
        "cifar10-c[:DOMAIN][@DIR]",
        "cifar100-c[:DOMAIN][@DIR]",
        "imagenet-c[:DOMAIN][@DIR]",
    ),
)
_LOCAL = ("digits", "arrays", "folder")  # what follows their colon is one thing; the others have a folder after an @


def load(spec: str | os.PathLike[str], download: bool = False) -> ImageSet:
    """An image set by its name: `digits:train`, `cifar10:test`, `arrays:DIR`, or simply the path of a folder.

    Data sets with a name are looked for in the folder after an `@`, as in `cifar10:test@/data`, or else in the one that
    the environment variable CAFE_TTA_DATA names, or else in ~/.cache/cafe-tta/data. What is missing there is downloaded
    with `download` or with CAFE_TTA_DOWNLOAD=1, and not otherwise. Published corrupted sets, such as `cifar10-c@DIR`,
    are a `CorruptedSet`; `cifar10-c:fog-5@DIR` is one domain of it.

    >>> digits = load("digits:test")
    >>> len(digits), digits.images([0, 1]).shape
    (896, (2, 32, 32, 3))
    """
    text = os.fspath(spec)
    if not text:
        raise ValueError(f"expected the name of an image set, but got nothing; choose from: {', '.join(EXAMPLES)}")
    kind = re.match("[a-z0-9-]*", text)[0]  # type: ignore[index] # matches always
    rest = text[len(kind) :]
    named = kind in (KINDS | DOWNLOADS) and rest[:1] in (("", ":") if kind in _LOCAL else ("", ":", "@"))
    if named and (rest or not Path(text).is_dir()):  # a folder that is called `digits` is meant as a folder
        if kind in DOWNLOADS:
            return DOWNLOADS[kind](rest.removeprefix(":"), download or os.environ.get("CAFE_TTA_DOWNLOAD") == "1")
        return KINDS[kind](rest.removeprefix(":"))
    path = Path(text).expanduser()
    if path.is_dir():
        return load_folder(text)
    if path.exists():
        raise ValueError(f"expected a folder of images, but {text} is a file; name the folder that it is in")
    near = get_close_matches(kind, [*KINDS, *DOWNLOADS], n=1)
    if near and not rest and near[0] in ("arrays", "folder"):
        near = []  # a folder's name was meant
    hint = f"; did you mean {near[0] + rest!r}?" if near else ""
    raise ValueError(f"no folder at {text!r}, and no image set of that name{hint}; choose from: {', '.join(EXAMPLES)}")
