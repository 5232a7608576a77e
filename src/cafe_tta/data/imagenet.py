"""ImageNet, read from its class folders one image at a time."""

from pathlib import Path

import numpy as np

from cafe_tta.data.folder import FolderSet, read_image
from cafe_tta.data.imageset import Images, split_and_root

SPLITS = ("val", "train")
RESIZED, CROPPED = 256, 224  # pixels, as in every published evaluation
NUM_CLASSES = 1000


class ImageNetSet(FolderSet):
    """ImageNet's images, resized to 256 pixels on the short side and cropped to 224 x 224, before any corruption.

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

    def has_one_size(self) -> bool:
        return True


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
