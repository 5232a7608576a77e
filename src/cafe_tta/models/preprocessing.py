"""How uint8 images become the input of a network."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Rgb = tuple[float, float, float]
INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "box", "hamming", "lanczos")  # Pillow's, in lower case


@dataclass(frozen=True, repr=False)
class Preprocessing:
    """How uint8 images become the network's input: resized, then normalised by channel.

    >>> preprocessing = Preprocessing(size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    >>> preprocessing(np.zeros((2, 8, 8, 3), np.uint8)).shape
    torch.Size([2, 3, 32, 32])
    """

    size: int  # height and width of the input
    mean: Rgb  # of images divided by 255
    std: Rgb
    resize: int | None = None  # short side before the centre crop; None: resize to size×size, whatever the shape
    interpolation: str = "bilinear"  # one of INTERPOLATIONS

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"expected `size` to be at least 1, but got {self.size}")
        if self.resize is not None and self.resize < self.size:
            raise ValueError(f"expected `resize` to be at least `size` ({self.size}) or None, but got {self.resize}")
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 3 or not all(map(math.isfinite, values)):
                raise ValueError(f"expected `{name}` to be three numbers, but got {getattr(self, name)}")
            object.__setattr__(self, name, values)
        if not all(0 <= value <= 1 for value in self.mean):
            raise ValueError(f"expected `mean` to be between 0 and 1 (of images divided by 255), but got {self.mean}")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"expected `std` to be above 0, but got {self.std}")
        if self.interpolation not in INTERPOLATIONS:
            known = ", ".join(INTERPOLATIONS)
            raise ValueError(f"expected `interpolation` to be one of {known}, but got {self.interpolation!r}")

    def record(self) -> dict[str, Any]:
        """What files keep of it: `Preprocessing(**record)` is the same again."""
        fields = asdict(self)
        if self.interpolation == "bilinear":
            del fields["interpolation"]  # as files had it before there was a choice
        return fields

    def describe(self) -> str:
        """In words.

        >>> Preprocessing(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), resize=256).describe()
        '224 px (cropped from 256), mean 0.485,0.456,0.406, std 0.229,0.224,0.225'
        """
        how = "" if self.interpolation == "bilinear" else f", {self.interpolation}"
        return f"{self.describe_size()}, mean {_text(self.mean)}, std {_text(self.std)}{how}"

    def describe_size(self) -> str:
        """The size of the input, and what it is cropped from.

        >>> Preprocessing(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), resize=256).describe_size()
        '224 px (cropped from 256)'
        """
        return f"{self.size} px{'' if self.resize is None else f' (cropped from {self.resize})'}"

    def __repr__(self) -> str:
        return f"Preprocessing({', '.join(f'{name}={value!r}' for name, value in self.record().items())})"

    @property
    def low(self) -> float:
        """The smallest value that it can give: of a black pixel."""
        return min(-mean / std for mean, std in zip(self.mean, self.std, strict=True))

    @property
    def high(self) -> float:
        """The largest value that it can give: of a white pixel."""
        return max((1 - mean) / std for mean, std in zip(self.mean, self.std, strict=True))

    def __call__(self, images: np.ndarray) -> Tensor:
        """uint8 images (N, H, W, 3) as float32 (N, 3, size, size). Images of size×size are only normalised."""
        if not isinstance(images, np.ndarray):
            raise TypeError(f"expected a numpy array of images, but got {type(images).__name__}")
        if images.dtype != np.uint8:
            raise TypeError(f"expected uint8 images (0 to 255), but got {images.dtype}")
        if images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape[1:]:
            raise ValueError(f"expected RGB images of shape (N, height, width, 3), but got {images.shape}")
        if images.shape[1:3] != (self.size, self.size):
            fitted = np.empty((len(images), self.size, self.size, 3), np.uint8)
            for number, image in enumerate(images):
                fitted[number] = self.fit(image)
            images = fitted
        prepared = np.empty((len(images), 3, self.size, self.size), np.float32)
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            np.multiply(images[..., channel], np.float32(1 / (255 * std)), out=prepared[:, channel])
            prepared[:, channel] -= np.float32(mean / std)
        return torch.from_numpy(prepared)

    def fit(self, image: np.ndarray) -> np.ndarray:
        """One uint8 image (H, W, 3) at the network's size, not yet normalised."""
        from PIL import Image  # here, not above: images that fit need no Pillow

        picture, how = Image.fromarray(np.ascontiguousarray(image)), Image.Resampling[self.interpolation.upper()]
        if self.resize is None:
            return np.asarray(picture.resize((self.size, self.size), how))
        short = min(picture.size)
        if max(picture.size) > 8 * short:  # resized, a strip would take gigabytes, and only its middle is used
            (w, h), kept = picture.size, 8 * short
            left, top = max(0, (w - kept) // 2), max(0, (h - kept) // 2)
            picture = picture.crop((left, top, min(w, left + kept), min(h, top + kept)))
        width, height = (self.resize * side // short for side in picture.size)
        picture = picture.resize((width, height), how)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return np.asarray(picture.crop((left, top, left + self.size, top + self.size)))


def _text(values: Rgb) -> str:
    return ",".join(f"{value:.4g}" for value in values)


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET = Preprocessing(224, IMAGENET_MEAN, IMAGENET_STD, resize=256)
CIFAR = Preprocessing(32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
