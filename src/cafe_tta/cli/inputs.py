"""What several commands are given: a model, a device, image sets."""

from functools import partial
from typing import Annotated, Any

import typer

from cafe_tta import data, models
from cafe_tta.cli.console import say
from cafe_tta.options import Options, describe

TORCHRUN = "Many processes, started by torchrun"


def flag(options: type[Options], name: str, *names: str, **more: Any) -> Any:
    """A flag with the meaning of a declared option. An option without a value shows no default."""
    described = next(described for described in describe(options) if described.name == name)
    panel, default = described.extra.get("panel"), described.default
    more["show_default"] = default not in (None, "") and default is not False
    return typer.Option(..., *names, help=described.meaning, rich_help_panel=panel, **more)


_flag = partial(flag, models.ModelOptions)

ModelOption = Annotated[str, _flag("model", "--model")]
WeightsOption = Annotated[str | None, _flag("weights")]
NumClassesOption = Annotated[int | None, _flag("num_classes", min=1)]
PretrainedOption = Annotated[bool, _flag("pretrained", "--pretrained")]
ImageSizeOption = Annotated[int | None, _flag("image_size", min=1)]
MeanOption = Annotated[str | None, _flag("mean", metavar="R,G,B")]
StdOption = Annotated[str | None, _flag("std", metavar="R,G,B")]
HeadOption = Annotated[str | None, _flag("head")]
DeviceOption = Annotated[str, _flag("device")]
DataOption = Annotated[
    str,
    typer.Option(
        "--data",
        help="The images: a folder, or a data set such as digits:test, cifar10:test or arrays:DIR.",
        show_default=False,
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        min=1,
        help="Under torchrun, end the job when a rank sends no heartbeat for this many seconds.",
        rich_help_panel=TORCHRUN,
    ),
]
WorkersOption = Annotated[int, typer.Option(min=0, help="Number of threads that read images ahead.")]

Model = models.Model
Loader = data.Loader
choose_device = models.choose_device
match_labels = data.match_labels


def model_options(spec: str, *, mean: str | None, std: str | None, **options: Any) -> models.ModelOptions:
    """The options of the model, from the values of the flags."""
    options |= {"mean": three_numbers("mean", mean), "std": three_numbers("std", std)}
    return models.ModelOptions(spec, **options)


def load_model(spec: str, **options: Any) -> Model:
    """The model that the flags describe, split and on its device."""
    return models.load_classifier(model_options(spec, **options))


def three_numbers(option: str, text: str | None) -> tuple[float, float, float] | None:
    if text is None:
        return None
    try:
        red, green, blue = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"expected --{option} to be three numbers such as 0.5,0.5,0.5, but got {text!r}") from None
    return red, green, blue


def say_unreadable(unreadable: list[data.Unreadable]) -> None:
    """Names the first few images that were left out."""
    for item in unreadable[:5]:
        say(f"note: left out {item.name}: {item.why}")
    if len(unreadable) > 5:
        say(f"note: left out {len(unreadable) - 5} more")
