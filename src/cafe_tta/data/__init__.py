"""Image sets by name, and their images in batches. Nothing here knows of methods."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from cafe_tta.data.arrays import ArraySet as ArraySet
from cafe_tta.data.arrays import load_arrays
from cafe_tta.data.batches import Batch as Batch
from cafe_tta.data.batches import batches as batches
from cafe_tta.data.digits import SPLITS, load_digits
from cafe_tta.data.folder import FolderSet as FolderSet
from cafe_tta.data.folder import load_folder
from cafe_tta.data.imageset import ImageSet as ImageSet
from cafe_tta.data.imageset import Unreadable as Unreadable
from cafe_tta.data.imageset import UnreadableImage as UnreadableImage

# A new kind of data set is a line here: what stands before the colon, and what reads the rest.
KINDS: dict[str, Callable[[str], ImageSet]] = {"digits": load_digits, "arrays": load_arrays, "folder": load_folder}
EXAMPLES = ("a folder of images", "folder:DIR", "arrays:DIR", "digits", *(f"digits:{split}" for split in SPLITS))


def load(spec: str | os.PathLike[str]) -> ImageSet:
    """An image set by its name: `digits:train`, `arrays:DIR`, `folder:DIR`, or simply the path of a folder.

    >>> digits = load("digits:test")
    >>> len(digits), digits.images([0, 1]).shape
    (896, (2, 32, 32, 3))
    """
    text = os.fspath(spec)
    if not text:
        raise ValueError(f"expected the name of an image set, but got nothing; choose from: {', '.join(EXAMPLES)}")
    kind, colon, rest = text.partition(":")
    if kind in KINDS and (colon or not Path(text).is_dir()):  # a folder that is called `digits` is meant as a folder
        return KINDS[kind](rest)
    path = Path(text).expanduser()
    if path.is_dir():
        return load_folder(text)
    if path.exists():
        raise ValueError(f"expected a folder of images, but {text} is a file; name the folder that it is in")
    near = get_close_matches(kind, KINDS, n=1)
    hint = f"; did you mean {near[0] + colon + rest!r}?" if near and (colon or near[0] == "digits") else ""
    raise ValueError(f"no folder at {text!r}, and no image set of that name{hint}; choose from: {', '.join(EXAMPLES)}")
