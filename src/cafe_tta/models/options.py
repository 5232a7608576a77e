"""The options that describe a model, and the classifier that they stand for."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from cafe_tta.classifier import SplitClassifier, split_classifier
from cafe_tta.models.files import load
from cafe_tta.models.names import NAMES
from cafe_tta.models.preprocessing import Preprocessing, Rgb
from cafe_tta.options import Options, did_you_mean, option

WEIGHTS_HELP = "Weights for the named model: a safetensors file, or a .pth, .pt or .ckpt that holds a state dict."
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class ModelOptions(Options):
    """Which model to use, what its images must look like, and where it runs.

    >>> ModelOptions("cafe:digits-resnet", num_classes=0)
    Traceback (most recent call last):
    ValueError: expected `num_classes` to be at least 1 or None, but got 0
    """

    model: str | Path = option(
        "",
        f"The model: {NAMES}; or a file that `cafe-tta train` made.",
        panel="Model",
        required=True,
        metavar="MODEL",
    )
    weights: Path | None = option(None, WEIGHTS_HELP, panel="Model")
    num_classes: int | None = option(
        None, "The number of classes; by default that of the weights.", least=1, panel="Model"
    )
    pretrained: bool = option(
        False, "Download the weights that the model's library offers.", panel="Model", flag="--pretrained"
    )
    image_size: int | None = option(
        None, "Height and width of the images that the model takes, in pixels.", least=1, panel="Model"
    )
    mean: Rgb | None = option(
        None, "Mean of the red, green and blue values, which are in 0..1.", panel="Model", metavar="R,G,B"
    )
    std: Rgb | None = option(
        None, "Standard deviation of the red, green and blue values, which are in 0..1.", panel="Model", metavar="R,G,B"
    )
    head: str | None = option(
        None, "Name of the linear layer that computes the logits; by default it is detected.", panel="Model"
    )
    classes: Path | None = option(
        None,
        'Names of the classes, by default the model\'s: a text file, one a line, or JSON, a list or {"0": "cat", …}.',
        panel="Model",
    )
    device: str = option(
        "auto", f"Where the model runs: {', '.join(DEVICES)}. auto is the fastest device there is.", panel="Model"
    )


@dataclass(frozen=True)
class Model:
    """A classifier, split in front of its head, and what its images must look like."""

    classifier: SplitClassifier = field(repr=False)
    architecture: str
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None  # their names, where they are known
    trained: bool = True  # False: the weights are random


def load_classifier(
    options: ModelOptions,
    *,
    new_head: bool = False,
    untrained: bool = False,
    preprocessing: Preprocessing | None = None,
) -> Model:
    """The classifier that the options describe, on its device; random weights are refused unless `untrained`.

    An option that `load` takes is passed on to it by its name. `preprocessing`, such as that of the source images,
    takes the place of what the options and the model's library or file say about images.
    """
    device = choose_device(options.device)
    own = ("model", "image_size", "head", "device")
    passed_on = {name: value for name, value in vars(options).items() if name not in own}
    size = options.image_size
    if preprocessing is not None:
        size = preprocessing.size
        passed_on |= {"mean": preprocessing.mean, "std": preprocessing.std}  # a module of the user's may state none
    loaded = load(options.model, size=size, new_head=new_head, **passed_on)
    if not loaded.trained and not untrained:
        download = "" if str(options.model).startswith("cafe:") else ", or set `pretrained`"  # ours has none to offer
        raise ValueError(f"{options.model} alone has random weights; give a file as `weights`{download}")
    classifier = split_classifier(channels_last(loaded.model), head=options.head).eval().to(device)
    return Model(classifier, loaded.architecture, preprocessing or loaded.preprocessing, loaded.classes, loaded.trained)


def channels_last(model: nn.Module) -> nn.Module:
    """The model with its weights in channels-last memory format: the same up to rounding, and faster on CPUs.

    It takes a tenth to a quarter off a step (docs/performance.md).
    """
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def choose_device(name: str) -> torch.device:
    """The device of that name, if this machine has it; `auto` is the fastest there is.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}{did_you_mean(name, DEVICES)}; choose from: {', '.join(DEVICES)}")
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if available[kind]))
    if not available[name]:
        raise ValueError(f"this machine, or this build of PyTorch, has no {name!r}; choose `device` cpu or auto")
    return torch.device(name)
