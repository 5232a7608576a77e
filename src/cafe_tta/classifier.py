"""A classifier in two parts: the backbone that makes features, and the linear head that reads them (f = h ∘ g)."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cafe_tta.storage import tensor_digest


class SplitClassifier(nn.Module):
    """A classifier f = h ∘ g with its two parts in hand: `backbone` (g) and `head` (h)."""

    backbone: nn.Module
    head: nn.Linear
    feature_layer: str  # the name that the head has in the model it came from

    def __init__(self, backbone: nn.Module, head: nn.Linear, feature_layer: str = "head") -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.feature_layer = feature_layer

    def forward(self, images: Tensor) -> Tensor:
        return self.features_and_logits(images)[1]

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(images)  # (B, D)
        if not isinstance(features, Tensor) or features.dim() != 2 or features.shape[1] != self.num_features:
            found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ValueError(
                f"expected the backbone to give features of shape (batch, {self.num_features}) to "
                f"`{self.feature_layer}`, but got {found}; "
                "name the layer that makes the logits: split_classifier(model, head=...)"
            )
        return features, self.head(features)

    @property
    def num_features(self) -> int:
        return self.head.in_features

    @property
    def num_classes(self) -> int:
        return self.head.out_features

    def fingerprint(self) -> dict[str, str]:
        """A short hash of every weight and statistic: what says whether two classifiers are the same."""
        tensors = {**self.state_dict()}
        return {name: tensor_digest(t) for name, t in tensors.items() if not name.endswith("num_batches_tracked")}

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state_dict().values())


class _HeadPlace(nn.Module):
    """Stands where the head was, and hands on what the head would have received."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = head.in_features, head.out_features
        self.received: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        self.received = features
        return features


class _Headless(nn.Module):
    """A model without its head. Notices when the model does more to its logits than return them."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, images: Tensor) -> Tensor:
        place = self.model.get_submodule(self.name)
        assert isinstance(place, _HeadPlace)
        place.received = None
        returned = self.model(images)
        received, place.received = place.received, None  # keep no activations between calls
        if received is None:
            raise ValueError(
                f"the model never used `{self.name}`; name the layer that makes the logits: "
                f"split_classifier(model, head=...)"
            )
        same = isinstance(returned, Tensor) and returned.shape == received.shape
        if not (same and (returned is received or returned.data_ptr() == received.data_ptr())):
            kind = (
                f"a tensor of shape {tuple(returned.shape)}"
                if isinstance(returned, Tensor)
                else type(returned).__name__
            )
            raise ValueError(
                f"expected the model to return what `{self.name}` makes, but it goes on from there and returns {kind}; "
                "remove what follows the linear head (a softmax?), or wrap the model so that it returns logits"
            )
        return received


def split_classifier(model: nn.Module, head: str | None = None) -> SplitClassifier:
    """Splits a classifier in front of its last linear layer, or of the one called `head`.

    The model is copied; the one you pass stays as it is.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
    >>> classifier = split_classifier(model)
    >>> classifier.feature_layer, classifier.num_features, classifier.num_classes
    ('3', 5, 3)
    """
    if isinstance(model, SplitClassifier):
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("expected an ordinary nn.Module, but got a TorchScript model, whose head cannot be taken off")
    name = _last_linear(model) if head is None else head
    layer = _submodule(model, name)
    if not isinstance(layer, nn.Linear):
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
        head_layer = model.get_submodule(name)
        assert isinstance(head_layer, nn.Linear)
        model.set_submodule(name, _HeadPlace(head_layer))
        classifier = SplitClassifier(_Headless(model, name), head_layer, feature_layer=name)
        for module in (classifier, classifier.backbone, model.get_submodule(name)):
            module.training = model.training  # the new modules are in the mode of the model they came from
        return classifier


def _linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _last_linear(model: nn.Module) -> str:
    names = _linear_names(model)
    if not names:
        raise ValueError(
            f"expected a classifier with a linear head (torch.nn.Linear), but {type(model).__name__} has none; "
            "cafe-tta reads the features that a linear head receives"
        )
    return names[-1]


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        linear = ", ".join(_linear_names(model)[-5:]) or "none"
        raise ValueError(f"the model has no layer `{name}`; linear layers of this model: {linear}") from error


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every submodule gets its own mode back."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode
