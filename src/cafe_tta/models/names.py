"""Models by name: timm:NAME, torchvision:NAME, this project's own, cafe:NAME, and the user's, package.module:NAME."""

import copy
import importlib
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from cafe_tta import plugins
from cafe_tta._install import missing
from cafe_tta.models import checkpoints
from cafe_tta.models._torchvision import import_torchvision
from cafe_tta.models.cifar_cnn import CifarCNN
from cafe_tta.models.digits_resnet import DigitsResNet
from cafe_tta.models.preprocessing import CIFAR, IMAGENET, IMAGENET_MEAN, IMAGENET_STD, INTERPOLATIONS, Preprocessing
from cafe_tta.normalisation import batchnorm_layers

NAMES = "timm:NAME, torchvision:NAME, cafe:NAME, or package.module:function for an nn.Module of your own"
_TRAINED = Path(__file__).parent / "trained"  # models that come with this project, in files like those of `save`


def build(
    architecture: str, num_classes: int | None = None, pretrained: bool = False, size: int | None = None
) -> nn.Module:
    """A new model of a named architecture, with random weights or with the library's pretrained ones.

    `num_classes` and `size` are the library's own where they are not given. `size` matters to transformers, which are
    built for one size of images.
    """
    library, name = _parse(architecture)
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"expected `num_classes` to be at least 1, but got {num_classes}")
    model = library.build(name, num_classes, pretrained, size)
    if pretrained and num_classes is not None and num_classes != (there := num_classes_of(model, architecture)):
        raise ValueError(
            f"the pretrained weights of {architecture} tell {there} classes apart, but `num_classes` is {num_classes}; "
            "leave it out, or train a model of your own"
        )
    return model


def default_preprocessing(architecture: str, model: nn.Module) -> Preprocessing:
    """The preprocessing that the library states for a model."""
    library, name = _parse(architecture)
    return library.preprocessing(name, model)


def stated_classes(architecture: str, model: nn.Module, pretrained: bool) -> tuple[str, ...] | None:
    """The names of the classes that the library states for its pretrained weights, or an own module for itself."""
    library, name = _parse(architecture)
    if not pretrained and library is not _USERS:
        return None  # who knows what the weights were trained for
    names = library.classes(name, model)
    return tuple(names) if names and len(names) == num_classes_of(model, architecture) else None


def head_of(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The last linear layer of a model and its name, if it has one."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return layers[-1] if layers else None


def num_classes_of(model: nn.Module, architecture: str) -> int:
    head, stated = head_of(model), getattr(model, "num_classes", None)
    last = next((layer for layer in reversed([*model.modules()]) if isinstance(layer, nn.Conv2d)), None)
    ends = head[1].out_features if head else last.out_channels if last else 0  # a convolution may be the head
    number = stated if isinstance(stated, int) else ends
    if number < 1:
        raise ValueError(f"{architecture} has no head that tells classes apart; give `num_classes`")
    return number


def trained_models() -> dict[str, Path]:
    """The trained models that come with this project, by name, and their files.

    >>> "cafe:cifar10" in trained_models()
    True
    """
    return {f"cafe:{path.stem}": path for path in sorted(_TRAINED.glob("*.safetensors"))}


def is_name(spec: str | os.PathLike[str]) -> bool:
    """Whether a spec is the name of an architecture, not of a file."""
    if not isinstance(spec, str) or os.path.exists(spec):
        return False
    library = spec.partition(":")[0]
    if library in _LIBRARIES and ":" in spec:
        return True
    if Path(spec).suffix.lower() in (".safetensors", *checkpoints.SUFFIXES):
        return False
    if plugins.exists(spec):
        return True
    near = get_close_matches(library, _LIBRARIES, n=1) if ":" in spec else []
    hint = f"; did you mean {near[0] + ':' + spec.partition(':')[2]!r}?" if near else ""
    raise ValueError(f"no model {spec!r}{hint}; expected {NAMES}, or the path of a file that `cafe-tta train` made")


def is_own(architecture: str) -> bool:
    """Whether a name is of the user's own code: package.module:function."""
    return architecture.partition(":")[0] not in _LIBRARIES


def _parse(architecture: str) -> tuple["_Library", str]:
    library, colon, name = architecture.partition(":")
    if colon and library in _LIBRARIES:
        return _LIBRARIES[library], name
    if plugins.is_spec(architecture):
        return _USERS, architecture
    raise ValueError(f"no architecture {architecture!r}; expected {NAMES}")


def _unknown(library: str, name: str, known: Sequence[str]) -> ValueError:
    near = get_close_matches(name, known, n=3)
    hint = f"; did you mean {', '.join(f'{library}:{one}' for one in near)}?" if near else ""
    return ValueError(f"{library} has no model {name!r}{hint}")


# timm


def _timm() -> Any:
    import_torchvision()  # timm imports torchvision
    try:
        import timm
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise missing("this model", error, "models") from error
    return timm


def _build_timm(name: str, num_classes: int | None, pretrained: bool, size: int | None) -> nn.Module:
    timm = _timm()
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    config = timm.get_pretrained_cfg(name, allow_unregistered=False)
    options: dict[str, Any] = {}
    if size is not None and config is not None and config.fixed_input_size and config.input_size[-1] != size:
        options["img_size"] = size
    if num_classes is not None and not pretrained:
        options["num_classes"] = num_classes
    return _make(f"timm:{name}", pretrained, lambda: timm.create_model(name, pretrained=pretrained, **options))


def _timm_preprocessing(_name: str, model: nn.Module) -> Preprocessing:
    config: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    size = int(config.get("input_size", (3, 224, 224))[-1])
    squashed = config.get("crop_mode") == "squash"
    resize = None if squashed else math.floor(size / config.get("crop_pct", 0.875))
    how = _interpolation(config.get("interpolation"))
    return Preprocessing(size, config.get("mean", IMAGENET_MEAN), config.get("std", IMAGENET_STD), resize, how)


def _timm_classes(_name: str, model: nn.Module) -> Sequence[str] | None:
    timm_data: Any = importlib.import_module("timm.data")
    subset = timm_data.infer_imagenet_subset(model)
    return timm_data.ImageNetInfo(subset).label_descriptions() if subset else None


# torchvision


def _build_torchvision(name: str, num_classes: int | None, pretrained: bool, size: int | None) -> nn.Module:
    torchvision = import_torchvision()
    known = torchvision.models.list_models(module=torchvision.models)  # classification only
    if name not in known:
        raise _unknown("torchvision", name, known)
    options: dict[str, Any] = {}
    if size is not None and name.startswith("vit_"):
        options["image_size"] = size
    if name in ("googlenet", "inception_v3") and not pretrained:
        options["init_weights"] = False  # theirs takes a minute, and leaving it out is deprecated
    if num_classes is not None and not pretrained:
        options["num_classes"] = num_classes
    weights = _torchvision_weights(name) if pretrained else None
    return _make(
        f"torchvision:{name}", pretrained, lambda: torchvision.models.get_model(name, weights=weights, **options)
    )


def _torchvision_weights(name: str) -> Any:
    """The first weights of a model: the paper's ResNet-50 is IMAGENET1K_V1, not torchvision's newer default."""
    return next(iter(import_torchvision().models.get_model_weights(name)))


def _torchvision_preprocessing(name: str, _model: nn.Module) -> Preprocessing:
    stated = _torchvision_weights(name).transforms.keywords
    size, resize = stated.get("crop_size", IMAGENET.size), stated.get("resize_size", IMAGENET.resize)
    how = _interpolation(getattr(stated.get("interpolation"), "value", None))
    return Preprocessing(size, stated.get("mean", IMAGENET_MEAN), stated.get("std", IMAGENET_STD), resize, how)


def _interpolation(stated: Any) -> str:
    """The interpolation that a library states for a model; timm has "random" too, which is for training."""
    return str(stated) if stated in INTERPOLATIONS else "bilinear"


def _torchvision_classes(name: str, _model: nn.Module) -> Sequence[str] | None:
    names: Sequence[str] | None = _torchvision_weights(name).meta.get("categories")
    return names


# This project's own


def _resnet50_v1(num_classes: int) -> nn.Module:
    """ResNet-50 as first published, and as Keras has it: the public Keras weights fit no other.

    Blocks that halve the image do so in their first convolution, where torchvision does so in the second; BatchNorm
    adds 1e-3 to the variance, where torchvision adds 1e-5.
    """
    model: nn.Module = import_torchvision().models.resnet50(weights=None, num_classes=num_classes)
    for stage in ("layer2", "layer3", "layer4"):
        block: Any = model.get_submodule(f"{stage}.0")
        block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)
    for layer in batchnorm_layers(model):
        layer.eps = 1e-3
    return model


@dataclass(frozen=True)
class _Own:
    """An architecture of this project."""

    make: Callable[[int], nn.Module]
    preprocessing: Preprocessing
    num_classes: int


_OWN = {
    "cifar-cnn": _Own(CifarCNN, CIFAR, 10),
    "cifar-cnn-groupnorm": _Own(partial(CifarCNN, norm="group"), CIFAR, 10),
    "digits-resnet": _Own(DigitsResNet, Preprocessing(32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), 10),
    "resnet50-v1": _Own(  # Keras subtracts these means
        _resnet50_v1, replace(IMAGENET, mean=(123.68 / 255, 116.779 / 255, 103.939 / 255)), 1000
    ),
}


def _build_cafe(name: str, num_classes: int | None, pretrained: bool, size: int | None) -> nn.Module:
    if name not in _OWN:
        trained = [known.removeprefix("cafe:") for known in trained_models()]
        if name in trained:
            raise ValueError(
                f"cafe:{name} is a trained model, not an architecture; give it as the model, without weights"
            )
        raise _unknown("cafe", name, [*_OWN, *trained])
    if pretrained:
        raise ValueError(f"cafe:{name} has no weights to download; give a file as `weights`")
    return _OWN[name].make(_OWN[name].num_classes if num_classes is None else num_classes)


# The user's own


def _build_users(spec: str, num_classes: int | None, pretrained: bool, size: int | None) -> nn.Module:
    """A copy of the module of that name, or what the function or class of that name makes."""
    found = plugins.load_object(spec)
    wanted = {"num_classes": num_classes, "pretrained": pretrained or None}
    given = {name: value for name, value in wanted.items() if value is not None and _takes(found, name)}
    if pretrained and "pretrained" not in given:
        raise ValueError(
            f"{spec} takes no `pretrained`; let it load its weights by itself, or give a file as `weights`"
        )
    try:
        model = copy.deepcopy(found) if isinstance(found, nn.Module) else found(**given)
    except Exception as error:  # whatever the user's code does
        call = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"{spec}({call}) failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected {spec} to be an nn.Module, or to return one, but got {type(model).__name__}")
    if num_classes is not None and num_classes != (there := num_classes_of(model, spec)):
        cure = "" if "num_classes" in given else "; let it take `num_classes` as an argument"
        raise ValueError(f"{spec} has {there} classes, but {num_classes} are wanted{cure}")
    return model


def _takes(function: Any, name: str) -> bool:
    """Whether a function or class has a parameter of that name."""
    if isinstance(function, nn.Module) or not callable(function):
        return False
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _users_preprocessing(spec: str, model: nn.Module) -> Preprocessing:
    """What the module says of its images: a `preprocessing` of ours, or timm's `pretrained_cfg`."""
    stated = getattr(model, "preprocessing", None)
    if isinstance(stated, Preprocessing):
        return stated
    if getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None):
        return _timm_preprocessing(spec, model)
    raise ValueError(
        f"{spec} does not say what its images must look like; give `image_size`, `mean` and `std`, as in training, or "
        "the module an attribute preprocessing = cafe_tta.models.Preprocessing(size, mean, std)"
    )


def _make(architecture: str, pretrained: bool, make: Callable[[], nn.Module]) -> nn.Module:
    """Calls `make`; whatever stops a download is reported in one sentence."""
    if not pretrained:
        return make()
    try:
        return make()
    except Exception as error:  # each library, and each transport below it, fails in ways of its own
        reason = str(error).strip().partition("\n")[0] or "no reason given"
        raise RuntimeError(
            f"the pretrained weights of {architecture} could not be downloaded ({type(error).__name__}: {reason}); "
            "check the internet connection, or get the weights elsewhere and give a file as `weights`"
        ) from error


@dataclass(frozen=True)
class _Library:
    """Where models come from: the word before the colon of a model's name."""

    build: Callable[[str, int | None, bool, int | None], nn.Module]
    preprocessing: Callable[[str, nn.Module], Preprocessing]
    classes: Callable[[str, nn.Module], Sequence[str] | None]


_LIBRARIES = {
    "timm": _Library(_build_timm, _timm_preprocessing, _timm_classes),
    "torchvision": _Library(_build_torchvision, _torchvision_preprocessing, _torchvision_classes),
    "cafe": _Library(_build_cafe, lambda name, model: _OWN[name].preprocessing, lambda name, model: None),
}
_USERS = _Library(_build_users, _users_preprocessing, lambda name, model: getattr(model, "classes", None))
