"""Methods that take gradient steps: everything but their loss."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from cafe_tta import losses
from cafe_tta.adapter import Adapter, AdapterConfig, Report
from cafe_tta.classifier import SplitClassifier
from cafe_tta.diversity import EXPECTED
from cafe_tta.mixture import NO_MIXTURE, Mixture
from cafe_tta.normalisation import (
    Normalisation,
    Normaliser,
    batchnorm_layers,
    keep_group_norm_from_crashing,
    norm_parameters,
)
from cafe_tta.options import option
from cafe_tta.unmixing import WINDOW

LARGEST_GRADIENT = 1e15  # a step along a larger one leaves weights that overflow in the next pass


@dataclass(frozen=True)
class StepConfig(AdapterConfig):
    """Options that every method with gradient steps has.

    >>> StepConfig(lr=1e-4, normalisation="blend").momentum
    0.8
    """

    lr: float = option(1e-3, "Learning rate (Sec. 5.2).", least=0)
    momentum: float = option(0.8, "Momentum of SGD (Sec. 5.2).", least=0, below=1)
    optimizer: Literal["sgd", "adam"] = option("sgd", "The optimiser.")
    max_change: float | None = option(
        None, "Clips the gradient so that ‖lr·gradient‖ is at most this multiple of ‖weights‖.", above=0
    )
    parameters: Literal["all", "norm"] = option(
        "all", "What moves in the backbone: all parameters, or only weight and bias of the normalisation layers."
    )
    normalisation: Normalisation = option(
        "batch",
        "What BatchNorm normalises with while adapting: the batch (the paper), the source's statistics, a blend, "
        "statistics that follow the stream slowly (slow), or, for each image, the images of the stream that are "
        "corrupted like it (unmix), or a mixture of components that it moves (unmix-tns).",
    )
    unmix_window: int = option(
        WINDOW,
        "Images of the stream after which one counts e times less in its cluster's statistics, for "
        "normalisation=unmix.",
        least=1,
    )
    unmix_classes: float | None = option(None, f"For normalisation=unmix: {EXPECTED}", least=1)
    blend: float = option(0.5, "Weight of the batch's statistics, for normalisation=blend.", least=0, most=1)
    answer: Literal["before", "after", "after-eval"] = option(
        "before",
        "Which logits are returned: of the pass that made the loss, of a second pass after the step, or of a second "
        "pass in evaluation mode.",
    )
    min_batch: int = option(
        2, "A smaller batch is answered in evaluation mode where BatchNorm would normalise with the batch.", least=1
    )
    adapt_from: str | None = option(
        None, "Name of a module of the model: everything before it stays fixed, and costs no backward pass."
    )
    sync_batchnorm: bool = option(
        True, "With many ranks: whether BatchNorm normalises with the batch of all ranks, or each rank with its own."
    )
    every: int = option(1, "A step is taken on each n-th batch; every batch is answered.", least=1)
    nesterov: bool = option(False, "Whether SGD's momentum is Nesterov's.")
    weight_decay: float = option(0.0, "Weight decay of the optimiser.", least=0)
    max_entropy: float | None = option(
        None,
        "The entropy filter: images whose predictions have at least this share of the largest entropy, ln C, are "
        "answered and not learnt from.",
        above=0,
        most=1,
    )
    reset_every: int | None = option(
        None, "Everything learnt is forgotten after each n-th batch: back to the source classifier.", least=1
    )
    slow: float = option(0.05, "Weight of a batch in the statistics, for normalisation=slow.", above=0, most=1)
    components: int = option(16, "K: components of the mixture, for normalisation=unmix-tns.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError(
                f"expected `nesterov` with optimizer='sgd' and a momentum above 0, but got {self.optimizer!r} and "
                f"{self.momentum}"
            )

    @property
    def unmixes(self) -> bool:
        return self.normalisation == "unmix"


class NothingToLearn(Exception):
    """Raised by a `loss` that finds nothing to learn from: the batch is answered, and no step is taken.

    Its text is the `reason` in the report. It is no error: the weights stay as they were, and the stream goes on.

    >>> class Careful(GradientAdapter):
    ...     name = "careful"
    ...     def loss(self, features, logits):
    ...         raise NothingToLearn("this method trusts no image")
    >>> from cafe_tta import split_classifier
    >>> adapter = Careful(split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 3))))
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.stepped, adapter.report.reason
    (torch.Size([8, 3]), False, 'this method trusts no image')
    """


def parameters_from(backbone: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters of a module, named as in the user's model, and of all modules defined after it."""
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


class GradientAdapter(Adapter):
    """A method that takes a gradient step on each batch. A subclass writes its `loss`.

    >>> class Confident(GradientAdapter):
    ...     name = "confident"
    ...     def loss(self, features, logits):
    ...         return -logits.softmax(1).max(1).values.mean()
    >>> from cafe_tta import split_classifier
    >>> adapter = Confident(split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 3))))
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([8, 3]), True)
    """

    filters_as_one: ClassVar[bool] = False  # whether `loss` counts the images of all ranks that pass the filter
    Config: ClassVar[type[AdapterConfig]] = StepConfig
    config: StepConfig
    optimizer: torch.optim.Optimizer
    notes: dict[str, float]  # filled by `loss`: what to report of the batch
    batch: Tensor  # all images of the batch at hand, and
    kept: Tensor  # (B,): which of them passed the entropy filter. Both are there while `loss` runs.

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        """What a step makes smaller: a scalar. Raises `NothingToLearn` where the batch has nothing to learn from.

        Features and logits are those of the images that pass the entropy filter: all, where there is none.
        """
        raise NotImplementedError

    def uncertainty(self, logits: Tensor) -> Tensor:
        """What the entropy filter compares: the entropy of each prediction. (B, C) -> (B,)"""
        return losses.entropy(logits)

    def every(self, size: int) -> int:
        """A step is taken on each n-th batch, where batches have `size` images."""
        return self.config.every

    def after_step(self) -> None:
        """Called when the optimiser has moved the weights, before anything is answered with them."""

    def candidates(self) -> list[nn.Parameter]:
        """The parameters of the backbone that `parameters` allows to move; the head is fixed (Sec. 4.1)."""
        backbone = self.classifier.backbone
        return norm_parameters(backbone) if self.config.parameters == "norm" else list(backbone.parameters())

    def moving(self) -> list[nn.Parameter]:
        """What a step moves: the candidates from `adapt_from` on."""
        if self.config.adapt_from is None:
            return self.candidates()
        late = {id(parameter) for parameter in parameters_from(self.classifier.backbone, self.config.adapt_from)}
        return [parameter for parameter in self.candidates() if id(parameter) in late]

    def prepare(self, source: Any) -> None:
        kind = self.config.normalisation
        unmixer = self.unmixer(source, self.config.unmix_window, self.config.unmix_classes) if kind == "unmix" else None
        mixture = self.mixture(self.config.components, self.config.batch_size) if kind == "unmix-tns" else None
        weight = self.config.slow if kind == "slow" else self.config.blend
        self.normaliser = Normaliser(
            self.classifier,
            kind,
            weight,
            ranks=self.ranks,
            shared=self.config.sync_batchnorm,
            unmixer=unmixer,
            mixture=mixture,
        )
        if self.ranks.size > 1 and self.config.max_entropy is not None and not self.filters_as_one:
            raise ValueError(
                f"{self.name} filters by entropy (max_entropy) in one process, but this one is a rank of several"
            )
        moving = self.moving()
        if not moving:
            raise ValueError(f"{self.name} has nothing to move: this classifier has no such parameters")
        for parameter in moving:
            parameter.requires_grad_(True)
        keep_group_norm_from_crashing(self.classifier)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimiser moves, with options of their own where they have any."""
        return [{"params": self.moving()}]

    def reset(self) -> None:
        super().reset()
        self.notes = {}
        config, groups = self.config, self.parameter_groups()
        if config.optimizer == "adam":
            self.optimizer = torch.optim.Adam(groups, lr=config.lr, weight_decay=config.weight_decay)
        else:
            self.optimizer = torch.optim.SGD(
                groups, config.lr, config.momentum, weight_decay=config.weight_decay, nesterov=config.nesterov
            )

    def forget(self) -> None:
        """Back to the source classifier in the middle of a stream: as `reset`, but batches are still counted."""
        counters, notes = self.counters, self.notes
        self.reset()
        self.counters, self.notes = counters, notes

    @property
    def batch_number(self) -> int:
        """The number of the batch at hand, from 0 at the reset, and at each reset that `reset_every` makes."""
        return self.counters.batches % (self.config.reset_every or self.counters.batches + 1)

    def generator(self, purpose: int = 0) -> torch.Generator:
        """Random numbers that depend on the batch's number alone: the same after a reset, and after a resume."""
        return torch.Generator().manual_seed(1000 * self.batch_number + purpose)

    def answer_or_roll_back(self, images: Tensor) -> tuple[Tensor, Report]:
        if self.config.reset_every is None or self.batch_number or not self.counters.batches:
            return super().answer_or_roll_back(images)
        before = {name: tensor.detach().clone() for name, tensor in self.state().items()}
        self.forget()
        try:
            logits, report = super().answer_or_roll_back(images)
        except BaseException:
            self.set_state(before)
            raise
        return logits, replace(report, notes={**report.notes, "reset": 1.0})

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        size = self.ranks.count(images)
        if self.normaliser.needs_many and (found := self.normaliser.batch_size(images)) < self.config.min_batch:
            reason = f"a batch of {found} is too small to normalise with (min_batch={self.config.min_batch})"
            return self.predict(images), Report(size, stepped=False, reason=reason)
        self.notes = {}
        self.normaliser.adapting()
        if self.batch_number % (every := self.every(size)):
            with torch.no_grad():
                features, logits = self.run(images)
            self.normaliser.average_statistics()
            reason = self.why_unusable(features)
            skipped = reason or f"a step is taken on one batch in {every}"
            return logits, Report(size, stepped=False, refused=bool(reason), reason=skipped)
        features, logits = self.run(images)
        report = self._learn(images, features, logits)
        if report.refused or self.config.answer == "before":
            return logits, report
        if self.config.answer == "after":
            self.normaliser.adapting(update=False)
            with torch.no_grad():
                return self.run(images)[1], report
        return self.predict(images), report

    def _learn(self, images: Tensor, features: Tensor, logits: Tensor) -> Report:
        """Takes a step on a batch, or says why not."""
        size, self.batch = self.ranks.count(images), images
        loss = None
        try:
            loss = self.loss(*self._filtered(features, logits))
            refusal = reason = self._backward(features, loss)
            if not refusal:
                self.optimizer.step()
                self.after_step()
        except NothingToLearn as nothing:
            refusal = self.why_unusable(features)
            reason = refusal or str(nothing)
        finally:
            del self.batch
            self.kept = torch.empty(0)
            self.optimizer.zero_grad(set_to_none=True)
        if not refusal:
            self.normaliser.average_statistics()
        return Report(size, not reason, bool(refusal), reason, None if loss is None else loss.item(), self.notes)

    def _filtered(self, features: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits of the images that pass the entropy filter."""
        share = self.config.max_entropy
        if share is None:
            self.kept = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            return features, logits
        self.kept = self.uncertainty(logits.detach()) < self.largest_entropy(share)
        (passed,) = self.ranks.sum(self.kept.sum())
        self.notes["passed"] = passed.item()
        if not passed:
            raise NothingToLearn(f"no image passes the entropy filter (max_entropy={share:g})")
        return features[self.kept], logits[self.kept]

    def exported(self) -> SplitClassifier:
        if self.config.normalisation == "unmix-tns":
            raise ValueError(NO_MIXTURE.format("normalisation='unmix-tns'"))
        return super().exported()

    def largest_entropy(self, share: float) -> float:
        """A share of the largest entropy that a prediction can have, ln C."""
        return share * math.log(self.classifier.num_classes)

    def mixture(self, components: int, full_batch: int) -> Mixture:
        """What normalises each image with a mixture that it moves (UnMix-TNS)."""
        layers = batchnorm_layers(self.classifier)
        if not layers:
            raise ValueError("normalisation='unmix-tns' needs BatchNorm layers, but this classifier has none")
        if self.ranks.size > 1:
            raise ValueError("normalisation='unmix-tns' adapts in one process, but this one is a rank of several")
        return Mixture(layers, components, full_batch)

    def _backward(self, features: Tensor, loss: Tensor) -> str:
        """Computes the gradients of the loss. Says why they cannot be used, where they cannot."""
        if reason := self.why_unusable(features, loss):
            return reason
        loss.backward()
        self.ranks.add_gradients(self.moving())
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        if not norm < LARGEST_GRADIENT:
            return f"the norm of its gradient is {norm.item()}"
        if self.config.max_change is not None and self.config.lr > 0:
            self._clip(gradients, norm.item(), self.config.max_change)
        return ""

    def _clip(self, gradients: list[Tensor], norm: float, max_change: float) -> None:
        """Gradient clipping: ‖lr·gradient‖ ≤ max_change·‖weights‖. Far from the source, the loss may be very steep."""
        weights = torch.stack(torch._foreach_norm([p.detach() for p in self.moving()])).norm().item()
        largest = max_change * weights / self.config.lr
        if norm > largest:
            torch._foreach_mul_(gradients, largest / norm)
            self.notes["clipped"] = largest / norm

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
                # Adam's step count is a scalar that stays on its device; the rest moves to the parameter's device.
                value = tensor.to(parameter) if tensor.shape == parameter.shape else tensor
                self.optimizer.state[parameter][key] = value.clone()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Moves the optimiser's state along with `.to()`, `.double()` and the like."""
        super()._apply(fn, recurse)
        for parameter, memory in self.optimizer.state.items() if hasattr(self, "optimizer") else ():
            for key, value in memory.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    memory[key] = value.to(parameter)
        return self


@contextmanager
def climbed(parameters: Sequence[Tensor], radius: float) -> Iterator[None]:
    """Inside the block, the parameters are `radius` up along their gradients; afterwards, exactly where they were.

    The first half of a sharpness-aware step (Foret et al., 2021): θ + ρ g / ‖g‖, one norm over all parameters.
    """
    moved = [p for p in parameters if p.grad is not None]
    before = [p.detach().clone() for p in moved]
    norm = torch.stack([p.grad.norm() for p in moved if p.grad is not None]).norm()
    with torch.no_grad():
        for p in moved:
            assert p.grad is not None
            p.add_(p.grad * (radius / (norm + 1e-12)))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(moved, before, strict=True):
                p.copy_(value)
