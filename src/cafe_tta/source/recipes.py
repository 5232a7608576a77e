"""Recipes: a network and how to train it, for source models worth testing on. `cafe-tta train --recipe NAME`."""

from dataclasses import dataclass, replace

from cafe_tta.models import CIFAR, ModelOptions
from cafe_tta.options import did_you_mean
from cafe_tta.source.train import TrainConfig

_QUICK = TrainConfig(  # after the paper that models/cifar_cnn.py names, without its averaging over views of an image
    epochs=22,
    swag_epochs=2,
    batch_size=512,
    lr=0.5,
    warmup=3,
    nesterov=True,
    weight_decay=1.3e-3,
    label_smoothing=0.2,
    swag_lr=0.02,
    crop=2,
    alternate_flips=True,
    bias_lr=64,
    head_lr=1 / 81,
    precision="bfloat16",
)
_RESNET26 = ModelOptions("timm:resnet26", image_size=CIFAR.size, mean=CIFAR.mean, std=CIFAR.std)


@dataclass(frozen=True)
class Recipe:
    """A network, what its images must look like, and how it is trained."""

    about: str
    model: ModelOptions
    config: TrainConfig


RECIPES = {
    "cifar10": Recipe("a quick network with 256 features, for CIFAR-10", ModelOptions("cafe:cifar-cnn"), _QUICK),
    "cifar10-resnet26": Recipe(
        "the paper's network, timm's resnet26, in a tenth of the paper's epochs",
        _RESNET26,
        TrainConfig(
            epochs=28,
            swag_epochs=4,
            lr=0.1,
            warmup=3,
            nesterov=True,
            label_smoothing=0.1,
            swag_lr=0.01,
            precision="bfloat16",
        ),
    ),
    "cifar10-groupnorm": Recipe(
        "the quick network without BatchNorm",
        ModelOptions("cafe:cifar-cnn-groupnorm"),
        replace(_QUICK, epochs=8, swag_epochs=1, batch_size=128, lr=0.05, warmup=1, bias_lr=1, head_lr=1),
    ),
    "cifar100": Recipe("the quick network, for CIFAR-100", ModelOptions("cafe:cifar-cnn"), replace(_QUICK, epochs=30)),
    "svhn": Recipe(
        "the quick network, for SVHN, whose digits must not be mirrored",
        ModelOptions("cafe:cifar-cnn", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)),
        replace(_QUICK, epochs=16, augment="crop"),
    ),
}


def recipe(name: str) -> Recipe:
    """The recipe of that name, or an error that lists what there is.

    >>> recipe("cifar10").model.model
    'cafe:cifar-cnn'
    """
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES)
        raise ValueError(f"unknown recipe {name!r}{hint}; choose from: {', '.join(RECIPES)}")
    return RECIPES[name]
