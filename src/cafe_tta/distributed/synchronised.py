"""Many processes that adapt as one. Imported only where a process group is initialised.

Every rank computes the whole loss from sums over all ranks and back-propagates through its own images only; then the
gradients of the parameters are summed. That is the gradient of the whole batch, however it is divided: the loss depends
on a batch only through sums (n, Σz, Σzzᵀ of each group; Σ of probabilities; histograms), and sums of parts add up.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from cafe_tta import storage
from cafe_tta.distributed.batchnorm import SharedBatchNorm, var_mean
from cafe_tta.distributed.communicator import Communicator, named
from cafe_tta.distributed.ranks import Diverged, RankError, Ranks
from cafe_tta.gaussians import Moments, SourceGaussians

CHECK_EVERY = 100  # batches between two comparisons of everything that adapting changes
BUCKET = 32 << 20  # bytes of gradients that are sent together: they are copied into one tensor
STAND_IN = 2  # placeholder images of an empty rank; the activations of a single one may have no variance
LOSS_TOLERANCE = 1e-3  # relative; ranks whose losses differ by more did not compute the same

_current: "SynchronisedRanks | None" = None


@contextmanager
def process_group(timeout: float, backend: str | None) -> Iterator[int]:
    """See `cafe_tta.distributed.joined`."""
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


def of_process_group() -> "SynchronisedRanks":
    """The ranks of the process group. All adapters of a process share them: only one takes a step at a time."""
    global _current
    if _current is None or _current.communicator.world is not dist.group.WORLD:
        _current = SynchronisedRanks(Communicator(dist.group.WORLD))
    return _current


class SynchronisedRanks(Ranks):
    """All ranks of torch's process group. They make the same calls in the same order."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.size = communicator.size
        self.check_every = CHECK_EVERY
        self.sizes: list[int] = []  # images of each rank in the current batch

    def lockstep(self, made_of: Any) -> "Lockstep":
        return Lockstep(self, made_of)

    # The current batch

    def count(self, images: Tensor) -> int:
        return self.total if self.in_step else len(images)

    def smallest(self, images: Tensor) -> int:
        return min(size for size in self.sizes if size) if self.in_step else len(images)

    @property
    def own(self) -> int:
        """Images of this rank in the current batch."""
        return self.sizes[self.communicator.rank]

    @property
    def total(self) -> int:
        """Images of all ranks in the current batch."""
        return sum(self.sizes)

    @property
    def present(self) -> int:
        """Images that pass through the network on this rank: its own, or placeholders if it has none."""
        return self.own or STAND_IN

    def stand_in(self, images: Tensor) -> Tensor:
        """Many networks cannot process an empty batch. The placeholders are neither black nor all the same."""
        shape = (STAND_IN, *images.shape[1:])
        numbers = torch.arange(math.prod(shape), dtype=images.dtype, device=images.device)
        return numbers.div_(len(numbers)).sub_(0.5).view(shape)

    # Sums

    def sum(self, *parts: Tensor) -> tuple[Tensor, ...]:
        total = _Sum.apply(torch.cat([part.flatten() for part in parts]), self.communicator)
        return tuple(t.view(p.shape) for t, p in zip(total.split([p.numel() for p in parts]), parts, strict=True))

    def mean(self, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(part / self.total for part in self.sum(*(value.sum(0) for value in values)))

    def share(self, value: Tensor) -> Tensor:
        return _Share.apply(value, self.size)

    def moments(self, gaussians: SourceGaussians, features: Tensor) -> list[Moments]:
        """One sum of the lower triangles of the groups' blocks: never D×D."""
        if len(features):
            own = gaussians.moments(features)
        else:
            own = gaussians.moments(features.new_zeros(1, features.shape[1]))
        corners = [torch.tril_indices(width, width, device=m.mean.device) for m in own for width in m.mean.shape[1:]]
        # About the source's mean, which is 0 here, and in float64: subtracting squares loses no precision.
        weight = self.own / self.total
        parts = [weight * part.mean for part in own]
        for part, (i, j) in zip(own, corners, strict=True):
            parts.append(weight * (part.cov + part.mean[:, :, None] * part.mean[:, None, :])[:, i, j])
        if not len(features):  # the backward pass still has to reach the layers that communicate
            parts[0] = parts[0] + features.sum().to(parts[0])
        sums = self.sum(*parts)
        moments = []
        for part, mean, lower, (i, j) in zip(own, sums[: len(own)], sums[len(own) :], corners, strict=True):
            index = torch.zeros(part.cov.shape[1:], dtype=torch.long, device=lower.device)
            index[i, j] = index[j, i] = torch.arange(len(i), device=lower.device)
            cov = lower[:, index] - mean[:, :, None] * mean[:, None, :]
            moments.append(Moments(torch.full_like(part.count, self.total), mean, cov))
        return moments

    def gather(self, rows: Tensor) -> Tensor:
        if not self.in_step:
            return rows
        padded = torch.cat([rows, rows.new_zeros(max(self.sizes) - len(rows), *rows.shape[1:])])
        gathered = self.communicator.all_gather(padded)
        return torch.cat([part[:size] for part, size in zip(gathered, self.sizes, strict=True)])

    def own_rows(self, rows: Tensor) -> Tensor:
        start = sum(self.sizes[: self.communicator.rank])
        return rows[start : start + self.own] if self.in_step else rows

    def own_part(self, rows: Tensor) -> Tensor:
        return rows[: self.own] if self.in_step else rows

    def reduce(self, part: Tensor) -> Tensor:
        return _Reduce.apply(part, self.communicator) if self.in_step else part

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        for bucket in buckets_of(parameters):
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            _replace(gradients, self.communicator.all_reduce)

    # Decisions

    def any(self, condition: bool) -> bool:
        return any(row[0] for row in self.communicator.gather_numbers(condition))

    def agree(self, refusal: str, loss: Tensor | None = None) -> str:
        rows = self.communicator.gather_numbers(bool(refusal), 0.0 if loss is None else loss.item())
        if refusing := [rank for rank, row in enumerate(rows) if row[0]]:
            texts = self.communicator.gather_texts(refusal)
            return f"on rank {refusing[0]}, {texts[refusing[0]]}"
        values = [row[1] for row in rows]
        if max(values) - min(values) > LOSS_TOLERANCE * max(1e-3, *map(abs, values)):
            raise Diverged(
                f"expected the same loss on every rank, but got {', '.join(f'{value:.6g}' for value in values)}; "
                "a method has to sum what it computes from the batch through its `ranks`"
            )
        return ""

    # BatchNorm

    def synchronise(self, layers: Sequence[_BatchNorm]) -> None:
        for layer in layers:
            SharedBatchNorm(self, layer)

    def var_mean(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        return var_mean(activations, self) if self.in_step else super().var_mean(activations)

    def average(self, statistics: Sequence[Tensor]) -> None:
        weight = self.own / self.total
        # The statistics of an empty rank followed placeholders, and may be anything.
        _replace(statistics, lambda flat: self.communicator.all_reduce(flat.mul_(weight) if weight else flat.zero_()))


class Lockstep:
    """Keeps one adapter in step with its counterparts on the other ranks, which must not differ from it in anything."""

    def __init__(self, ranks: SynchronisedRanks, made_of: Any) -> None:
        self.ranks = ranks
        self.fingerprint = _fingerprint(made_of)
        self._until_comparison = 0  # batches until the ranks compare their states
        self._readable: set[tuple[torch.Size, torch.dtype]] = set()  # images that the classifier is known to accept

    @contextmanager
    def step(
        self,
        doing: str,
        images: Tensor,
        check: Callable[[Tensor], None],
        predict: Callable[[Tensor], Tensor],
        state: Callable[[], Mapping[str, Tensor]],
    ) -> Iterator[Communicator]:
        """Surrounds one adaptation step: no rank begins before every rank has a good part of the batch.

        `doing` describes the step in words, and has to be the same on every rank; `check` and `predict` raise on images
        that are not acceptable; `state` gives the tensors that have to be the same on every rank.
        """
        ranks, communicator = self.ranks, self.ranks.communicator
        if communicator.broken:
            raise RankError(f"this rank left the others: {communicator.broken}; start again from the last saved state")
        communicator.bytes = 0
        ranks.sizes = self._exchange_sizes(doing, images, self._why_bad(images, check, predict))
        ranks.in_step = True
        try:
            if self._until_comparison == 0:
                self._until_comparison = ranks.check_every
                self._compare(state())
            self._until_comparison -= 1
            yield communicator
        except BaseException as error:
            if not isinstance(error, Diverged):  # which every rank raises at the same moment
                # The others wait in the middle of a step: they would misinterpret anything that this rank sends next.
                communicator.broken = communicator.broken or f"{type(error).__name__}: {error}"
            raise
        finally:
            ranks.in_step = False

    def compare_next(self) -> None:
        """Compares the states of the ranks at the next step, as at the first."""
        self._until_comparison = 0

    def _why_bad(
        self, images: Tensor, check: Callable[[Tensor], None], predict: Callable[[Tensor], Tensor]
    ) -> Exception | None:
        """Finds bad images before the step, by trying each new shape once: in a step, the others would wait."""
        try:
            check(images)
            kind = (images.shape[1:], images.dtype)
            if kind not in self._readable:
                predict(self.ranks.stand_in(images))
                self._readable.add(kind)
        except (TypeError, ValueError) as error:
            return error
        return None

    def _exchange_sizes(self, doing: str, images: Tensor, bad: Exception | None) -> list[int]:
        """The number of images on each rank. If those of one rank are bad, all ranks raise, and nothing changes."""
        communicator = self.ranks.communicator
        shape = "" if bad else f"images of shape {tuple(images.shape[1:])}"
        rows = communicator.gather_numbers(bool(bad), 0 if bad else len(images), _short_hash(doing), _short_hash(shape))
        if _differ(row[2] for row in rows):
            texts = communicator.gather_texts(doing)
            raise Diverged(f"expected every rank to do the same, but got {_listed(texts)}")
        if any(row[0] for row in rows):
            texts = communicator.gather_texts(str(bad or ""))
            if bad:
                raise bad
            first = next(rank for rank, row in enumerate(rows) if row[0])
            raise ValueError(f"rank {first} was given a bad batch, and so no rank adapts: {texts[first]}")
        if _differ(row[3] for row in rows):
            texts = communicator.gather_texts(shape)
            raise ValueError(f"expected images of the same shape on every rank, but got {_listed(texts)}")
        sizes = [int(row[1]) for row in rows]
        if not sum(sizes):
            raise ValueError("expected a batch of at least one image, but no rank has any")
        return sizes

    def _compare(self, state: Mapping[str, Tensor]) -> None:
        """Raises on every rank unless the state is the same everywhere, bit for bit."""
        digest = storage.checksum({name: tensor.detach().cpu() for name, tensor in state.items()})
        rows = self.ranks.communicator.gather_numbers(*(int(digest[i : i + 12], 16) for i in range(0, 48, 12)))
        if other := [rank for rank, row in enumerate(rows) if row != rows[0]]:
            raise Diverged(
                f"the ranks diverged: {named(other)} and rank 0 hold other weights, statistics or memory; "
                "load the last saved state on every rank, and use machines and versions of one kind"
            )


class _Sum(torch.autograd.Function):
    """The sum over the ranks. The gradient of each rank's part is that of the sum, which every rank computes."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, communicator: Communicator) -> Tensor:
        return communicator.all_reduce(own.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Reduce(torch.autograd.Function):
    """The sum over the ranks, of which every rank makes its own use: each has a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return communicator.all_reduce(own.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.communicator.all_reduce(grad.clone()), None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, size: int) -> Tensor:
        ctx.size = size
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None


def _fingerprint(made_of: Any) -> str:
    tensors: dict[str, Tensor] = {}
    values: list[str] = []
    _collect(made_of, "", tensors, values)
    return storage.checksum(tensors, text="\n".join(values))[:8]


def _collect(value: Any, name: str, tensors: dict[str, Tensor], values: list[str]) -> None:
    """Collects the tensors in a nested value, and the texts and numbers beside them."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu()
    elif is_dataclass(value):
        _collect({field.name: getattr(value, field.name) for field in fields(value)}, name, tensors, values)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _collect(value[key], f"{name}.{key}", tensors, values)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            _collect(part, f"{name}.{number}", tensors, values)
    elif isinstance(value, (str, int, float)):
        values.append(f"{name}={value!r}")


def _replace(tensors: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> None:
    """Changes tensors of one dtype in place, as if they were one."""
    if tensors:
        with torch.no_grad():
            flat = change(torch.cat([tensor.flatten() for tensor in tensors]))
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))


def buckets_of(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive parameters of one dtype, up to `BUCKET` bytes of them together."""
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
