"""What several commands are given: a model, a device, image sets."""

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from cafe_tta import data, loading
from cafe_tta.cli.console import Advance, say
from cafe_tta.data.imageset import Labels
from cafe_tta.data.labels import match_labels as match_labels
from cafe_tta.loading import DEVICES
from cafe_tta.loading import Model as Model
from cafe_tta.loading import choose_device as choose_device

_PANEL = "The model"

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
DeviceOption = Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")]
WorkersOption = Annotated[int, typer.Option(min=0, help="Threads that read images ahead.")]


def load_model(spec: str, *, mean: str | None, std: str | None, **options: Any) -> Model:
    """The model that the options describe, split and on its device."""
    return loading.load_model(spec, mean=three_numbers("mean", mean), std=three_numbers("std", std), **options)


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
