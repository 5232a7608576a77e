"""What several commands are given: a model, a device, image sets."""

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from cafe_tta import data, models
from cafe_tta.cli.console import Advance, say
from cafe_tta.data.imageset import Labels
from cafe_tta.options import describe

_MEANINGS = {described.name: described.meaning for described in describe(models.ModelOptions)}


def _flag(name: str, *names: str, show_default: bool = False, **more: Any) -> Any:
    """The flag of an option of the model."""
    return typer.Option(*names, help=_MEANINGS[name], rich_help_panel="Model", show_default=show_default, **more)


ModelOption = Annotated[str, _flag("model", "--model")]
WeightsOption = Annotated[str | None, _flag("weights")]
NumClassesOption = Annotated[int | None, _flag("num_classes", min=1)]
PretrainedOption = Annotated[bool, _flag("pretrained", "--pretrained")]
ImageSizeOption = Annotated[int | None, _flag("image_size", min=1)]
MeanOption = Annotated[str | None, _flag("mean", metavar="R,G,B")]
StdOption = Annotated[str | None, _flag("std", metavar="R,G,B")]
HeadOption = Annotated[str | None, _flag("head")]
DeviceOption = Annotated[str, _flag("device", show_default=True)]
DataOption = Annotated[
    str,
    typer.Option(
        "--data",
        help="The images: a folder, or a data set such as digits:test, cifar10:test or arrays:DIR.",
        show_default=False,
    ),
]
WorkersOption = Annotated[int, typer.Option(min=0, help="Number of threads that read images ahead.")]

Model = models.Model
choose_device = models.choose_device


def load_model(spec: str, *, mean: str | None, std: str | None, **options: Any) -> Model:
    """The model that the options describe, split and on its device."""
    options |= {"mean": three_numbers("mean", mean), "std": three_numbers("std", std)}
    return models.load_classifier(models.ModelOptions(spec, **options))


def three_numbers(option: str, text: str | None) -> tuple[float, float, float] | None:
    if text is None:
        return None
    try:
        red, green, blue = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"expected --{option} to be three numbers such as 0.5,0.5,0.5, but got {text!r}") from None
    return red, green, blue


class Loader:
    """Preprocessed batches of an image set, gone through as often as needed. Moves a progress bar on.

    With `labels`, gives (images, labels).
    """

    def __init__(
        self,
        imageset: data.ImageSet,
        preprocessing: Any,
        batch_size: int,
        *,
        order: Labels | None = None,
        labels: Labels | None = None,
        workers: int = 0,
        advance: Advance = lambda amount: None,
    ) -> None:
        self.imageset, self.preprocessing, self.batch_size = imageset, preprocessing, batch_size
        self.order = np.arange(len(imageset)) if order is None else order
        self.labels, self.workers, self.advance = labels, workers, advance
        self.unreadable: list[data.Unreadable] = []  # of the last pass

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        self.unreadable = []
        consumed = 0
        for batch in data.batches(
            self.imageset,
            self.batch_size,
            self.preprocessing,
            order=self.order,
            unreadable=self.unreadable,
            workers=self.workers,
        ):
            if self.labels is None:
                yield batch.images
            else:
                yield batch.images, torch.from_numpy(self.labels[batch.indices])
            self.advance(batch.consumed - consumed)
            consumed = batch.consumed


def say_unreadable(unreadable: list[data.Unreadable]) -> None:
    """Names the first few images that were left out."""
    for item in unreadable[:5]:
        say(f"note: left out {item.name}: {item.why}")
    if len(unreadable) > 5:
        say(f"note: left out {len(unreadable) - 5} more")


def match_labels(
    imageset: data.ImageSet, classes: tuple[str, ...] | None, num_classes: int
) -> tuple[Labels | None, str]:
    """Labels of the images in the model's numbers, -1 where unknown; or None, and why there are none.

    Class folders are matched by name, since their order says nothing: a target set rarely has every class.
    """
    labels, names = imageset.labels, imageset.classes
    if labels is None:
        return None, "no class folders or labels"
    if names is None:
        numbers = np.arange(max(int(labels.max()) + 1, num_classes))
        numbers[num_classes:] = -1
    elif classes is not None:
        place = {name: number for number, name in enumerate(classes)}
        numbers = np.array([place.get(name, -1) for name in names])
    elif all(name.isdecimal() for name in names):
        numbers = np.array([int(name) if int(name) < num_classes else -1 for name in names])
    elif len(names) == num_classes:
        numbers = np.arange(num_classes)  # as many classes: their numbers are the model's
    else:
        there = "is 1 class" if len(names) == 1 else f"are {len(names)} classes"
        return None, f"there {there}, but the model has {num_classes}, without names"
    matched: Labels = numbers[labels].astype(np.int64)
    if (matched < 0).all():
        return None, "no class folder is called like a class of the model"
    return matched, ""
