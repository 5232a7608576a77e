"""What a method may need from the source domain: the base class of every kind of source value."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from cafe_tta import storage
from cafe_tta.classifier import SplitClassifier
from cafe_tta.display import Displayed
from cafe_tta.models import Preprocessing
from cafe_tta.source.images import ImageRecord

Content: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, Any]]  # of a file: tensors, and metadata for JSON

IMAGE_KEYS = ("image", "images", "pixel_values", "img")  # what loaders of dictionaries call them


class MadeOfImages(Displayed):
    """What was computed from images, and knows how they were read: `meta` holds it."""

    meta: Mapping[str, Any] = MappingProxyType({})

    @property
    def images(self) -> ImageRecord:
        """How the images were read, and what is known of them."""
        return ImageRecord.of(self.meta)

    def of_images(self, preprocessing: Preprocessing | None = None, classes: Sequence[str] | None = None) -> Self:
        """The same, with what is known of the images, unless it has no `meta` to keep it in."""
        if not is_dataclass(self) or "meta" not in (field.name for field in fields(self)):
            return self
        known = {"preprocessing": preprocessing, "classes": None if classes is None else tuple(classes)}
        record = replace(self.images, **{name: value for name, value in known.items() if value is not None})
        return replace(self, meta=record.into(self.meta))

    def facts(self) -> Mapping[str, Any]:
        classes = self.images.classes
        return {"read at": self.images.describe(), "classes": None if classes is None else len(classes)}


class SourceValue(MadeOfImages):
    """A value computed at the training site, saved to a file, and loaded where the images come in.

    A subclass sets `kind`, `file_kind` and `how_to_make`, writes the methods below, and is added to
    `cafe_tta.source.SOURCES`; a method asks for it with `needs = kind`. Every command then makes, loads, checks and
    passes it on. tests/source/test_sources.py has a complete example. In a field `meta`, commands keep how the images
    were read. For one file with an adapter's state, it has `content` and `from_content`; it may also write `save` and
    `load` itself.
    """

    kind: ClassVar[str]  # its key in `SOURCES`, and what methods write in `needs`
    file_kind: ClassVar[str]  # what its files call themselves
    file_version: ClassVar[int] = 1
    how_to_make: ClassVar[str]  # ends an error: "tent needs X, but got none; " + how_to_make

    @classmethod
    def fit(cls, classifier: SplitClassifier, loader: Iterable[Any]) -> Self:
        """Computes the value from source images: batches of images, or of (images, labels), that can be reread.

        The batches have labels where the image set has them; a label of -1 is unknown.
        """
        raise NotImplementedError

    def content(self) -> Content:
        """What a file of the value holds."""
        raise NotImplementedError

    @classmethod
    def from_content(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        """The value that has this content."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes the value to a safetensors file, and returns its size in bytes."""
        return storage.write(path, self.file_kind, self.file_version, *self.content())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote."""
        return cls.from_content(*storage.read(path, cls.file_kind, cls.file_version))

    def check_belongs_to(self, classifier: SplitClassifier) -> None:
        """Raises where the value was computed with another classifier, and says what differs."""
        raise NotImplementedError

    @classmethod
    def require(cls, source: Any, classifier: SplitClassifier, method: str) -> None:
        """Raises where `source` is not a value of this kind for this classifier."""
        if source is None:
            raise ValueError(f"{method} needs {cls.kind} from the source domain, but got none; {cls.how_to_make}")
        if not isinstance(source, cls):
            raise TypeError(f"{method} needs {cls.__name__}, but got {type(source).__name__}; {cls.how_to_make}")
        source.check_belongs_to(classifier)


class SourceData(SourceValue):
    """Labelled source images themselves: any loader of (images, labels) that can be reread."""

    kind = "data"
    file_kind = ""  # there are no files of it: loaders are passed as they are
    how_to_make = "pass a loader of (images, labels), such as a DataLoader or a list"

    @classmethod
    def fit(cls, classifier: SplitClassifier, loader: Iterable[Any]) -> Self:
        raise ValueError(f"there is nothing to compute for {cls.kind!r}; {cls.how_to_make}")

    @classmethod
    def require(cls, source: Any, classifier: SplitClassifier, method: str) -> None:
        if source is None:
            super().require(source, classifier, method)
        require_rereadable(source, f"{method} needs labelled source images: {cls.how_to_make}")


def require_rereadable(loader: Any, why: str) -> None:
    """Raises where a loader can be read only once."""
    require_batches(loader)
    if not isinstance(loader, Iterable) or iter(loader) is loader:
        raise TypeError(f"expected a loader that can be read more than once, but got {type(loader).__name__}; {why}")


def require_batches(loader: Any) -> None:
    """Raises where a loader would give single images instead of batches."""
    if isinstance(loader, Tensor):
        shape = tuple(loader.shape)
        raise TypeError(f"expected a loader of batches, but got one tensor of shape {shape}; pass images.split(256)")
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"expected a loader of batches, but got a data set ({type(loader).__name__}), which gives single images; "
            "pass torch.utils.data.DataLoader(dataset, batch_size=256)"
        )


def images_of(batch: Any, key: str | None = None) -> Tensor:
    """The images of a loader's batch: the batch itself, the first entry of a tuple, or of a dictionary its `key`.

    >>> import torch
    >>> images_of({"pixel_values": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(8)}).shape
    torch.Size([8, 3, 32, 32])
    """
    images = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(batch, Mapping):
        found = next((name for name in ((key,) if key else IMAGE_KEYS) if name in batch), None)
        if found is None:
            wanted, there = key or ", ".join(IMAGE_KEYS), ", ".join(map(str, batch))
            raise TypeError(
                f"expected images under {wanted}, but the batches have {there}; "
                'say which: FeatureStats.fit(classifier, loader, key="...")'
            )
        images = batch[found]
    if not isinstance(images, Tensor):
        raise TypeError(f"expected batches of tensors or of (images, labels), but got {type(images).__name__}")
    if not images.is_floating_point():
        raise TypeError(
            f"expected floating-point images, normalised as in training, but got {images.dtype}; "
            "divide by 255 and normalise first"
        )
    return images


def rebatched(loader: Iterable[Any], size: int) -> Iterator[Tensor]:
    """The images of a loader in batches of `size`; a last one of a single image, which has no variance, is left out."""
    waiting: list[Tensor] = []
    for batch in loader:
        waiting += list(images_of(batch))
        while len(waiting) >= size:
            yield torch.stack(waiting[:size])
            waiting = waiting[size:]
    if len(waiting) > 1:
        yield torch.stack(waiting)


def sampled(loader: Iterable[Any], count: int, seed: int = 0) -> list[Tensor]:
    """At most `count` images of a loader, drawn at random from all of them, in random order."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Tensor] = []
    for number, image in enumerate(image for batch in loader for image in images_of(batch)):
        if len(drawn) < count:
            drawn.append(image)
        elif (place := int(torch.randint(number + 1, (), generator=generator))) < count:
            drawn[place] = image
    return [drawn[place] for place in torch.randperm(len(drawn), generator=generator).tolist()]
