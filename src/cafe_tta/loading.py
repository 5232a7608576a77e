"""A model that is ready to use: loaded by name or from a file, split, on its device, with its preprocessing."""

from dataclasses import dataclass

import torch

from cafe_tta import models
from cafe_tta.classifier import SplitClassifier, split_classifier
from cafe_tta.options import did_you_mean

DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class Model:
    """A classifier in two parts, and how its images are preprocessed."""

    classifier: SplitClassifier
    architecture: str
    preprocessing: models.Preprocessing
    classes: tuple[str, ...] | None


def load_model(
    spec: str,
    *,
    weights: str | None = None,
    num_classes: int | None = None,
    pretrained: bool = False,
    image_size: int | None = None,
    mean: tuple[float, float, float] | None = None,
    std: tuple[float, float, float] | None = None,
    head: str | None = None,
    device: str = "cpu",
) -> Model:
    """Loads a model (see `models.load`), splits it and moves it to a device."""
    target = choose_device(device)
    loaded = models.load(
        spec, weights=weights, num_classes=num_classes, pretrained=pretrained, size=image_size, mean=mean, std=std
    )
    if not loaded.trained:
        download = "" if spec.startswith("cafe:") else ", or set `pretrained`"  # ours cannot be downloaded
        raise ValueError(f"{spec} alone has random weights; give a file of `weights`{download}")
    classifier = split_classifier(models.laid_out(loaded.model), head=head).eval().to(target)
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
        raise ValueError(f"this machine, or this build of PyTorch, has no {name!r}; choose 'cpu' or 'auto'")
    return torch.device(name)
