"""What several commands are given: a model, a device, image sets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from cafe_tta import data, models
from cafe_tta.classifier import SplitClassifier, split_classifier
from cafe_tta.cli.console import Advance, say
from cafe_tta.data.imageset import Labels
from cafe_tta.options import did_you_mean

DEVICES = ("auto", "cpu", "cuda", "mps")
_PANEL = "The model"
TORCHRUN = "Many processes, started by torchrun"

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", help="timm:NAME, torchvision:NAME, cafe:digits-resnet, or a file that `cafe-tta train` made. "
        "An nn.Module of your own is used from Python, not from here.",
        rich_help_panel=_PANEL, show_default=False,
    ),
]  # fmt: skip
WeightsOption = Annotated[
    str | None, typer.Option(help="File of weights for the model.", rich_help_panel=_PANEL, show_default=False)
]
NumClassesOption = Annotated[
    int | None, typer.Option(min=1, help="Number of classes.", rich_help_panel=_PANEL, show_default=False)
]
PretrainedOption = Annotated[
    bool, typer.Option("--pretrained", help="Download the library's weights.", rich_help_panel=_PANEL)
]
ImageSizeOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Pixels that the model reads, in each direction.", rich_help_panel=_PANEL, show_default=False
    ),
]
MeanOption = Annotated[
    str | None,
    typer.Option(help="Of the RGB values in 0..1: three numbers, r,g,b.", rich_help_panel=_PANEL, show_default=False),
]
StdOption = Annotated[str | None, typer.Option(help="As --mean.", rich_help_panel=_PANEL, show_default=False)]
HeadOption = Annotated[
    str | None,
    typer.Option(
        help="Name of the linear layer that makes the logits; found by itself.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
DataOption = Annotated[
    str, typer.Option("--data", help="A folder of images, arrays:DIR, digits:test, cifar10:test …", show_default=False)
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        min=1,
        help="Under torchrun, end the job when a rank sends no heartbeat for this many seconds.",
        rich_help_panel=TORCHRUN,
    ),
]
DeviceOption = Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")]
WorkersOption = Annotated[int, typer.Option(min=0, help="Threads that read images ahead.")]


@dataclass(frozen=True)
class Model:
    """A classifier in two parts, with what its images must look like."""

    classifier: SplitClassifier
    architecture: str
    preprocessing: models.Preprocessing
    classes: tuple[str, ...] | None


def load_model(
    spec: str,
    *,
    weights: str | None,
    num_classes: int | None,
    pretrained: bool,
    image_size: int | None,
    mean: str | None,
    std: str | None,
    head: str | None,
    device: str,
) -> Model:
    """The model that the options describe, split and on its device."""
    place = choose_device(device)
    loaded = models.load(
        spec,
        weights=weights,
        num_classes=num_classes,
        pretrained=pretrained,
        size=image_size,
        mean=three_numbers("mean", mean),
        std=three_numbers("std", std),
    )
    if not loaded.trained:
        download = "" if spec.startswith("cafe:") else ", or say --pretrained"  # there is nothing to download for ours
        raise ValueError(f"{spec} alone has random weights; give a file with --weights{download}")
    classifier = split_classifier(models.laid_out(loaded.model), head=head).eval().to(place)
    classes = None if loaded.classes is None else tuple(loaded.classes)
    return Model(classifier, loaded.architecture, loaded.preprocessing, classes)


def choose_device(name: str) -> torch.device:
    """The device of that name, if this machine has it; `auto` is the fastest there is."""
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}{did_you_mean(name, DEVICES)}; choose from: {', '.join(DEVICES)}")
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if available[kind]))
    if not available[name]:
        raise ValueError(f"this machine, or this build of PyTorch, has no {name!r}; say --device cpu or auto")
    return torch.device(name)


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
