"""The adapter: a classifier that adapts while it answers. `adapter(images)` and `adapter.reset()` are all of it."""

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from cafe_tta import ranks, storage
from cafe_tta.classifier import SplitClassifier
from cafe_tta.config import AdapterConfig as AdapterConfig
from cafe_tta.normalisation import Normaliser
from cafe_tta.stats import classifier_meta, describe_difference, require_classifier

STATE_VERSION = 1
BATCHNORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_HOW_TO_GET = {
    "stats": "make them with FeatureStats.fit(classifier, source_loader).group()",
    "histograms": "make them with SourceHistograms.fit(classifier, source_loader)",
    "posterior": "collect one while training, with SWAG",
    "data": "pass a loader of (images, labels)",
}


class StepRefused(UserWarning):
    """A step was not taken, because its loss or gradient was not finite. The weights stayed as they were."""


@dataclass(frozen=True)
class Report:
    """What happened to a batch: of all ranks, where several adapt as one."""

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


class Adapter(nn.Module):
    """A copy of a classifier that adapts to the images it is shown. Subclasses are the methods."""

    name: ClassVar[str]
    needs: ClassVar[str | None] = None  # of the source domain: None | "stats" | "histograms" | "posterior" | "data"
    adds_up: ClassVar[bool] = False  # what it knows of a batch, through `ranks`: then many processes may adapt as one
    remark: ClassVar[str] = ""  # a sentence for the captions of results tables, where readers must know something
    Config: ClassVar[type[AdapterConfig]] = AdapterConfig
    presets: ClassVar[Mapping[str, AdapterConfig]] = {}

    classifier: SplitClassifier
    normaliser: Normaliser
    ranks: ranks.Ranks
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
        self.ranks = ranks.here()
        if self.ranks.size > 1 and not self.adds_up:
            raise ValueError(
                f"{self.name} cannot adapt as one over the {self.ranks.size} ranks of this process group; "
                "make it inside `with cafe_tta.ranks.apart():`, and each rank adapts by itself"
            )
        self.until_check = 0  # batches until the ranks compare their weights
        self._readable: set[tuple[torch.Size, torch.dtype]] = set()  # images that the classifier was seen to read
        with torch.inference_mode(False):  # a copy made inside inference mode could never be trained
            self._classifier_meta = classifier_meta(classifier)
            self.made_of = self.ranks.fingerprint((self._classifier_meta, source))
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
        """Adapts to a batch of images and returns its logits. A bad batch raises, and changes nothing.

        Under a process group every rank calls it with its part of the batch, which may be empty: see docs/scale.md.
        """
        # Callers sit in no_grad() or inference_mode(): they only want predictions.
        with self.ranks.step(self, images), torch.inference_mode(False), torch.enable_grad():
            images = images.clone() if images.is_inference() else images.detach()
            logits, report = self.answer_or_leave(images)
            size = self.ranks.count(images)
            if notes := self.ranks.notes():
                report = replace(report, notes={**report.notes, **notes})
        if report.refused:
            warnings.warn(f"{self.name} took no step on this batch: {report.reason}", StepRefused, stacklevel=4)
        self.report = report
        self.counters.batches += 1
        self.counters.images += size
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
        self.check(images)
        with torch.no_grad():
            self.normaliser.evaluating()
            return self.run(images)

    @contextmanager
    def as_source(self) -> Iterator[None]:
        """The classifier is the source's again, for a while; what was learnt is only laid aside."""
        learnt = {tensor: tensor.data for tensor in self.changing().values()}
        try:
            for name, tensor in self.changing().items():
                tensor.data = self._source_state[name].to(tensor)
            yield
        finally:
            for tensor, values in learnt.items():
                tensor.data = values

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
        a, b = asdict(self.Config()) | theirs["config"], ours["config"]  # options that were added since: their defaults
        if names := sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key)):
            shown = ", ".join(f"{name}={a.get(name)!r} there, {b.get(name)!r} here" for name in names)
            raise ValueError(f"{path} was saved with other options: {shown}")
        self.check_state(tensors)
        self.set_state(tensors)
        self.counters = Counters(**theirs["counters"])
        self.report = None
        self.until_check = 0

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

    def unusable(self, features: Tensor, loss: Tensor | None = None) -> str:
        """Why nothing may be learnt from a pass, on any rank; empty where all is well."""
        reason = ""
        if not torch.isfinite(features).all():
            reason = "its features are NaN or infinite"
        elif not self.normaliser.statistics_are_finite():
            reason = "its BatchNorm statistics overflow"
        elif loss is not None and not torch.isfinite(loss):
            reason = f"its loss is {loss.item()}"
        return self.ranks.agree(reason, loss)

    def check(self, images: Any) -> None:
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
        empty = self.ranks.size > 1 and not len(images) and images.shape[1:].numel()  # a rank may have nothing to do
        if images.dim() < 2 or not (images.numel() or empty):
            raise ValueError(f"expected a batch of at least one image, but got shape {tuple(images.shape)}")
        if not torch.isfinite(images).all():
            bad = [i for i, image in enumerate(images) if not torch.isfinite(image).all()]
            raise ValueError(f"expected finite images, but images {bad[:10]} of the batch have NaN or infinite values")

    def probe(self, images: Tensor) -> None:
        """Refuses images that the classifier cannot read, before the ranks begin a step: each new shape is tried once.

        A rank that fails in the middle of a step cannot be helped; the others would wait for it.
        """
        kind = (images.shape[1:], images.dtype)
        if kind not in self._readable:
            self.predict(self.ranks.stand_in(images))
            self._readable.add(kind)

    def run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, D) and logits (B, C). What the classifier cannot read is the caller's mistake, and said so."""
        if not len(images):
            features, logits = self.run(self.ranks.stand_in(images))
            return features[:0], logits[:0]
        try:
            return self.classifier.features_and_logits(images)
        except (torch.OutOfMemoryError, ranks.RankError):
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(f"the classifier cannot read images of shape {tuple(images.shape)}: {error}") from error
