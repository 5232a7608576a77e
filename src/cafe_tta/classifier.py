"""A classifier in two parts: the backbone that makes features, and the linear head that reads them (f = h ∘ g)."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state_dict().values())


class _HeadStub(nn.Module):
    """Takes the head's position in the model, and returns what the head would have received."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = head.in_features, head.out_features
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
        returned = self.model(images)
        received, stub.received = stub.received, None  # keep no activations between calls
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
        model.set_submodule(name, _HeadStub(head_layer))
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
