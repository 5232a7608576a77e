"""Models by name: timm's, torchvision's, this project's own, and safetensors files."""

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor, nn

from cafe_tta import storage
from cafe_tta._torchvision import import_torchvision
from cafe_tta.classifier import SplitClassifier
from cafe_tta.digits_resnet import DigitsResNet
from cafe_tta.normalisation import batchnorm_layers

FORMAT_VERSION = 1
LIBRARIES = ("timm", "torchvision", "cafe")
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".tar")
_HOW_TO_NAME = "expected timm:NAME, torchvision:NAME, cafe:NAME, or the path of a safetensors file"

Rgb = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """How uint8 images become the network's input: size, then mean and standard deviation of each channel.

    >>> preprocessing = Preprocessing(size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    >>> preprocessing(np.zeros((2, 8, 8, 3), np.uint8)).shape
    torch.Size([2, 3, 32, 32])
    """

    size: int  # height and width of the input
    mean: Rgb  # of images divided by 255
    std: Rgb
    resize: int | None = None  # short side before the centre crop; None: resize to size×size, whatever the shape

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"expected `size` to be at least 1, but got {self.size}")
        if self.resize is not None and self.resize < self.size:
            raise ValueError(f"expected `resize` to be at least `size` ({self.size}) or None, but got {self.resize}")
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 3 or not all(map(math.isfinite, values)):
                raise ValueError(f"expected `{name}` to be three numbers, but got {getattr(self, name)}")
            object.__setattr__(self, name, values)
        if not all(0 <= value <= 1 for value in self.mean):
            raise ValueError(f"expected `mean` to be between 0 and 1 (of images divided by 255), but got {self.mean}")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"expected `std` to be above 0, but got {self.std}")

    def __call__(self, images: np.ndarray) -> Tensor:
        """uint8 images (N, H, W, 3) as float32 (N, 3, size, size). Images of size×size are only normalised."""
        if not isinstance(images, np.ndarray):
            raise TypeError(f"expected a numpy array of images, but got {type(images).__name__}")
        if images.dtype != np.uint8:
            raise TypeError(f"expected uint8 images (0 to 255), but got {images.dtype}")
        if images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape[1:]:
            raise ValueError(f"expected RGB images of shape (N, height, width, 3), but got {images.shape}")
        if images.shape[1:3] != (self.size, self.size):
            fitted = np.empty((len(images), self.size, self.size, 3), np.uint8)
            for number, image in enumerate(images):
                fitted[number] = self._fit(image)
            images = fitted
        prepared = np.empty((len(images), 3, self.size, self.size), np.float32)
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            np.multiply(images[..., channel], np.float32(1 / (255 * std)), out=prepared[:, channel])
            prepared[:, channel] -= np.float32(mean / std)
        return torch.from_numpy(prepared)

    def _fit(self, image: np.ndarray) -> np.ndarray:
        from PIL import Image  # here, not above: images that fit need no Pillow

        picture = Image.fromarray(np.ascontiguousarray(image))
        if self.resize is None:
            return np.asarray(picture.resize((self.size, self.size), Image.Resampling.BILINEAR))
        short = min(picture.size)
        if max(picture.size) > 8 * short:  # a strip would grow to gigabytes, of which only the middle is used
            (w, h), kept = picture.size, 8 * short
            left, top = max(0, (w - kept) // 2), max(0, (h - kept) // 2)
            picture = picture.crop((left, top, min(w, left + kept), min(h, top + kept)))
        width, height = (self.resize * side // short for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return np.asarray(picture.crop((left, top, left + self.size, top + self.size)))


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET = Preprocessing(224, IMAGENET_MEAN, IMAGENET_STD, resize=256)


@dataclass(frozen=True)
class LoadedModel:
    """A model with what is needed to use it."""

    model: nn.Module  # in evaluation mode
    architecture: str
    num_classes: int
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None = None  # their names, where the file knows them
    trained: bool = True  # False: the weights are random, because neither `weights` nor `pretrained` was asked for


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
    make = {"timm": _build_timm, "torchvision": _build_torchvision, "cafe": _build_cafe}[library]
    model = make(name, num_classes, pretrained, size)
    if pretrained and num_classes is not None and num_classes != (found := _num_classes(model, architecture)):
        raise ValueError(
            f"the pretrained weights of {architecture} tell {found} classes apart, but `num_classes` is {num_classes}; "
            "leave it out, or train a model of your own"
        )
    return model


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
) -> LoadedModel:
    """A model, ready to use, from its name or from a file.

    `spec` is timm:NAME, torchvision:NAME, cafe:NAME, or the path of a file that `save` made. A file of plain weights
    does not say what it is the weights of: give the name, and the file as `weights`. `size`, `mean` and `std` replace
    what the library or the file says about preprocessing; with a `size`, images are resized to it without a crop.
    With `new_head`, the weights of a file go into all but the last layer, which is new and has `num_classes` outputs:
    the beginning of training on other classes.
    """
    if new_head and (weights is None or num_classes is None):
        raise ValueError("expected `new_head` with `weights` of a named architecture and `num_classes`")
    if weights is not None and pretrained:
        raise ValueError("expected either `weights` or `pretrained`, but got both")
    if not _is_name(spec):
        if weights is not None or pretrained:
            raise ValueError(f"`weights` and `pretrained` go with the name of an architecture, but {spec} is a file")
        weights = spec
    name = str(spec) if weights is not spec else None
    tensors, meta = ({}, {}) if weights is None else _read(Path(weights))
    if name is None and not meta:
        raise ValueError(
            f"{weights} holds plain weights, which do not say what they are the weights of; "
            f"name the architecture too: --model timm:NAME --weights {weights}; "
            f'in Python: load("timm:NAME", weights="{weights}")'
        )
    if name is not None and meta and meta["architecture"] != name:
        raise ValueError(f"{weights} holds a {meta['architecture']}, but {name} was asked for")
    architecture = name or meta["architecture"]
    if meta and not new_head and num_classes not in (None, meta["num_classes"]):
        raise ValueError(f"{weights} tells {meta['num_classes']} classes apart, but `num_classes` is {num_classes}")

    saved = Preprocessing(**meta["preprocessing"]) if meta else None
    wanted = size or (saved.size if saved else None)
    model = build(architecture, num_classes or meta.get("num_classes"), pretrained, wanted)
    if weights is not None:
        found = _classes_in(tensors, model, _num_classes(model, architecture)) if num_classes is None else None
        if found is not None:
            model = build(architecture, found, size=wanted)
        if new_head:
            tensors = tensors | _head_tensors(model, architecture)
        _put_into(model, tensors, f"{weights}", architecture)
    preprocessing = _changed(saved or default_preprocessing(architecture, model), size, mean, std)
    classes = tuple(meta["classes"]) if meta.get("classes") and not new_head else None
    trained = weights is not None or pretrained
    return LoadedModel(model.eval(), architecture, _num_classes(model, architecture), preprocessing, classes, trained)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    architecture: str,
    preprocessing: Preprocessing,
    classes: Sequence[str] | None = None,
) -> int:
    """Writes a model, or a `SplitClassifier` made of one, to a file that `load` reads. Returns its size in bytes."""
    tensors = _plain_tensors(model)
    num_classes = model.num_classes if isinstance(model, SplitClassifier) else _num_classes(model, architecture)
    if classes is not None and len(classes) != num_classes:
        raise ValueError(f"expected the names of {num_classes} classes, but got {len(classes)}")
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers are not spent on a model that is thrown away
        twin = build(architecture, num_classes, size=preprocessing.size)
    _check_match(tensors, twin, "the model", architecture)  # a file that could not be loaded again is not worth writing
    meta = {
        "architecture": architecture,
        "num_classes": num_classes,
        "preprocessing": asdict(preprocessing),
        "classes": None if classes is None else list(classes),
    }
    return storage.write(path, "model", FORMAT_VERSION, tensors, meta)


def laid_out(model: nn.Module) -> nn.Module:
    """The model with its weights laid out channels-last: the same up to rounding, and faster on CPUs.

    It takes a tenth to a quarter off a step (docs/performance.md).
    """
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def default_preprocessing(architecture: str, model: nn.Module) -> Preprocessing:
    """What the library says about the images that a model wants."""
    library, name = _parse(architecture)
    if library == "timm":
        return _timm_preprocessing(model)
    if library == "torchvision":
        return _torchvision_preprocessing(name)
    return _CAFE[name][1]


# Names


def _is_name(spec: str | os.PathLike[str]) -> bool:
    """Whether a spec is the name of an architecture, not of a file."""
    if not isinstance(spec, str) or os.path.exists(spec):
        return False
    library = spec.partition(":")[0]
    if library in LIBRARIES and ":" in spec:
        return True
    if Path(spec).suffix.lower() in (".safetensors", *PICKLES):
        return False
    near = get_close_matches(library, LIBRARIES, n=1) if ":" in spec else []
    hint = f"; did you mean {near[0] + ':' + spec.partition(':')[2]!r}?" if near else ""
    raise ValueError(f"no model {spec!r}{hint}; {_HOW_TO_NAME}")


def _parse(architecture: str) -> tuple[str, str]:
    library, colon, name = architecture.partition(":")
    if not colon or library not in LIBRARIES:
        raise ValueError(f"no architecture {architecture!r}; expected timm:NAME, torchvision:NAME or cafe:NAME")
    return library, name


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
        raise ImportError('timm is not installed; install it with: pip install "cafe-tta[models]"') from error
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
    return _made(f"timm:{name}", pretrained, lambda: timm.create_model(name, pretrained=pretrained, **options))


def _timm_preprocessing(model: nn.Module) -> Preprocessing:
    config: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    size = int(config.get("input_size", (3, 224, 224))[-1])
    squashed = config.get("crop_mode") == "squash"
    resize = None if squashed else math.floor(size / config.get("crop_pct", 0.875))
    return Preprocessing(size, config.get("mean", IMAGENET_MEAN), config.get("std", IMAGENET_STD), resize)


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
        options["init_weights"] = False  # theirs takes a minute, and not to choose is deprecated
    if num_classes is not None and not pretrained:
        options["num_classes"] = num_classes
    weights = _torchvision_weights(name) if pretrained else None
    return _made(
        f"torchvision:{name}", pretrained, lambda: torchvision.models.get_model(name, weights=weights, **options)
    )


def _torchvision_weights(name: str) -> Any:
    """The first weights of a model: the paper's ResNet-50 is IMAGENET1K_V1, not torchvision's newer default."""
    return next(iter(import_torchvision().models.get_model_weights(name)))


def _torchvision_preprocessing(name: str) -> Preprocessing:
    told = _torchvision_weights(name).transforms.keywords
    size, resize = told.get("crop_size", IMAGENET.size), told.get("resize_size", IMAGENET.resize)
    return Preprocessing(size, told.get("mean", IMAGENET_MEAN), told.get("std", IMAGENET_STD), resize)


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


_CAFE: dict[str, tuple[Callable[[int], nn.Module], Preprocessing, int]] = {  # how to make it, its images, its classes
    "digits-resnet": (DigitsResNet, Preprocessing(32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), 10),
    "resnet50-v1": (
        _resnet50_v1,
        replace(IMAGENET, mean=(123.68 / 255, 116.779 / 255, 103.939 / 255)),  # Keras subtracts these means
        1000,
    ),
}


def _build_cafe(name: str, num_classes: int | None, pretrained: bool, size: int | None) -> nn.Module:
    if name not in _CAFE:
        raise _unknown("cafe", name, list(_CAFE))
    if pretrained:
        raise ValueError(f"cafe:{name} has no weights to download; give a safetensors file as `weights`")
    make, _, classes = _CAFE[name]
    return make(classes if num_classes is None else num_classes)


def _made(architecture: str, pretrained: bool, make: Callable[[], nn.Module]) -> nn.Module:
    """Makes a model; whatever stops a download is told in one sentence."""
    if not pretrained:
        return make()
    try:
        return make()
    except Exception as error:  # each library, and each transport below it, fails in ways of its own
        reason = str(error).strip().partition("\n")[0] or "no reason given"
        raise RuntimeError(
            f"the pretrained weights of {architecture} could not be had ({type(error).__name__}: {reason}); "
            "look at the internet connection, or get the weights elsewhere and give a safetensors file as `weights`"
        ) from error


# Weights


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a safetensors file; and what `save` wrote about them, or nothing where the weights are plain."""
    if path.suffix.lower() in PICKLES:
        raise ValueError(
            f"{path} looks like a pickle, and loading a pickle can execute code; only safetensors files are read. "
            "Convert a state dict that you trust, once: import torch, safetensors.torch; "
            f'safetensors.torch.save_file(torch.load("{path.name}", weights_only=True), "{path.stem}.safetensors"). '
            "A whole model that was pickled must be saved as a state dict first, where its code is: "
            f'torch.save(model.state_dict(), "{path.name}")'
        )
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}; expected a safetensors file with a model's weights")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            if storage.HEADER not in (file.metadata() or {}):
                return {name: file.get_tensor(name) for name in file.keys()}, {}  # noqa: SIM118 - not a dict
    except safetensors.SafetensorError as error:
        raise storage.StorageError(f"{path} is not a whole safetensors file ({error})") from error
    return storage.read(path, "model", FORMAT_VERSION)


def _put_into(model: nn.Module, tensors: Mapping[str, Tensor], what: str, architecture: str) -> None:
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


def _head(model: nn.Module) -> tuple[str, nn.Linear] | None:
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return layers[-1] if layers else None


def _head_tensors(model: nn.Module, architecture: str) -> dict[str, Tensor]:
    head = _head(model)
    if head is None:
        raise ValueError(f"{architecture} ends in no linear layer that a new one could replace")
    return {f"{head[0]}.{name}": tensor.clone() for name, tensor in head[1].state_dict().items()}


def _classes_in(tensors: Mapping[str, Tensor], model: nn.Module, num_classes: int) -> int | None:
    """How many classes the head has in a file of weights, where it can be found there and has not `num_classes`."""
    head = _head(model)
    if head is None or head[1].out_features != num_classes:  # the last linear layer is not the head
        return None
    weight = tensors.get(f"{head[0]}.weight")
    return None if weight is None or weight.dim() != 2 or len(weight) == num_classes else len(weight)


def _num_classes(model: nn.Module, architecture: str) -> int:
    head = _head(model)
    told = getattr(model, "num_classes", None)
    number = told if isinstance(told, int) else head[1].out_features if head else 0
    if number < 1:
        raise ValueError(f"{architecture} has no head that tells classes apart; give `num_classes`")
    return number


def _changed(preprocessing: Preprocessing, size: int | None, mean: Rgb | None, std: Rgb | None) -> Preprocessing:
    if size is not None and size != preprocessing.size:
        preprocessing = replace(preprocessing, size=size, resize=None)
    return replace(preprocessing, mean=mean or preprocessing.mean, std=std or preprocessing.std)
