"""The adapter: a classifier that adapts while it answers. Its interface is `adapter(images)` and `reset()`."""

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from cafe_tta import storage
from cafe_tta.classifier import SplitClassifier, describe_difference, reading, require_classifier
from cafe_tta.clusters import THRESHOLD
from cafe_tta.display import Displayed
from cafe_tta.distributed import Ranks, here
from cafe_tta.normalisation import Normaliser, batchnorm_layers
from cafe_tta.options import Options, describe, option, require_known
from cafe_tta.source import SourceValue, SourceWarning, source_kind
from cafe_tta.source.images import ImageCheck, ImageRecord
from cafe_tta.styles import StyleStats
from cafe_tta.traits import Traits
from cafe_tta.unmixing import PRIOR, Unmixer

if TYPE_CHECKING:
    from cafe_tta.distributed.synchronised import Lockstep

STATE_KIND, STATE_VERSION = "adapter-state", 1
ONE_KIND = 0.9  # of the images: an exported model, which normalises all alike, is for streams with as many of one kind
BATCHNORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class AdapterConfig(Options):
    """Options that every method has.

    >>> AdapterConfig(batch_size=64)
    AdapterConfig(batch_size=64)
    """

    batch_size: int = option(256, "Images per batch, for loaders and benchmarks; any other size works too.", least=1)

    @property
    def unmixes(self) -> bool:
        """Whether images are clustered by how they are corrupted, which takes the styles of the source images."""
        return False


class StepRefused(UserWarning):
    """A step was not taken, because its loss or gradient was not finite. The weights stayed as they were.

    >>> import warnings
    >>> warnings.simplefilter("ignore", StepRefused)  # for streams with many bad batches
    """


class MixedExport(UserWarning):
    """An adapter that normalises images in several ways was exported as a model that knows one.

    >>> import warnings
    >>> warnings.simplefilter("error", MixedExport)  # to have no such model by accident
    >>> warnings.simplefilter("default", MixedExport)
    """


@dataclass(frozen=True, repr=False)
class Report(Displayed):
    """What happened to a batch (of all ranks, where several adapt as one).

    >>> Report(images=256, stepped=True, loss=1.5)
    <Report: images 256, stepped True, loss 1.5>
    """

    images: int
    stepped: bool  # whether the weights moved
    refused: bool = False  # a step was tried, and was not finite
    reason: str = ""  # why no step was taken
    loss: float | None = None
    notes: Mapping[str, float] = field(default_factory=dict)  # terms of the loss, and how it was computed
    drift: float | None = None  # from the source, where the source classifier looked at the batch (`gate`); 1: like it
    rolled_back: bool = False  # the last steps were taken back, this one too: see `Judged`

    def facts(self) -> Mapping[str, Any]:
        numbers = {"loss": self.loss, **self.notes, "drift": self.drift}
        shown = {name: None if value is None else f"{value:.4g}" for name, value in numbers.items()}
        own = {"images": self.images, "stepped": self.stepped, "refused": self.refused or None}
        return {**own, "reason": self.reason, **shown}


@dataclass
class Counters:
    """What happened since the last reset."""

    batches: int = 0
    images: int = 0
    steps: int = 0
    refused: int = 0  # steps whose loss or gradient was not finite
    rolled_back: int = 0  # steps that were taken back: see `Judged`

    def count(self, report: Report) -> None:
        """Adds one batch."""
        self.batches += 1
        self.images += report.images
        self.steps += report.stepped
        self.refused += report.refused


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors of a state, which later steps do not change."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class _Shared:
    """A source value, which copies of an adapter share."""

    def __init__(self, value: SourceValue | None) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> "_Shared":
        return self


class Adapter(Displayed, nn.Module):
    """A copy of a classifier that adapts to the images it is shown. Subclasses are the methods.

    >>> from cafe_tta import create, split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3)))
    >>> adapter = create("infomax", classifier)  # a subclass, by name
    >>> logits = adapter(torch.rand(8, 3, 2, 2))
    >>> adapter.counters.steps, adapter.report.stepped
    (1, True)
    >>> adapter.reset()
    >>> adapter.counters.steps
    0

    Every subclass takes its options as keywords:

    >>> from cafe_tta import Tent
    >>> Tent(split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3))), lr=1e-4).config.lr
    0.0001
    """

    name: ClassVar[str]
    needs: ClassVar[str | None] = None  # from the source domain: None, or a key of `cafe_tta.source.SOURCES`
    adapts: ClassVar[bool] = True  # False for a baseline that only answers
    distributed: ClassVar[bool] = False  # whether many processes may adapt as one: it sums through `self.ranks`
    in_tables: ClassVar[bool] = True  # False: benchmarks and the demo run it only where it is named
    traits: ClassVar[Traits | None] = None  # for the table of methods
    remark: ClassVar[str] = ""  # a sentence for the captions of tables, where readers must know something
    one_pass: ClassVar[bool] = False  # whether offline, too, the answers that count are those given as images come
    Config: ClassVar[type[AdapterConfig]] = AdapterConfig
    presets: ClassVar[Mapping[str, AdapterConfig]] = {}

    classifier: SplitClassifier
    normaliser: Normaliser
    ranks: Ranks
    counters: Counters
    report: Report | None  # of the last batch
    image_check: ImageCheck  # warns where the first images cannot have been read as the source images were

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "adds_up" in vars(cls):  # the name of `distributed` until version 0.2
            cls.distributed = vars(cls)["adds_up"]
            warnings.warn(f"{cls.__name__}: write `distributed` instead of `adds_up`", DeprecationWarning, stacklevel=2)

    def __init__(
        self,
        classifier: SplitClassifier,
        source: Any = None,
        config: Any = None,
        *,
        styles: StyleStats | None = None,
        **options: Any,
    ) -> None:
        """`source` is what the method `needs`. `options` are those of its `Config`, and win over those of `config`.

        `styles` are for a method that unmixes and whose own source value has none: `SourceStats.styles`.
        """
        super().__init__()
        if not isinstance(styles, StyleStats | None):
            kind = type(styles).__name__
            raise TypeError(f"expected `styles` of the source images, as in `stats.styles`, but got {kind}")
        self.styles = getattr(source, "styles", None) if styles is None else styles
        require_classifier(classifier)
        self.config = self.configure(config, **options)
        if self.needs is not None:
            source_kind(self.needs).require(source, classifier, self.name)
        self._source = _Shared(source if isinstance(source, SourceValue) else None)
        self.image_check = ImageCheck(source.images if isinstance(source, SourceValue) else ImageRecord())
        with torch.inference_mode(False):  # a copy made inside inference mode could never be trained
            self._identity = classifier.identity()
            self._join_ranks(source)
            self.classifier = copy.deepcopy(classifier).requires_grad_(False)
            self.prepare(source)
            # Kept as they are, whatever device and precision the adapter moves to: reset is exact.
            self._source_state = {name: tensor.detach().clone() for name, tensor in self.changing().items()}
        self.reset()

    @classmethod
    def configure(cls, config: Any = None, **options: Any) -> Any:
        """The options of the method: those of `config`, or the defaults, with some changed."""
        config = cls.Config() if config is None else config
        if issubclass(cls.Config, type(config)) and type(config) is not cls.Config:  # a preset that it inherited
            config = cls.Config(**{known.name: getattr(config, known.name) for known in fields(config)})
        if not isinstance(config, cls.Config):
            raise TypeError(f"expected a {cls.Config.__name__}, but got {type(config).__name__}")
        require_known(
            options, [described.name for described in describe(cls.Config)], getattr(cls, "name", cls.__name__)
        )
        return replace(config, **options)

    # Overridden by methods

    def prepare(self, source: Any) -> None:
        """Keeps what the method needs from the source domain, and sets the classifier up. Called once."""
        self.normaliser = Normaliser(self.classifier, "source")

    def unmixer(
        self,
        source: Any,
        window: float,
        expected: float | None,
        prior: float = PRIOR,
        threshold: float = THRESHOLD,
    ) -> Unmixer:
        """What normalises each image with those that are corrupted like it; needs the styles of the source images."""
        layers = batchnorm_layers(self.classifier)
        if self.styles is None:
            what = "SourceStats" if source is None or hasattr(source, "styles") else "`styles`, those of SourceStats"
            raise ValueError(
                f"normalisation='unmix' needs the styles of the source images, but got none; pass {what} that were "
                "made with this release by FeatureStats.fit(classifier, source_loader).group() or `cafe-tta stats`"
            )
        return Unmixer(
            layers,
            self.styles,
            self.classifier.num_classes,
            window=window,
            prior=prior,
            threshold=threshold,
            expected=expected,
            ranks=self.ranks,
        )

    @property
    def clusters(self) -> Unmixer | None:
        """The clusters of images that are corrupted alike; None where the method does not unmix."""
        return self.normaliser.unmixer

    @property
    def drift(self) -> float | None:
        """How far the images of the last batch are from the source images: 1 is like them. None where nobody looked.

        The source classifier looks at a batch with `gate`, where the method does not unmix; with `Judged`, always.
        """
        return None if self.report is None else self.report.drift

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        """Adapts to a good batch and answers it."""
        raise NotImplementedError

    def wants_more(self) -> bool:
        """Whether an offline run makes another pass over its images. Test-time adaptation needs only one."""
        return False

    def changing(self) -> dict[str, Tensor]:
        """Every tensor of the classifier that adapting may change."""
        tensors: dict[str, Tensor] = {n: p for n, p in self.classifier.named_parameters() if p.requires_grad}
        if self.normaliser.uses_batch:
            tensors |= {n: b for n, b in self.classifier.named_buffers() if n.rpartition(".")[2] in BATCHNORM_BUFFERS}
        return tensors

    # Public interface

    def forward(self, images: Tensor) -> Tensor:
        """Adapts to a batch of images and returns its logits. A bad batch raises, and changes nothing.

        In a process group, every rank calls it with its part of the batch, which may be empty: see docs/scale.md.
        """
        if isinstance(images, Tensor) and (wrong := self.image_check.look(images)):
            warnings.warn(wrong, SourceWarning, stacklevel=4)
        if self._lockstep is None:
            self.check(images)
            logits, report = self._adapt(images)
        else:  # in a process group
            logits, report = self._adapt_with_other_ranks(self._lockstep, images)
        if report.refused:
            warnings.warn(f"{self.name} took no step on this batch: {report.reason}", StepRefused, stacklevel=4)
        self.report = report
        self.counters.count(report)
        return logits.detach()

    def _adapt(self, images: Tensor) -> tuple[Tensor, Report]:
        # Callers sit in no_grad() or inference_mode(): they only want predictions.
        with torch.inference_mode(False), torch.enable_grad():
            logits, report = self.answer_or_roll_back(images.clone() if images.is_inference() else images.detach())
        if self.clusters is not None:
            report = replace(report, notes={**report.notes, **self.clusters.notes()})
        return logits, report

    def answer_or_roll_back(self, images: Tensor) -> tuple[Tensor, Report]:
        """Answers; where that fails or the step is refused, everything is rolled back."""
        kept = self._backup()
        try:
            logits, report = self.answer(images)
        except BaseException:
            self._restore(kept)
            raise
        if report.refused:
            self._restore(kept)
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

    def features_as_answered(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """As `features_and_logits`, but normalised as an answer is: with these images, if the method uses the batch."""
        parts = [part.normaliser for part in self.modules() if isinstance(part, Adapter)]  # members of an ensemble too
        as_answered = len(images) > 1 and getattr(self.config, "answer", "before") != "after-eval"
        try:
            for normaliser in parts:
                normaliser.as_adapting = as_answered
            return self.features_and_logits(images)
        finally:
            for normaliser in parts:
                normaliser.as_adapting = False

    @contextmanager
    def source_weights(self) -> Iterator[None]:
        """The source classifier inside the block; afterwards the adapted one is back."""
        learnt = {tensor: tensor.data for tensor in self.changing().values()}
        by_image = self.normaliser.by_image
        try:
            for name, tensor in self.changing().items():
                tensor.data = self._source_state[name].to(tensor)
            if by_image is not None:
                by_image.enabled = False
            yield
        finally:
            for tensor, values in learnt.items():
                tensor.data = values
            if by_image is not None:
                by_image.enabled = True

    def reset(self) -> None:
        """Forgets every image: bit for bit the source classifier again."""
        with torch.no_grad():
            for name, tensor in self.changing().items():
                tensor.copy_(self._source_state[name])
        self.normaliser.reset()
        self.counters = Counters()
        self.report = None

    def export(self) -> nn.Module:
        """The adapted model as an ordinary one: of the class of the model that was split, and a copy of its own.

        In evaluation mode, it answers as `predict` does; it no longer adapts. A method whose answers no single model
        can give says so. With normalisation="unmix", it normalises with the statistics of the largest cluster of
        images, because an ordinary model has one set of them.
        """
        with torch.inference_mode(False), torch.no_grad():
            model = self.exported().whole()
            self.normaliser.leave(model)
        sizes = [] if self.clusters is None else self.clusters.sizes
        if sizes and sizes[0] < ONE_KIND * sum(sizes):
            warnings.warn(
                f"{self.name} normalises the images of this stream in {len(sizes)} ways, and an ordinary model in one: "
                f"the exported model has the statistics of the largest cluster, {sizes[0]} of the last {sum(sizes)} "
                "images, and will answer others badly; save the adapter instead, or check the model on such images",
                MixedExport,
                stacklevel=2,
            )
        return model.requires_grad_(True).eval()

    def exported(self) -> SplitClassifier:
        """The classifier that answers as `predict` does, for `export`. May share tensors with this adapter."""
        return self.classifier

    def save(self, path: str | os.PathLike[str], source: bool = True) -> int:
        """Writes all that adapting changed to a safetensors file, atomically. Returns its size in bytes.

        With `source`, what the method needs from the source domain is in the file too: `cafe_tta.load_adapter` makes
        the adapter from it and the classifier alone.
        """
        tensors, meta = self.state(), self._state_meta()
        value = self._source.value
        if source and value is not None and type(value).content is not SourceValue.content:
            own, theirs = value.content()
            tensors |= {f"source.{name}": tensor for name, tensor in own.items()}
            meta |= {"source": {"kind": value.kind, "meta": theirs}}
        if source and self.styles is not None and getattr(value, "styles", None) is None:
            tensors |= {"styles.mean": self.styles.mean, "styles.cov": self.styles.cov}
        return storage.write(path, STATE_KIND, STATE_VERSION, tensors, meta)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continues exactly where `save` left off. A state of another method, classifier or options is rejected."""
        tensors, theirs = storage.read(path, STATE_KIND, STATE_VERSION)
        ours = self._state_meta()
        if theirs["method"] != ours["method"]:
            raise ValueError(f"{path} is a state of {theirs['method']!r}, but this adapter is {ours['method']!r}")
        if difference := describe_difference(theirs["classifier"], ours["classifier"]):
            raise ValueError(f"{path} does not belong to this classifier: {difference}")
        saved = asdict(self.Config()) | theirs["config"]  # options that were added since have their defaults
        if shown := storage.differences(saved, ours["config"]):
            raise ValueError(f"{path} was saved with other options: {shown}")
        self.check_state(tensors)
        self.set_state(tensors)
        self.counters = Counters(**theirs["counters"])
        self.report = None
        if self._lockstep is not None:
            self._lockstep.compare_next()

    def train(self, mode: bool = True) -> Self:
        """Has no effect: the method decides which layers are in training mode, and when."""
        self.training = mode
        return self

    def facts(self) -> Mapping[str, Any]:
        classifier, options = self.classifier, self.config.changed()
        counted = ", ".join(f"{value} {name}" for name, value in asdict(self.counters).items() if value)
        model = f"{classifier.num_features} features, {classifier.num_classes} classes"
        return {"method": self.name, "options": options, "model": model, "so far": counted or "no images"}

    # State

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Refused: a state dict has neither momentum nor counters. Use `save` and `load`, or copy.deepcopy."""
        raise RuntimeError(
            "expected a file that `save` made, but got a state dict, which lacks momentum and counters; go on with "
            "adapter.save(path) and adapter.load(path), or keep copy.deepcopy(adapter) in memory"
        )

    def state(self) -> dict[str, Tensor]:
        """All tensors that adapting changes: of the classifier, and the adapter's own buffers."""
        own = {f"adapter.{name}": buffer for name, buffer in self._own_buffers().items()}
        own |= {f"normaliser.{name}": tensor for name, tensor in self.normaliser.memory.items()}
        return {f"classifier.{name}": tensor for name, tensor in self.changing().items()} | own

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuses tensors that are not a whole state, before anything is changed."""
        for name, tensor in self.changing().items():
            found = tensors.get(f"classifier.{name}")
            if found is None or found.shape != tensor.shape:
                raise ValueError(f"the state has no `{name}` of shape {tuple(tensor.shape)}")
        for name, tensor in self.normaliser.memory.items():
            if f"normaliser.{name}" not in tensors or tensors[f"normaliser.{name}"].shape != tensor.shape:
                raise ValueError(f"the state has no `{name}` of shape {tuple(tensor.shape)} for its normalisation")
        for name in self._own_buffers():  # these may grow, so any shape is fine
            if f"adapter.{name}" not in tensors:
                raise ValueError(f"the state has no `{name}`")

    def set_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the tensors that `state` gave."""
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in self.changing().items():
                tensor.copy_(tensors[f"classifier.{name}"])
            for name, buffer in self._own_buffers().items():
                setattr(self, name, tensors[f"adapter.{name}"].to(buffer))  # may have grown: takes the saved shape
            memory = self.normaliser.memory
            self.normaliser.memory = {
                name: tensors[f"normaliser.{name}"].to(old).clone() for name, old in memory.items()
            }

    def _own_buffers(self) -> dict[str, Tensor]:
        """What the method itself remembers of the stream. Constants are kept in buffers that are not persistent."""
        constant = self._non_persistent_buffers_set
        return {name: b for name, b in self.named_buffers(recurse=False) if name not in constant}

    def check_stats(self, stats: SourceValue) -> None:
        """Raises where source statistics are not those of the classifier that this adapter was made of."""
        if difference := describe_difference(stats.meta, self._identity):
            raise ValueError(f"the source statistics do not belong to this classifier: {difference}")

    def _state_meta(self) -> dict[str, Any]:
        config, counters = asdict(self.config), asdict(self.counters)
        return {"method": self.name, "config": config, "classifier": self._identity, "counters": counters}

    def _backup(self) -> Any:
        """What a forward pass may change before the step is accepted: statistics and own buffers, not the weights."""
        statistics = [(t, t.clone()) for t in self.changing().values() if not t.requires_grad]
        return statistics, self._own_buffers(), self.normaliser.memory

    def _restore(self, kept: Any) -> None:
        with torch.no_grad():
            for tensor, value in kept[0]:
                tensor.copy_(value)
        for name, buffer in kept[1].items():
            setattr(self, name, buffer)
        self.normaliser.memory = kept[2]

    # Guards

    def why_unusable(self, features: Tensor, loss: Tensor | None = None) -> str:
        """Why nothing may be learnt from a pass, on any rank; empty if all is well."""
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
            raise TypeError(f"expected a tensor of images, but got {type(images).__name__}; pass the images alone")
        weight = self.classifier.head.weight
        if images.dtype != weight.dtype:
            cure = f"call .to({weight.dtype})" if images.is_floating_point() else "divide by 255 and normalise"
            raise TypeError(
                f"expected images of {weight.dtype}, like the classifier, but got {images.dtype}; {cure} first"
            )
        if images.device != weight.device:
            raise ValueError(f"expected images on {weight.device}, like the classifier, but got {images.device}")
        empty = self.ranks.size > 1 and not len(images) and images.shape[1:].numel()  # a rank may have nothing to do
        if images.dim() < 2 or not (images.numel() or empty):
            raise ValueError(f"expected a batch of at least one image, but got shape {tuple(images.shape)}")
        # A sum is quicker, and finite only where every value is.
        if not (torch.isfinite(images.detach().sum()) or torch.isfinite(images).all()):
            bad = [i for i, image in enumerate(images) if not torch.isfinite(image).all()]
            raise ValueError(f"expected finite images, but images {bad[:10]} of the batch have NaN or infinite values")

    def run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, D) and logits (B, C). Raises ValueError for images that the classifier cannot read."""
        if not len(images):
            features, logits = self.run(self.ranks.stand_in(images))
            return features[:0], logits[:0]
        features, logits = self._pass(images)
        if self.normaliser.answered(logits):  # once more, with the statistics that it relies on now
            self.normaliser.adapting(update=False)
            features, logits = self._pass(images)
        return features, logits

    def _pass(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with reading(images):
            self.normaliser.look(images)
            return self.classifier.features_and_logits(images)

    # Many processes that adapt as one: see docs/scale.md

    def _join_ranks(self, source: Any) -> None:
        """Finds the ranks that this adapter belongs to: this process alone, unless a process group is initialised."""
        self.ranks = here()
        if self.ranks.size > 1 and not self.distributed:
            raise ValueError(
                f"{self.name} cannot adapt as one over the {self.ranks.size} ranks of this process group; "
                "make it inside `with cafe_tta.distributed.apart():`, and each rank adapts by itself"
            )
        self._lockstep = self.ranks.lockstep((self._identity, source))

    def _adapt_with_other_ranks(self, lockstep: "Lockstep", images: Tensor) -> tuple[Tensor, Report]:
        """Checks and adapts as one process does, while each of the other ranks does so with its part of the batch."""
        doing = f"batch {self.counters.batches} of {self.name}, made of {lockstep.fingerprint}, with {self.config}"
        with lockstep.step(doing, images, self.check, self.predict, self.state) as communicator:
            logits, report = self._adapt(images)
            size = self.ranks.count(images)
        return logits, replace(report, images=size, notes={**report.notes, "bytes": float(communicator.bytes)})
