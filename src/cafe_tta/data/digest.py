"""Hashes of image sets, for records: two sets with the same digest are the same images with the same labels.

Arrays of up to 1 GiB are hashed whole: shape, pixels, labels. Of larger ones, the shape, the labels and 1000 images in
equal distances are hashed. Of a folder, the names, the sizes and the labels of all files and the content of 64 of them.
A corrupted set has such hashes of every corruption; of ImageNet-C, of one domain, and 8 files of each.
Paths above the set play no part, so that a copy elsewhere has the same digest.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cafe_tta.data.imageset import Images, Labels

WHOLE = 2**30  # bytes of an array that are hashed without sampling
SAMPLED_IMAGES = 1000
SAMPLED_FILES = 64


def array_digest(images: Images, labels: Labels | None, whole: int = WHOLE) -> str:
    """Of images in one array.

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
        digest.update(images[spread(len(images), SAMPLED_IMAGES)].tobytes())
    _add_labels(digest, labels)
    return digest.hexdigest()


def files_digest(root: Path, files: Sequence[str], labels: Labels | None, read_as: str = "") -> str:
    """Of image files under a folder. `read_as` tells what is made of them, such as a crop."""
    digest = hashlib.sha256(f"files {len(files)} {read_as}".encode())
    sampled = set(spread(len(files), SAMPLED_FILES).tolist())
    for number, file in enumerate(files):
        path = root / file
        size = path.stat().st_size if path.is_file() else -1  # a link to nowhere
        digest.update(f"\0{file}\0{size}".encode(errors="surrogateescape"))
        if number in sampled and size > 0:
            digest.update(path.read_bytes())
    _add_labels(digest, labels)
    return digest.hexdigest()


def spread(total: int, count: int) -> npt.NDArray[np.int64]:
    """Places in equal distances, first and last included.

    >>> spread(100, 3).tolist(), spread(2, 3).tolist()
    ([0, 50, 99], [0, 1])
    """
    return np.unique(np.linspace(0, total - 1, min(total, count)).round().astype(np.int64))


def _add_labels(digest: Any, labels: Labels | None) -> None:
    digest.update(b"\0no labels" if labels is None else b"\0labels" + labels.astype("<i8").tobytes())
