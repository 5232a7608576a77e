"""Many processes that adapt as one. Imported only where a process group is initialised.

Every rank computes the whole loss, from sums over all ranks, and back-propagates through its own images only; then the
gradients of the parameters are added up. That is the gradient of the whole batch, however it is spread: the loss sees a
batch only through sums (n, Σz, Σzzᵀ of each group; Σ of probabilities; histograms), and sums of parts add up.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from cafe_tta import storage
from cafe_tta.gaussians import Moments, SourceGaussians
from cafe_tta.ranks import Diverged, RankError, Ranks
from cafe_tta.ranks.batchnorm import SharedBatchNorm, var_mean
from cafe_tta.ranks.wire import Wire, named

CHECK_EVERY = 100  # batches between two comparisons of all that adapting changes
BUCKET = 32 << 20  # bytes of gradients that are sent together: a copy of so many is made
STAND_IN = 2  # images that stand in for none; one may have no variance
SAME_LOSS = 1e-3  # ranks whose losses differ by more, relatively, were not made alike

_current: "Together | None" = None


@contextmanager
def process_group(timeout: float, backend: str | None) -> Iterator[int]:
    """See `cafe_tta.ranks.joined`."""
    global _current
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield dist.get_rank()
    finally:
        _current = None
        dist.destroy_process_group()  # without it, many runs abort at exit


def of_process_group() -> "Together":
    """All adapters of a process share one: they take turns."""
    global _current
    if _current is None or _current.wire.world is not dist.group.WORLD:
        _current = Together(Wire(dist.group.WORLD))
    return _current


class Together(Ranks):
    """All ranks of torch's process group. They make the same calls in the same order."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.size = wire.size
        self.check_every = CHECK_EVERY
        self.sizes: list[int] = []  # images of each rank, in the batch at hand

    def fingerprint(self, made_of: Any) -> str:
        tensors: dict[str, Tensor] = {}
        words: list[str] = []
        _take_apart(made_of, "", tensors, words)
        return storage.checksum(tensors, text="\n".join(words))[:8]

    # Beginning and end of a batch

    @contextmanager
    def step(self, adapter: Any, images: Tensor) -> Iterator[None]:
        if self.wire.lost:
            raise RankError(f"this rank left the others: {self.wire.lost}; start again from the last saved state")
        self.wire.bytes = 0
        self._meet(adapter, images)
        self.acting = True
        try:
            if adapter.until_check == 0:
                adapter.until_check = self.check_every
                self._compare(adapter.state())
            adapter.until_check -= 1
            yield
        except BaseException as error:
            if not isinstance(error, Diverged):  # which every rank raises at the same moment
                # The others wait in the middle of a step: whatever this rank said next would be misunderstood.
                self.wire.lost = self.wire.lost or f"{type(error).__name__}: {error}"
            raise
        finally:
            self.acting = False

    def _meet(self, adapter: Any, images: Tensor) -> None:
        """Every rank shows its part of the batch. Where one is bad, all ranks raise, and nothing has happened."""
        bad = _why_bad(adapter, images)
        number = f"batch {adapter.counters.batches} of {adapter.name}, made of {adapter.made_of}, with {adapter.config}"
        shape = "" if bad else f"images of shape {tuple(images.shape[1:])}"
        rows = self.wire.numbers(bool(bad), 0 if bad else len(images), _short_hash(number), _short_hash(shape))
        if _differ(row[2] for row in rows):
            texts = self.wire.texts(number)
            raise Diverged(f"expected every rank to do the same, but got {_listed(texts)}")
        if any(row[0] for row in rows):
            texts = self.wire.texts(str(bad or ""))
            if bad:
                raise bad
            first = next(rank for rank, row in enumerate(rows) if row[0])
            raise ValueError(f"rank {first} was given a bad batch, and so no rank adapts: {texts[first]}")
        if _differ(row[3] for row in rows):
            texts = self.wire.texts(shape)
            raise ValueError(f"expected images of the same shape on every rank, but got {_listed(texts)}")
        self.sizes = [int(row[1]) for row in rows]
        if not self.total:
            raise ValueError("expected a batch of at least one image, but no rank has any")

    def _compare(self, state: Mapping[str, Tensor]) -> None:
        """Raises on every rank if anything that adapting changes is not the same everywhere, bit for bit."""
        digest = storage.checksum({name: tensor.detach().cpu() for name, tensor in state.items()})
        rows = self.wire.numbers(*(int(digest[i : i + 12], 16) for i in range(0, 48, 12)))
        if other := [rank for rank, row in enumerate(rows) if row != rows[0]]:
            raise Diverged(
                f"the ranks diverged: {named(other)} and rank 0 hold other weights, statistics or memory; "
                "load the last saved state on every rank, and use machines and versions of one kind"
            )

    def count(self, images: Tensor) -> int:
        return self.total if self.acting else len(images)

    def smallest(self, images: Tensor) -> int:
        return min(size for size in self.sizes if size) if self.acting else len(images)

    def notes(self) -> dict[str, float]:
        return {"bytes": float(self.wire.bytes)}

    @property
    def own(self) -> int:
        """Images of this rank in the batch at hand."""
        return self.sizes[self.wire.rank]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def present(self) -> int:
        """Images that go through the network on this rank: its own, or what stands in for none."""
        return self.own or STAND_IN

    def stand_in(self, images: Tensor) -> Tensor:
        """Images for a rank that has none: many networks cannot read an empty batch. Not black, not all the same."""
        shape = (STAND_IN, *images.shape[1:])
        numbers = torch.arange(math.prod(shape), dtype=images.dtype, device=images.device)
        return numbers.div_(len(numbers)).sub_(0.5).view(shape)

    # Sums

    def add_up(self, tensor: Tensor) -> Tensor:
        return self.wire.add_up(tensor)

    def sum(self, *parts: Tensor) -> tuple[Tensor, ...]:
        total = _Sum.apply(torch.cat([part.flatten() for part in parts]), self.wire)
        return tuple(t.view(p.shape) for t, p in zip(total.split([p.numel() for p in parts]), parts, strict=True))

    def mean(self, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(part / self.total for part in self.sum(*(value.sum(0) for value in values)))

    def share(self, value: Tensor) -> Tensor:
        return _Share.apply(value, self.size)

    def moments(self, gaussians: SourceGaussians, features: Tensor) -> list[Moments]:
        """One sum of the groups' own blocks, of which the lower triangle is enough: never D×D."""
        if len(features):
            own = gaussians.moments(features)
        else:
            own = gaussians.moments(features.new_zeros(1, features.shape[1]))
        corners = [torch.tril_indices(width, width, device=m.mean.device) for m in own for width in m.mean.shape[1:]]
        # About the source's mean, which is 0 here, and in float64: nothing is lost by subtracting squares.
        weight = self.own / self.total
        parts = [weight * part.mean for part in own]
        for part, (i, j) in zip(own, corners, strict=True):
            parts.append(weight * (part.cov + part.mean[:, :, None] * part.mean[:, None, :])[:, i, j])
        if not len(features):  # the gradient still has to pass the layers that act together
            parts[0] = parts[0] + features.sum().to(parts[0])
        sums = self.sum(*parts)
        moments = []
        for part, mean, lower, (i, j) in zip(own, sums[: len(own)], sums[len(own) :], corners, strict=True):
            place = torch.zeros(part.cov.shape[1:], dtype=torch.long, device=lower.device)
            place[i, j] = place[j, i] = torch.arange(len(i), device=lower.device)
            cov = lower[:, place] - mean[:, :, None] * mean[:, None, :]
            moments.append(Moments(torch.full_like(part.count, self.total), mean, cov))
        return moments

    def rows(self, rows: Tensor) -> Tensor:
        padded = torch.cat([rows, rows.new_zeros(max(self.sizes) - len(rows), *rows.shape[1:])])
        found = self.wire.gather(padded)
        return torch.cat([part[:size] for part, size in zip(found, self.sizes, strict=True)])

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        for bucket in buckets_of(parameters):
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            _replace([parameter.grad for parameter in bucket if parameter.grad is not None], self.wire.add_up)

    # Decisions

    def any(self, found: bool) -> bool:
        return any(row[0] for row in self.wire.numbers(found))

    def agree(self, refusal: str, loss: Tensor | None = None) -> str:
        rows = self.wire.numbers(bool(refusal), 0.0 if loss is None else loss.item())
        if refusing := [rank for rank, row in enumerate(rows) if row[0]]:
            texts = self.wire.texts(refusal)
            return f"on rank {refusing[0]}, {texts[refusing[0]]}"
        values = [row[1] for row in rows]
        if max(values) - min(values) > SAME_LOSS * max(1e-3, *map(abs, values)):
            raise Diverged(
                f"expected the same loss on every rank, but got {', '.join(f'{value:.6g}' for value in values)}; "
                "a method has to add up what it knows of the batch through its `ranks`"
            )
        return ""

    # BatchNorm

    def synchronise(self, layers: Sequence[_BatchNorm]) -> None:
        for layer in layers:
            SharedBatchNorm(self, layer)

    def var_mean(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        return var_mean(activations, self) if self.acting else super().var_mean(activations)

    def average(self, statistics: Sequence[Tensor]) -> None:
        weight = self.own / self.total
        # An empty rank's statistics followed nobody's images, and may be anything.
        _replace(statistics, lambda flat: self.wire.add_up(flat.mul_(weight) if weight else flat.zero_()))


class _Sum(torch.autograd.Function):
    """The sum over the ranks. The gradient of each rank's part is that of the sum, which every rank has."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, wire: Wire) -> Tensor:
        return wire.add_up(own.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, size: int) -> Tensor:
        ctx.size = size
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None


def _why_bad(adapter: Any, images: Any) -> Exception | None:
    try:
        adapter.check(images)
        adapter.probe(images)
    except (TypeError, ValueError) as error:
        return error
    return None


def _take_apart(value: Any, name: str, tensors: dict[str, Tensor], words: list[str]) -> None:
    """Collects the tensors in a value of ours, however deep, and the words and numbers beside them."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu()
    elif is_dataclass(value):
        _take_apart({field.name: getattr(value, field.name) for field in fields(value)}, name, tensors, words)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _take_apart(value[key], f"{name}.{key}", tensors, words)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            _take_apart(part, f"{name}.{number}", tensors, words)
    elif isinstance(value, (str, int, float)):
        words.append(f"{name}={value!r}")


def _replace(tensors: Sequence[Tensor], change: Any) -> None:
    """Changes tensors of one kind as if they were one."""
    if tensors:
        with torch.no_grad():
            flat = change(torch.cat([tensor.flatten() for tensor in tensors]))
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))


def buckets_of(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in order, together as long as they are of one kind and not too many."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        own = parameter.numel() * parameter.element_size()
        if bucket and (size + own > BUCKET or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += own
    if bucket:
        yield bucket


def _differ(values: Iterable[object]) -> bool:
    return len(set(values)) > 1


def _listed(texts: list[str]) -> str:
    return "; ".join(f"on rank {rank} {text}" for rank, text in enumerate(texts))


def _short_hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
