"""A classifier in two parts: the backbone that makes features, and the linear head that reads them (f = h ∘ g)."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cafe_tta.distributed import RankError
from cafe_tta.storage import tensor_digest


class SplitClassifier(nn.Module):
    """A classifier f = h ∘ g as its two parts: `backbone` (g) makes features, `head` (h) turns them into logits.

    >>> classifier = SplitClassifier(nn.Flatten(), nn.Linear(12, 3))
    >>> features, logits = classifier.features_and_logits(torch.zeros(2, 3, 2, 2))
    >>> features.shape, logits.shape
    (torch.Size([2, 12]), torch.Size([2, 3]))
    """

    backbone: nn.Module
    head: nn.Linear
    feature_layer: str  # the head's name in the original model

    def __init__(self, backbone: nn.Module, head: nn.Linear, feature_layer: str = "head") -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.feature_layer = feature_layer

    def forward(self, images: Tensor) -> Tensor:
        return self.features_and_logits(images)[1]

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, D) and logits (B, C) of images."""
        features = self.backbone(images)  # (B, D)
        if not isinstance(features, Tensor) or features.dim() != 2 or features.shape[1] != self.num_features:
            got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ValueError(
                f"expected the backbone to give features of shape (batch, {self.num_features}) to "
                f"`{self.feature_layer}`, but got {got}; "
                "name the layer that makes the logits: split_classifier(model, head=...)"
            )
        return features, self.head(features)

    @property
    def num_features(self) -> int:
        return self.head.in_features

    @property
    def num_classes(self) -> int:
        return self.head.out_features

    def whole(self) -> nn.Module:
        """The model that was split, of its own class, with its head in place: a copy of its own."""
        if not isinstance(self.backbone, _Headless):
            return copy.deepcopy(nn.Sequential(self.backbone, self.head))
        model = copy.deepcopy(self.backbone.model)
        model.set_submodule(self.feature_layer, copy.deepcopy(self.head))
        return model

    def fingerprint(self) -> dict[str, str]:
        """A short hash of every weight and running statistic, by name."""
        tensors = {**self.state_dict()}
        return {name: tensor_digest(t) for name, t in tensors.items() if not name.endswith("num_batches_tracked")}

    def identity(self) -> dict[str, Any]:
        """What saved files keep to recognise this classifier: see `describe_difference`."""
        return {"feature_layer": self.feature_layer, "weights": self.fingerprint()}

    def num_bytes(self) -> int:
        """The memory that its parameters and buffers take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state_dict().values())


class _HeadStub(nn.Module):
    """Takes the head's position in the model, and returns what the head would have received."""

    def __init__(self, head: nn.Linear, convolution: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = head.in_features, head.out_features
        self.convolution = convolution  # then it receives a feature map, and the model averages it
        self.received: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        self.received = features
        return features


class _Headless(nn.Module):
    """A model without its head. Refuses a model that processes its logits any further."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, images: Tensor) -> Tensor:
        stub = self.model.get_submodule(self.name)
        assert isinstance(stub, _HeadStub)
        stub.received = None
        returned: Any = None
        try:
            returned = self.model(images)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if stub.received is None:
                raise
            raise ValueError(self._explain(images, returned)) from error  # it expected logits
        received, stub.received = stub.received, None  # keep no activations between calls
        if received is None:
            raise ValueError(
                f"the model never used `{self.name}`; name the layer that makes the logits: "
                f"split_classifier(model, head=...)"
            )
        logits = logits_of(returned)
        if logits is not None and stub.convolution and logits.shape == received.shape[:2]:
            return logits
        same = logits is not None and logits.shape == received.shape
        if logits is None or not (same and (logits is received or logits.data_ptr() == received.data_ptr())):
            raise ValueError(self._explain(images, returned))
        return received

    def _explain(self, images: Tensor, returned: Any) -> str:
        """What the model does with the logits instead of returning them, and what can be done about it."""
        if getattr(self.model.get_submodule(self.name), "convolution", False):
            return _NOT_LINEAR.format(name=self.name)
        after = self._after_head(images)
        others = [name for name in _linear_names(self.model) if self._twin(name)]
        if after:
            does = f"it goes on with {', '.join(after)}"
        elif others:
            does = f"it combines that with the output of `{others[-1]}` (a second head?)"
        elif returned is not None and logits_of(returned) is None:
            does = f"it returns a {type(returned).__name__} without `logits`"
        else:
            does = "its `forward` computes something else from that (a softmax?)"
        return (
            f"expected the model to return what `{self.name}` makes, but {does}; remove that, or wrap the model "
            "so that it returns the logits of one linear layer"
        )

    def _twin(self, name: str) -> bool:
        head, layer = self.model.get_submodule(self.name), self.model.get_submodule(name)
        return layer.out_features == getattr(head, "out_features", None)

    def _after_head(self, images: Tensor) -> list[str]:
        """The layers that run after the head."""
        ran: list[str] = []
        layers = {name: layer for name, layer in self.model.named_modules() if not any(layer.children())}
        handles = [
            layer.register_forward_pre_hook(lambda *_, name=name: ran.append(name)) for name, layer in layers.items()
        ]
        try:
            with suppress(Exception):  # it may fail as it did before
                self.model(images)
        finally:
            for handle in handles:
                handle.remove()
        position = ran.index(self.name) if self.name in ran else len(ran)
        return [f"`{name}` ({type(layers[name]).__name__})" for name in ran[position + 1 :]]


def logits_of(returned: Any) -> Tensor | None:
    """The logits in what a model returns: a tensor, `.logits`, ["logits"], or the first entry of a tuple.

    >>> logits_of({"logits": torch.zeros(2, 3), "loss": None}).shape
    torch.Size([2, 3])
    """
    if isinstance(returned, Mapping):
        returned = returned.get("logits")
    elif isinstance(getattr(returned, "logits", None), Tensor):
        returned = returned.logits
    elif isinstance(returned, (tuple, list)) and returned:
        returned = returned[0]
    return returned if isinstance(returned, Tensor) else None


def split_classifier(model: nn.Module, head: str | None = None) -> SplitClassifier:
    """Splits a classifier in front of its last linear layer, or of the one called `head`.

    The model is copied; the one you pass stays as it is. It may return logits, or an object, a dictionary or a tuple
    with them; a 1×1 convolution whose output is averaged counts as a linear layer. Where noise can be made that the
    model takes for images, the split is checked with it: a model that does more with its logits is refused.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
    >>> classifier = split_classifier(model)
    >>> classifier.feature_layer, classifier.num_features, classifier.num_classes
    ('3', 5, 3)
    """
    if isinstance(model, SplitClassifier):
        return model
    _check_model(model)
    name = _find_head(model) if head is None else head
    layer = _submodule(model, name)
    if not isinstance(layer, nn.Linear) and not _is_pointwise(layer):
        linear = ", ".join(_linear_names(model)[-5:]) or "none"
        raise ValueError(
            f"expected `{name}` to be a linear layer, but it is {type(layer).__name__}; "
            f"linear layers of this model: {linear}"
        )
    if name == "":
        raise ValueError("expected a model with layers before its linear head, but got a single linear layer")
    with torch.inference_mode(False):  # a copy made inside inference mode could never be trained
        try:
            model = copy.deepcopy(model)
        except RuntimeError as error:
            raise ValueError(f"the model cannot be copied ({error}); pass it before wrapping or calling it") from error
        probe = _probe(model)
        convolution = not isinstance(layer, nn.Linear)
        head_layer = _as_linear(model.get_submodule(name))
        model.set_submodule(name, _HeadStub(head_layer, convolution))
        classifier = SplitClassifier(_Headless(model, name), head_layer, feature_layer=name)
        for module in (classifier, classifier.backbone, model.get_submodule(name)):
            module.training = model.training  # the new modules are in the mode of the model they came from
        _check_split(classifier, probe, convolution)
        return classifier


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "expected an ordinary nn.Module, but got a TorchScript model, whose head cannot be taken off; "
            "pass the module that it was made from"
        )
    tensors = [*model.parameters(), *model.buffers()]
    if any(is_lazy(tensor) for tensor in tensors):
        raise ValueError("the model has lazy layers without weights yet; call it once with a batch of images first")
    if meta := sum(tensor.is_meta for tensor in tensors):
        raise ValueError(
            f"{meta} of the model's {len(tensors)} tensors are on the meta device, without values; "
            "load its weights onto a real device first"
        )


def _linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


@contextmanager
def reading(images: Tensor) -> Iterator[None]:
    """Around a forward pass: what a network raises for images that it cannot read becomes a ValueError that says so.

    >>> with reading(torch.zeros(3, 32, 32)):
    ...     raise RuntimeError("expected 4D input")
    Traceback (most recent call last):
    ValueError: the classifier cannot read images of shape (3, 32, 32): expected 4D input; is it one image? Pass
    image[None]
    """
    try:
        yield
    except (torch.OutOfMemoryError, RankError):
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        hint = "; is it one image? Pass image[None]" if images.dim() == 3 else ""
        raise ValueError(f"the classifier cannot read images of shape {tuple(images.shape)}: {error}{hint}") from error


def _is_pointwise(layer: nn.Module) -> bool:
    """Whether a layer is a 1×1 convolution: a linear layer for every pixel."""
    if not isinstance(layer, nn.Conv2d):
        return False
    return layer.groups == 1 and layer.kernel_size == layer.stride == (1, 1) and layer.padding in ((0, 0), "valid")


def _find_head(model: nn.Module) -> str:
    """The last linear layer; where there is none, the last convolution, if it is 1×1."""
    if names := _linear_names(model):
        return names[-1]
    convolutions = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)]
    if convolutions and _is_pointwise(convolutions[-1][1]):
        return convolutions[-1][0]
    raise ValueError(
        f"expected a classifier with a linear head (torch.nn.Linear), but {type(model).__name__} has none; "
        "cafe-tta reads the features that a linear head receives: make the last layer one, and pass the model "
        "before it is quantised"
    )


def _as_linear(layer: nn.Module) -> nn.Linear:
    if isinstance(layer, nn.Linear):
        return layer
    assert isinstance(layer, nn.Conv2d)
    weight, bias = layer.weight, layer.bias
    linear = nn.Linear(layer.in_channels, layer.out_channels, bias is not None, weight.device, weight.dtype)
    linear.weight = nn.Parameter(weight.detach().flatten(1).clone(), weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return linear.train(layer.training)


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        linear = ", ".join(_linear_names(model)[-5:]) or "none"
        raise ValueError(f"the model has no layer `{name}`; linear layers of this model: {linear}") from error


# A check of the split: does the model answer noise as it did before?

_SIDES = (64, 224, 32, 28, 128, 299)  # of images that models are made for; most take any


def _probe(model: nn.Module) -> tuple[Tensor, Any] | None:
    """Noise that the model takes for images, and what it returns; None where none is found."""
    if any(hasattr(layer, "_orig_mod") for layer in model.modules()):
        return None  # torch.compile would compile it for this noise alone, in minutes
    first = next((layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))), None)
    shapes: list[tuple[int, ...]]
    if isinstance(first, nn.Linear):
        shapes = [(2, first.in_features)]
    elif isinstance(first, nn.Conv2d):
        shapes = [(2, first.in_channels, side, side) for side in _SIDES]
    else:
        return None
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        noise = torch.randn(shape, generator=generator).to(first.weight)
        with suppress(Exception):  # it takes other images
            return noise, _answer(model, noise)
    return None


def _answer(model: nn.Module, images: Tensor) -> Any:
    """What a model returns in evaluation mode, always with the same random numbers, which are put back."""
    devices = [images.device] if images.device.type == "cuda" else []
    with torch.no_grad(), evaluating(model), torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return model(images)


def _check_split(classifier: SplitClassifier, probe: tuple[Tensor, Any] | None, convolution: bool) -> None:
    name = classifier.feature_layer
    if probe is not None:
        images, returned = probe
        answer, expected = _answer(classifier, images), logits_of(returned)
        if expected is not None and answer.shape == expected.shape:
            difference = (answer - expected).abs().max()
            if difference <= 0.01 * expected.abs().max() or not torch.isfinite(difference):
                return
        elif expected is None:
            return
        raise ValueError(_NOT_LINEAR.format(name=name) if convolution else _NOT_THE_SAME.format(name=name))
    if convolution:
        raise ValueError(_NOT_LINEAR.format(name=name))


_NOT_THE_SAME = (
    "the model's answers are not those of its linear layer `{name}`; name the layer that makes the logits: "
    "split_classifier(model, head=...), or wrap the model so that it returns the logits of one linear layer"
)
_NOT_LINEAR = (
    "the model ends in a convolution, `{name}`, and does more with its output than average it (a ReLU?), so that it "
    "has no linear head; replace its end by an average pool and a torch.nn.Linear, and train that"
)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every submodule has its own mode again."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode


# Identity: does a saved file belong to a classifier?


def require_classifier(classifier: object) -> None:
    """Raises where `classifier` is not a `SplitClassifier`."""
    if not isinstance(classifier, SplitClassifier):
        raise TypeError(
            f"expected a SplitClassifier, but got {type(classifier).__name__}; "
            "make one with cafe_tta.split_classifier(model)"
        )


def require_match(what: str, num_features: int, identity: Mapping[str, Any], classifier: SplitClassifier) -> None:
    """Raises where source values of `identity` were not computed with this classifier, and says what differs."""
    require_classifier(classifier)
    if num_features != classifier.num_features:
        raise ValueError(
            f"the {what} have {num_features} features, but the classifier's `{classifier.feature_layer}` receives "
            f"{classifier.num_features}; make them with this classifier"
        )
    if difference := describe_difference(identity, classifier.identity()) if identity.get("weights") else "":
        raise ValueError(f"the {what} do not belong to this classifier: {difference}; make them with this classifier")


def describe_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """How two identities of classifiers differ, in words; empty where they do not."""
    if theirs.get("feature_layer") != ours.get("feature_layer"):
        return f"feature layer `{theirs.get('feature_layer')}` there, `{ours.get('feature_layer')}` here"
    a, b = theirs.get("weights") or {}, ours.get("weights") or {}
    names = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    if not names:
        return ""
    return f"{len(names)} of {len(a.keys() | b.keys())} tensors differ, the first is `{names[0]}`"
