"""ImageNet and ImageNet-C, read from their folders one image at a time (https://arxiv.org/abs/1903.12261)."""

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from cafe_tta.corruptions import HELD_OUT, NAMES
from cafe_tta.data.corrupted import check_domain, domain_or_all, refuse_clean
from cafe_tta.data.digest import files_digest, spread
from cafe_tta.data.folder import FolderSet, read_image, stack
from cafe_tta.data.imageset import Images, ImageSet
from cafe_tta.data.torchvision_sets import data_root, split_and_root

SPLITS = ("val", "train")
RESIZED, CROPPED = 256, 224  # pixels, as in every published evaluation
NUM_CLASSES = 1000
_DIGEST_FILES = 8  # of every domain, beside what is hashed of a folder
_GROUPS = ("", "noise", "blur", "weather", "digital", "extra")  # the archives of ImageNet-C, and so perhaps folders


class ImageNetSet(FolderSet):
    """ImageNet's pictures: 256 pixels on the short side, of which the central 224 x 224; no corruption comes before.

    Labels are numbered in the order of the class folders. Where all 1000 are there, they are the numbers that every
    ImageNet model uses, and `classes` is None: models do not know the folders' names.
    """

    read_as = f"resize {RESIZED}, crop {CROPPED}"

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root)
        self.name = name
        if self.labels is None or self.classes is None:
            raise ValueError(
                f"the images of {root} are not in class folders; expected {root}/n01440764/*.JPEG and so on: "
                "torchvision.datasets.ImageNet sorts them if it is given the archives"
            )
        if len(self.classes) == NUM_CLASSES:
            self.classes = None

    def read(self, path: Path) -> Images:
        return central(read_image(path, upright=False))  # training code does not look at EXIF either


def central(image: Images) -> Images:
    """Resized to 256 pixels on the short side, then the central 224 x 224: as torchvision does it, with Pillow."""
    from PIL import Image

    height, width = image.shape[:2]
    short = min(height, width)
    new_width, new_height = int(RESIZED * width / short), int(RESIZED * height / short)
    if (new_width, new_height) != (width, height):
        resized = Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BILINEAR)
        image = np.asarray(resized)
    top, left = round((new_height - CROPPED) / 2), round((new_width - CROPPED) / 2)
    return np.ascontiguousarray(image[top : top + CROPPED, left : left + CROPPED])


def load_imagenet(rest: str) -> ImageNetSet:
    """ImageNet by part and folder: `val@/data`, where /data/val or /data/imagenet/val holds the class folders."""
    split, root = split_and_root("imagenet", rest, SPLITS, "val")
    for folder in (root / "imagenet" / split, root / split):
        if folder.is_dir():
            return ImageNetSet(folder, f"imagenet:{split}")
    raise FileNotFoundError(
        f"no ImageNet at {root}; put the 1000 class folders into {root / split} or {root / 'imagenet' / split} "
        f"(n01440764/*.JPEG and so on), from ILSVRC2012_img_{split}.tar of https://image-net.org, which asks for an "
        "account and so cannot be downloaded from here"
    )


class ImageNetCSet:
    """The published ImageNet-C: DIR/<corruption>/<severity>/<class>/*.JPEG, the same files for every domain."""

    source = "https://zenodo.org/records/2235448"

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self._folders: dict[str, Path] = {}
        for corruption in (*NAMES, *HELD_OUT):
            places = (root / group / corruption for group in _GROUPS)
            if folder := next((place for place in places if place.is_dir()), None):
                self._folders[corruption] = folder
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
            for index in spread(len(self), _DIGEST_FILES):
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
    found = ImageNetCSet(folder, f"imagenet-c@{folder}")
    return domain_or_all(found, "imagenet-c", domain, found.source)
