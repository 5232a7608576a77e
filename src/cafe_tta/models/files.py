"""Models and their weights in files."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from cafe_tta import storage
from cafe_tta.classifier import SplitClassifier
from cafe_tta.models import checkpoints
from cafe_tta.models.classes import check_classes, read_classes
from cafe_tta.models.names import (
    NAMES,
    build,
    default_preprocessing,
    head_of,
    is_name,
    is_own,
    num_classes_of,
    stated_classes,
    trained_models,
)
from cafe_tta.models.preprocessing import Preprocessing, Rgb

FORMAT_VERSION = 1
EXPORTED = (".onnx", ".ort", ".engine", ".plan", ".trt", ".tflite", ".mlmodel", ".mlpackage")


@dataclass(frozen=True)
class LoadedModel:
    """A model with what is needed to use it."""

    model: nn.Module = field(repr=False)  # in evaluation mode
    architecture: str
    num_classes: int
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None = None  # their names, where the file knows them
    training: Mapping[str, Any] | None = None  # settings, hash of the images and accuracies, where we trained it
    trained: bool = True  # False: the weights are random, because neither `weights` nor `pretrained` was given


def load(
    spec: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    num_classes: int | None = None,
    pretrained: bool = False,
    size: int | None = None,
    mean: Rgb | None = None,
    std: Rgb | None = None,
    new_head: bool = False,
    classes: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """A model, ready to use, from its name or from a file.

    `spec` is timm:NAME, torchvision:NAME, cafe:NAME, package.module:NAME for an nn.Module of your own (or a function or
    class that makes one), or the path of a file that `save` made. Some names of cafe: are trained models that come with
    this project (`trained_models`), the others architectures. A file of plain weights (safetensors, or a state dict
    that torch.save wrote) does not say what it is the weights of: give the name, and the file as `weights`. `size`,
    `mean` and `std` replace what the library or the file says about preprocessing; with a `size`, images are resized to
    it without a crop. `classes` is a file of their names, instead of those that the library or the file knows. With
    `new_head`, the weights of a file go into all but the last layer, which is new and has `num_classes` outputs: the
    start of training for other classes.

    >>> load("cafe:digits-resnet").preprocessing.size
    32
    >>> load("cafe:cifar10").classes[:3]
    ('airplane', 'automobile', 'bird')
    """
    if weights is None and not pretrained and isinstance(spec, str):
        spec = trained_models().get(spec, spec)
    if new_head and (weights is None or num_classes is None):
        raise ValueError("expected `new_head` with `weights` of a named architecture and `num_classes`")
    if weights is not None and pretrained:
        raise ValueError("expected either `weights` or `pretrained`, but got both")
    if not is_name(spec):
        if weights is not None or pretrained:
            raise ValueError(f"`weights` and `pretrained` go with the name of an architecture, but {spec} is a file")
        weights = spec
    name = str(spec) if weights is not spec else None
    tensors, meta = ({}, {}) if weights is None else _read(Path(weights))
    if name is None and not meta:
        raise ValueError(
            f"{weights} holds plain weights, which do not say what they are the weights of; name the architecture "
            f"({NAMES}) as the model, and give the file as `weights`"
        )
    if name is None and is_own(meta["architecture"]):  # else a file could have any function of any module called
        raise ValueError(
            f"{weights} holds the weights of {meta['architecture']}, your own code, which no file makes us execute; "
            f"name it as the model, and give the file as `weights`"
        )
    if name is not None and meta and meta["architecture"] != name and not is_own(name):
        raise ValueError(f"{weights} holds a {meta['architecture']}, but {name} was asked for")
    architecture = name or meta["architecture"]
    if meta and not new_head and num_classes not in (None, meta["num_classes"]):
        raise ValueError(f"{weights} tells {meta['num_classes']} classes apart, but `num_classes` is {num_classes}")

    saved = Preprocessing(**meta["preprocessing"]) if meta else None
    wanted = size or (saved.size if saved else None)
    model = build(architecture, num_classes or meta.get("num_classes"), pretrained, wanted)
    if weights is not None:
        tensors = checkpoints.without_prefix(tensors, model.state_dict())
        other = _classes_in(tensors, model, num_classes_of(model, architecture)) if num_classes is None else None
        if other is not None:
            model = build(architecture, other, size=wanted)
        if new_head:
            tensors = tensors | _head_tensors(model, architecture)
        _copy_into(model, tensors, f"{weights}", architecture)
    if saved is None and is_own(architecture) and size and mean and std:
        preprocessing = Preprocessing(size, mean, std)
    else:
        preprocessing = _override(saved or default_preprocessing(architecture, model), size, mean, std)
    count = num_classes_of(model, architecture)
    if classes is not None:
        names: tuple[str, ...] | None = check_classes(read_classes(classes), count, os.fspath(classes))
    elif meta.get("classes") and not new_head:
        names = tuple(meta["classes"])
    else:
        names = stated_classes(architecture, model, pretrained)
    trained = weights is not None or pretrained or is_own(architecture)  # which may load weights by itself
    training = None if new_head else meta.get("training")
    return LoadedModel(model.eval(), architecture, count, preprocessing, names, training, trained)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    architecture: str,
    preprocessing: Preprocessing,
    classes: Sequence[str] | None = None,
    training: Mapping[str, Any] | None = None,
    half: bool = False,
) -> int:
    """Writes a model, or a `SplitClassifier` made of one, to a file that `load` reads. Returns its size in bytes.

    `training` is what is known of its training, as JSON: `LoadedModel.training` has it again. With `half`, the weights
    are rounded to float16, in half the space; `load` gives float32 again.
    """
    tensors = _plain_tensors(model)
    if half:
        tensors = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    num_classes = model.num_classes if isinstance(model, SplitClassifier) else num_classes_of(model, architecture)
    if classes is not None and len(classes) != num_classes:
        raise ValueError(f"expected the names of {num_classes} classes, but got {len(classes)}")
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers must not change
        twin = build(architecture, num_classes, size=preprocessing.size)
    if isinstance(model, SplitClassifier):  # whose head may have been a 1×1 convolution
        weight = f"{model.feature_layer}.weight"
        tensors[weight] = tensors[weight].reshape(*tensors[weight].shape, *twin.get_parameter(weight).shape[2:])
    _check_match(tensors, twin, "the model", architecture)  # else the file could not be loaded again
    meta = {
        "architecture": architecture,
        "num_classes": num_classes,
        "preprocessing": preprocessing.record(),
        "classes": None if classes is None else list(classes),
        **({"training": dict(training)} if training else {}),
    }
    return storage.write(path, "model", FORMAT_VERSION, tensors, meta)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and what `save` wrote about them: nothing, where the weights are plain."""
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}; expected a safetensors file, or a .pth, with a model's weights")
    if path.suffix.lower() in EXPORTED:
        raise ValueError(
            f"expected a model's weights for PyTorch, but got an exported model, {path}, which cannot learn; give the "
            "weights that it was made from, and export the adapted model: adapter.export()"
        )
    if path.suffix.lower() in checkpoints.SUFFIXES:
        return checkpoints.read(path), {}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            if storage.HEADER not in (file.metadata() or {}):
                return {name: file.get_tensor(name) for name in file.keys()}, {}  # noqa: SIM118 - not a dict
    except safetensors.SafetensorError as error:
        raise storage.StorageError(f"{path} is not a whole safetensors file ({error})") from error
    return storage.read(path, "model", FORMAT_VERSION)


def _copy_into(model: nn.Module, tensors: Mapping[str, Tensor], what: str, architecture: str) -> None:
    _check_match(tensors, model, what, architecture)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in tensors:
                tensor.copy_(_finite(name, tensors[name], what))  # float16 becomes float32 here


def _finite(name: str, tensor: Tensor, what: str) -> Tensor:
    """Refuses damaged weights. A variance too large for float16 is brought back to the largest that float16 holds."""
    if not tensor.is_floating_point() or torch.isfinite(tensor).all():
        return tensor
    if tensor.dtype == torch.float16 and name.endswith("running_var") and not torch.isnan(tensor).any():
        largest = torch.finfo(torch.float16).max
        count = int(torch.isinf(tensor).sum())
        warnings.warn(
            f"{what}: {count} of {tensor.numel()} values of `{name}` were too large for the file's float16, and are "
            f"infinite; {largest:.0f} is used instead",
            stacklevel=4,
        )
        return tensor.clamp(max=largest)
    raise ValueError(f"{what}: `{name}` has NaN or infinite values; the weights are damaged")


def _check_match(tensors: Mapping[str, Tensor], model: nn.Module, what: str, architecture: str) -> None:
    """Refuses tensors that are not exactly those of the model, and says which are not."""
    expected = model.state_dict()
    # A counter that is not trained, and that old or converted files lack.
    missing = [name for name in expected if name not in tensors and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in tensors if name not in expected]
    shared = [name for name in expected if name in tensors]
    reshaped = [
        f"`{name}` {tuple(tensors[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in shared
        if tensors[name].shape != expected[name].shape
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for kind, names in (
            ("missing", [f"`{name}`" for name in missing]),
            ("unexpected", [f"`{name}`" for name in sorted(unexpected)]),
            ("of another shape", reshaped),
        )
        if names
    ]
    if problems:
        raise ValueError(f"the tensors of {what} are not those of {architecture}: {'; '.join(problems)}")


def _plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by the names that the architecture has for them."""
    if not isinstance(model, SplitClassifier):
        return dict(model.state_dict())
    body = {name.removeprefix("model."): tensor for name, tensor in model.backbone.state_dict().items()}
    return body | {f"{model.feature_layer}.{name}": tensor for name, tensor in model.head.state_dict().items()}


def _head_tensors(model: nn.Module, architecture: str) -> dict[str, Tensor]:
    head = head_of(model)
    if head is None:
        raise ValueError(f"{architecture} ends in no linear layer that a new one could replace")
    return {f"{head[0]}.{name}": tensor.clone() for name, tensor in head[1].state_dict().items()}


def _classes_in(tensors: Mapping[str, Tensor], model: nn.Module, num_classes: int) -> int | None:
    """The number of classes of the head in a file of weights, if it is there and differs from `num_classes`."""
    head = head_of(model)
    if head is None or head[1].out_features != num_classes:  # the last linear layer is not the head
        return None
    weight = tensors.get(f"{head[0]}.weight")
    return None if weight is None or weight.dim() != 2 or len(weight) == num_classes else len(weight)


def _override(preprocessing: Preprocessing, size: int | None, mean: Rgb | None, std: Rgb | None) -> Preprocessing:
    if size is not None and size != preprocessing.size:
        preprocessing = Preprocessing(
            size, preprocessing.mean, preprocessing.std
        )  # its crop and interpolation do not fit
    return replace(preprocessing, mean=mean or preprocessing.mean, std=std or preprocessing.std)
