"""The adapter: a classifier that adapts while it answers. `adapter(images)` and `adapter.reset()` are all of it."""

import copy
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from cafe_tta import storage
from cafe_tta.classifier import SplitClassifier
from cafe_tta.normalisation import NORMALISATIONS, Normalisation, Normaliser, norm_parameters
from cafe_tta.stats import classifier_meta, describe_difference, require_classifier

STATE_VERSION = 1
Answer = Literal["before", "after", "after-eval"]
ANSWERS = ("before", "after", "after-eval")
BATCHNORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
LARGEST_GRADIENT = 1e15  # a step along a larger one leaves weights that overflow in the next pass
_HOW_TO_GET = {
    "stats": "make them with FeatureStats.fit(classifier, source_loader).group()",
    "histograms": "make them with SourceHistograms.fit(classifier, source_loader)",
    "posterior": "collect one while training, with SWAG",
    "data": "pass a loader of (images, labels)",
}


class StepRefused(UserWarning):
    """A step was not taken, because its loss or gradient was not finite. The weights stayed as they were."""


@dataclass(frozen=True)
class AdapterConfig:
    """What every method has."""

    batch_size: int = 256  # images a batch: what loaders and benchmarks deal out; any other size works too

    def __post_init__(self) -> None:
        _require(self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)


@dataclass(frozen=True)
class StepConfig(AdapterConfig):
    """What every method with gradients has."""

    lr: float = 1e-3  # Sec. 5.2
    momentum: float = 0.8  # Sec. 5.2
    optimizer: Literal["sgd", "adam"] = "sgd"
    parameters: Literal["all", "norm"] = "all"  # of the backbone: all, or the normalisation layers' weight and bias
    normalisation: Normalisation = "batch"  # what BatchNorm normalises with while adapting; the paper: batch
    blend: float = 0.5  # weight of the batch's statistics, for normalisation="blend"
    answer: Answer = "before"  # logits of the pass that made the loss; of a second pass; of one in evaluation mode
    min_batch: int = 2  # a smaller batch is answered in evaluation mode where BatchNorm would normalise with it
    adapt_from: str | None = (
        None  # name of a module of the model: what comes before it stays, and costs no backward pass
    )
    every: int = 1  # a step on each n-th batch only; every batch is answered

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.lr < math.inf, "lr", "at least 0 and finite", self.lr)
        _require(0 <= self.momentum < 1, "momentum", "at least 0 and below 1", self.momentum)
        _choose(self.optimizer, "optimizer", ("sgd", "adam"))
        _choose(self.parameters, "parameters", ("all", "norm"))
        _choose(self.normalisation, "normalisation", NORMALISATIONS)
        _require(0 <= self.blend <= 1, "blend", "between 0 and 1", self.blend)
        _choose(self.answer, "answer", ANSWERS)
        _require(self.min_batch >= 1, "min_batch", "at least 1", self.min_batch)
        _require(self.every >= 1, "every", "at least 1", self.every)


@dataclass(frozen=True)
class Report:
    """What happened to a batch."""

    images: int
    stepped: bool  # whether the weights moved
    refused: bool = False  # a step was tried, and was not finite
    reason: str = ""  # why no step was taken
    loss: float | None = None
    notes: Mapping[str, float] = field(default_factory=dict)  # parts of the loss, and what was done to compute it


@dataclass
class Counters:
    """What happened since the last reset."""

    batches: int = 0
    images: int = 0
    steps: int = 0
    refused: int = 0  # steps whose loss or gradient was not finite


def parameters_from(backbone: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters of a module, named as in the user's model, and of all that were defined after it."""
    modules = [module for module, _ in backbone.named_modules()]
    found = [module for module in modules if module == name or module.removeprefix("model.") == name]
    if not found:
        known = dict.fromkeys(module.removeprefix("model.").split(".")[0] for module in modules if module != "model")
        parts = ", ".join(filter(None, known))
        raise ValueError(f"expected `adapt_from` to name a module of the model, but got {name!r}; its parts: {parts}")
    own = list(backbone.get_submodule(found[0]).parameters())
    if not own:
        raise ValueError(f"expected `adapt_from` to name a module with parameters, but {name!r} has none")
    every = list(backbone.parameters())
    start = next(i for i, parameter in enumerate(every) if parameter is own[0])
    return every[start:]


def _require(good: bool, name: str, expected: str, value: object) -> None:
    if not good:
        raise ValueError(f"expected `{name}` to be {expected}, but got {value!r}")


def _choose(value: object, name: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, name, f"one of {', '.join(map(repr, allowed))}", value)


class Adapter(nn.Module):
    """A copy of a classifier that adapts to the images it is shown. Subclasses are the methods."""

    name: ClassVar[str]
    needs: ClassVar[str | None] = None  # of the source domain: None | "stats" | "histograms" | "posterior" | "data"
    Config: ClassVar[type[AdapterConfig]] = AdapterConfig
    presets: ClassVar[Mapping[str, AdapterConfig]] = {}

    classifier: SplitClassifier
    normaliser: Normaliser
    counters: Counters
    report: Report | None  # of the last batch

    def __init__(self, classifier: SplitClassifier, source: Any = None, config: Any = None) -> None:
        super().__init__()
        require_classifier(classifier)
        self.config = self.Config() if config is None else config
        if not isinstance(self.config, self.Config):
            raise TypeError(f"expected a {self.Config.__name__}, but got {type(self.config).__name__}")
        if self.needs is not None and source is None:
            raise ValueError(
                f"{self.name} needs {self.needs} of the source domain, but got none; {_HOW_TO_GET[self.needs]}"
            )
        with torch.inference_mode(False):  # a copy made inside inference mode could never be trained
            self._classifier_meta = classifier_meta(classifier)
            self.classifier = copy.deepcopy(classifier).requires_grad_(False)
            self.prepare(source)
            # Kept as they are, whatever device and precision the adapter moves to: reset is exact.
            self._source_state = {name: tensor.detach().clone() for name, tensor in self.changing().items()}
        self.reset()

    # What a method says of itself

    def prepare(self, source: Any) -> None:
        """Checks and keeps what the method needs of the source domain, and sets the classifier up. Called once."""
        self.normaliser = Normaliser(self.classifier, "source")

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        """Adapts to a good batch and answers it."""
        raise NotImplementedError

    def wants_more(self) -> bool:
        """Whether an offline run goes on to another pass over its images. Test-time adaptation is content with one."""
        return False

    def changing(self) -> dict[str, Tensor]:
        """Every tensor of the classifier that adapting may change."""
        tensors: dict[str, Tensor] = {n: p for n, p in self.classifier.named_parameters() if p.requires_grad}
        if self.normaliser.uses_batch:
            tensors |= {n: b for n, b in self.classifier.named_buffers() if n.rpartition(".")[2] in BATCHNORM_BUFFERS}
        return tensors

    # What everybody uses

    def forward(self, images: Tensor) -> Tensor:
        """Adapts to a batch of images and returns its logits. A bad batch raises, and changes nothing."""
        self._check(images)
        # Callers sit in no_grad() or inference_mode(): they only want predictions.
        with torch.inference_mode(False), torch.enable_grad():
            images = images.clone() if images.is_inference() else images.detach()
            logits, report = self.answer_or_leave(images)
        if report.refused:
            warnings.warn(f"{self.name} took no step on this batch: {report.reason}", StepRefused, stacklevel=3)
        self.report = report
        self.counters.batches += 1
        self.counters.images += len(images)
        self.counters.steps += report.stepped
        self.counters.refused += report.refused
        return logits.detach()

    def answer_or_leave(self, images: Tensor) -> tuple[Tensor, Report]:
        """Answers; where that fails or a step is refused, everything is left as it was."""
        kept = self._keep()
        try:
            logits, report = self.answer(images)
        except BaseException:
            self._put_back(kept)
            raise
        if report.refused:
            self._put_back(kept)
        return logits, report

    def predict(self, images: Tensor) -> Tensor:
        """Logits of the classifier as it is now, in evaluation mode; nothing adapts."""
        return self.features_and_logits(images)[1]

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits of the classifier as it is now, in evaluation mode; nothing adapts."""
        self._check(images)
        with torch.no_grad():
            self.normaliser.evaluating()
            return self.run(images)

    def reset(self) -> None:
        """Forgets every image: bit for bit the source classifier again."""
        with torch.no_grad():
            for name, tensor in self.changing().items():
                tensor.copy_(self._source_state[name])
        self.counters = Counters()
        self.report = None

    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes all that adapting changed to a safetensors file, atomically. Returns its size in bytes."""
        return storage.write(path, "adapter-state", STATE_VERSION, self.state(), self._state_meta())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Goes on exactly where `save` left off. A state of another method, classifier or options is refused whole."""
        tensors, theirs = storage.read(path, "adapter-state", STATE_VERSION)
        ours = self._state_meta()
        if theirs["method"] != ours["method"]:
            raise ValueError(f"{path} is a state of {theirs['method']!r}, but this adapter is {ours['method']!r}")
        if difference := describe_difference(theirs["classifier"], ours["classifier"]):
            raise ValueError(f"{path} does not belong to this classifier: {difference}")
        a, b = theirs["config"], ours["config"]
        if names := sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key)):
            shown = ", ".join(f"{name}={a.get(name)!r} there, {b.get(name)!r} here" for name in names)
            raise ValueError(f"{path} was saved with other options: {shown}")
        self.check_state(tensors)
        self.set_state(tensors)
        self.counters = Counters(**theirs["counters"])
        self.report = None

    def train(self, mode: bool = True) -> Self:
        """Changes nothing: the method itself knows which layers are in training mode, and when."""
        self.training = mode
        return self

    def extra_repr(self) -> str:
        return f"{self.name}, {self.config}"

    # State

    def state(self) -> dict[str, Tensor]:
        """All tensors that adapting changes: of the classifier, and the adapter's own buffers."""
        own = {f"adapter.{name}": buffer for name, buffer in self._own_buffers().items()}
        return {f"classifier.{name}": tensor for name, tensor in self.changing().items()} | own

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuses tensors that are not a whole state, before anything is changed."""
        for name, tensor in self.changing().items():
            found = tensors.get(f"classifier.{name}")
            if found is None or found.shape != tensor.shape:
                raise ValueError(f"the state has no `{name}` of shape {tuple(tensor.shape)}")
        for name in self._own_buffers():  # these may grow: any shape will do
            if f"adapter.{name}" not in tensors:
                raise ValueError(f"the state has no `{name}`")

    def set_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the tensors that `state` gave."""
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in self.changing().items():
                tensor.copy_(tensors[f"classifier.{name}"])
            for name, buffer in self._own_buffers().items():
                setattr(self, name, tensors[f"adapter.{name}"].to(buffer))  # may have grown: takes the saved shape

    def _own_buffers(self) -> dict[str, Tensor]:
        """What the method itself remembers of the stream. Constants are kept in buffers that are not persistent."""
        constant = self._non_persistent_buffers_set
        return {name: b for name, b in self.named_buffers(recurse=False) if name not in constant}

    def _state_meta(self) -> dict[str, Any]:
        config, counters = asdict(self.config), asdict(self.counters)
        return {"method": self.name, "config": config, "classifier": self._classifier_meta, "counters": counters}

    def _keep(self) -> Any:
        """What a pass may change before it is known to be good: statistics and own buffers; not the weights."""
        statistics = [(t, t.clone()) for t in self.changing().values() if not t.requires_grad]
        return statistics, self._own_buffers()

    def _put_back(self, kept: Any) -> None:
        with torch.no_grad():
            for tensor, value in kept[0]:
                tensor.copy_(value)
        for name, buffer in kept[1].items():
            setattr(self, name, buffer)

    # Guards

    def unusable(self, features: Tensor) -> str:
        """Why nothing may be learnt from a pass; empty where all is well."""
        if not torch.isfinite(features).all():
            return "its features are NaN or infinite"
        return "" if self.normaliser.statistics_are_finite() else "its BatchNorm statistics overflow"

    def _check(self, images: Any) -> None:
        """Refuses what is not a batch of finite images of the classifier's kind."""
        if not isinstance(images, Tensor):
            raise TypeError(f"expected a tensor of images, but got {type(images).__name__}")
        place = self.classifier.head.weight
        if images.dtype != place.dtype:
            cure = f"call .to({place.dtype})" if images.is_floating_point() else "divide by 255 and normalise"
            raise TypeError(
                f"expected images of {place.dtype}, like the classifier, but got {images.dtype}; {cure} first"
            )
        if images.device != place.device:
            raise ValueError(f"expected images on {place.device}, like the classifier, but got {images.device}")
        if images.dim() < 2 or not images.numel():
            raise ValueError(f"expected a batch of at least one image, but got shape {tuple(images.shape)}")
        if not torch.isfinite(images).all():
            bad = [i for i, image in enumerate(images) if not torch.isfinite(image).all()]
            raise ValueError(f"expected finite images, but images {bad[:10]} of the batch have NaN or infinite values")

    def run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, D) and logits (B, C). What the classifier cannot read is the caller's mistake, and said so."""
        try:
            return self.classifier.features_and_logits(images)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(f"the classifier cannot read images of shape {tuple(images.shape)}: {error}") from error


class GradientAdapter(Adapter):
    """A method that takes a gradient step on each batch. A subclass is its `loss`."""

    Config: ClassVar[type[AdapterConfig]] = StepConfig
    config: StepConfig
    optimizer: torch.optim.Optimizer
    notes: dict[str, float]  # what `loss` wants to have reported

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        """What a step makes smaller: a scalar."""
        raise NotImplementedError

    def moving(self) -> list[nn.Parameter]:
        """What a step moves: parameters of the backbone; the head is fixed (Sec. 4.1)."""
        backbone = self.classifier.backbone
        chosen = norm_parameters(backbone) if self.config.parameters == "norm" else list(backbone.parameters())
        if self.config.adapt_from is None:
            return chosen
        late = {id(parameter) for parameter in parameters_from(backbone, self.config.adapt_from)}
        return [parameter for parameter in chosen if id(parameter) in late]

    def prepare(self, source: Any) -> None:
        self.normaliser = Normaliser(self.classifier, self.config.normalisation, self.config.blend)
        moving = self.moving()
        if not moving:
            raise ValueError(f"{self.name} has nothing to move: this classifier has no such parameters")
        for parameter in moving:
            parameter.requires_grad_(True)

    def reset(self) -> None:
        super().reset()
        self.notes = {}
        if self.config.optimizer == "adam":
            self.optimizer = torch.optim.Adam(self.moving(), lr=self.config.lr)
        else:
            self.optimizer = torch.optim.SGD(self.moving(), lr=self.config.lr, momentum=self.config.momentum)

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        size = len(images)
        if self.normaliser.uses_batch and size < self.config.min_batch:
            reason = f"a batch of {size} is too small to normalise with (min_batch={self.config.min_batch})"
            return self.predict(images), Report(size, stepped=False, reason=reason)
        self.notes = {}
        self.normaliser.adapting()
        if self.counters.batches % self.config.every:
            with torch.no_grad():
                features, logits = self.run(images)
            reason = self.unusable(features)
            skipped = reason or f"a step is taken on each batch of {self.config.every} (every={self.config.every})"
            return logits, Report(size, stepped=False, refused=bool(reason), reason=skipped)
        features, logits = self.run(images)
        loss = self.loss(features, logits)
        refusal = self._backward(features, loss)
        if not refusal:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        report = Report(size, not refusal, bool(refusal), refusal, loss.item(), self.notes)
        if refusal or self.config.answer == "before":
            return logits, report
        if self.config.answer == "after":
            self.normaliser.adapting(update=False)
            with torch.no_grad():
                return self.run(images)[1], report
        return self.predict(images), report

    def _backward(self, features: Tensor, loss: Tensor) -> str:
        """Computes the gradients of the loss. Says why they cannot be used, where they cannot."""
        if reason := self.unusable(features):
            return reason
        if not torch.isfinite(loss):
            return f"its loss is {loss.item()}"
        loss.backward()
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        return "" if norm < LARGEST_GRADIENT else f"the norm of its gradient is {norm.item()}"

    def state(self) -> dict[str, Tensor]:
        return super().state() | {
            f"optimizer.{i}.{key}": value
            for i, parameter in enumerate(self.moving())
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        super().check_state(tensors)
        moving = self.moving()
        for name in (name for name in tensors if name.startswith("optimizer.")):
            number = int(name.split(".")[1])
            if number >= len(moving) or tensors[name].shape not in (moving[number].shape, torch.Size([])):
                raise ValueError(
                    f"the state has a `{name}` of shape {tuple(tensors[name].shape)}, which fits no parameter"
                )

    def set_state(self, tensors: Mapping[str, Tensor]) -> None:
        super().set_state(tensors)
        moving = self.moving()
        self.optimizer.state.clear()
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                parameter = moving[int(number)]
                # Adam's count of steps is a scalar that stays where it is; the rest goes where the parameter is.
                value = tensor.to(parameter) if tensor.shape == parameter.shape else tensor
                self.optimizer.state[parameter][key] = value.clone()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """`.to()`, `.double()`, … move the optimiser's memory along."""
        super()._apply(fn, recurse)
        for parameter, memory in self.optimizer.state.items() if hasattr(self, "optimizer") else ():
            for key, value in memory.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    memory[key] = value.to(parameter)
        return self
