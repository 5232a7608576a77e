"""Many processes that adapt as one. Imported only where a process group is initialised.

Every rank computes the whole loss, from sums over all ranks, and back-propagates through its own images only; then the
gradients of the parameters are added up. That is the gradient of the whole batch, however it is spread: the loss sees a
batch only through sums (n, Σz, Σzzᵀ of each group; Σ of probabilities; histograms), and sums of parts add up.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from cafe_tta.gaussians import Moments, SourceGaussians
from cafe_tta.ranks import Diverged, RankError, Ranks
from cafe_tta.ranks.batchnorm import SharedBatchNorm, var_mean

CHECK_EVERY = 100  # batches between two comparisons of all that adapting changed
BUCKET = 32 << 20  # bytes of gradients that are sent together: a copy of so many is made
STAND_IN = 2  # images that stand in for none; one may have no variance
TEXT = 512  # bytes of an error message that the other ranks are told
LISTENING = 2.0  # seconds to find out who is lost
SAME_LOSS = 1e-3  # ranks whose losses differ by more, relatively, were not made alike

_current: "Together | None" = None


@contextmanager
def process_group(timeout: float, backend: str | None) -> Iterator[int]:
    """See `cafe_tta.ranks.joined`."""
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield dist.get_rank()
    finally:
        forget()
        dist.destroy_process_group()  # without it, half of the runs abort at exit


def of_process_group() -> "Together":
    """All adapters of a process share one: they take turns."""
    global _current
    world = dist.group.WORLD
    if _current is None or _current.world is not world:
        _current = Together(world)
    return _current


def forget() -> None:
    global _current
    _current = None


class Together(Ranks):
    """All ranks of torch's process group. They make the same calls in the same order."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.check_every = CHECK_EVERY
        self.sizes: list[int] = []  # images of each rank, in the batch at hand
        self.bytes = 0  # given to collectives by this rank since the batch began
        self._lost = ""
        # Small messages travel from where the backend takes them.
        self._place = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"

    # Beginning and end of a batch

    @contextmanager
    def step(self, adapter: Any, images: Tensor) -> Iterator[None]:
        if self._lost:
            raise RankError(f"this rank left the others: {self._lost}; start again from the last saved state")
        self.bytes = 0
        self._meet(adapter, images)
        self.acting = True
        try:
            if adapter.until_check == 0:
                adapter.until_check = self.check_every
                self._compare(adapter.state())
            adapter.until_check -= 1
            yield
        except BaseException as error:
            # The others wait in the middle of a step: whatever this rank said next would be misunderstood.
            if not getattr(error, "everywhere", False):
                self._lost = self._lost or f"{type(error).__name__}: {error}"
            raise
        finally:
            self.acting = False

    def _meet(self, adapter: Any, images: Tensor) -> None:
        """Every rank shows its part of the batch. Where one is bad, all ranks raise, and nothing has happened."""
        bad = _why_bad(adapter, images)
        number = f"batch {adapter.counters.batches} of {adapter.name} with {adapter.config}"
        shape = "nothing" if bad else f"images of shape {tuple(images.shape[1:])}"
        mine = [float(bad is not None), 0.0 if bad else float(len(images)), _short_hash(number), _short_hash(shape)]
        all_ranks = self._gather(mine)
        if len({row[2] for row in all_ranks}) > 1:
            self._lost = "the ranks are out of step"
            raise RankError(f"expected every rank to do the same, but {self._listed(number)}")
        if any(row[0] for row in all_ranks):
            texts = self._exchange(str(bad) if bad else "")
            if bad is not None:
                raise bad
            first = next(rank for rank, row in enumerate(all_ranks) if row[0])
            raise ValueError(f"rank {first} was given a bad batch, and so no rank adapts: {texts[first]}")
        if len({row[3] for row in all_ranks}) > 1:
            raise ValueError(f"expected images of the same shape on every rank, but {self._listed(shape)}")
        self.sizes = [int(row[1]) for row in all_ranks]
        if not self.total:
            raise ValueError("expected a batch of at least one image, but no rank has any")

    def _compare(self, state: Mapping[str, Tensor]) -> None:
        """Raises on every rank if anything that adapting changes is not the same everywhere, bit for bit."""
        digest = _digest(state)
        rows = self._gather([float(int(digest[i : i + 12], 16)) for i in range(0, 48, 12)])
        if other := [rank for rank, row in enumerate(rows) if row != rows[0]]:
            names = "rank" if len(other) == 1 else "ranks"
            raise Diverged(
                f"the ranks diverged: {names} {', '.join(map(str, other))} and rank 0 hold other weights, statistics or "
                "memory; load the last saved state on every rank, and use machines and versions of one kind"
            )

    def count(self, images: Tensor) -> int:
        return self.total if self.acting else len(images)

    def smallest(self, images: Tensor) -> int:
        return min(size for size in self.sizes if size) if self.acting else len(images)

    @property
    def own(self) -> int:
        """Images of this rank in the batch at hand."""
        return self.sizes[self.rank]

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

    def notes(self) -> dict[str, float]:
        return {"bytes": float(self.bytes)}

    # Sums

    def sum(self, *parts: Tensor) -> tuple[Tensor, ...]:
        flat = torch.cat([part.flatten() for part in parts]) if len(parts) > 1 else parts[0].flatten()
        total = _Sum.apply(flat, self)
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
        weight = self.own / self.total
        corners = [torch.tril_indices(width, width, device=m.mean.device) for m in own for width in m.mean.shape[1:]]
        # About the source's mean, which is 0 here, and in float64: nothing is lost by subtracting squares.
        parts = [weight * part.mean for part in own]
        for part, (i, j) in zip(own, corners, strict=True):
            parts.append(weight * (part.cov + part.mean[:, :, None] * part.mean[:, None, :])[:, i, j])
        if not len(features):  # the loss still has to reach the network, for what its layers do together
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
        widest = max(self.sizes)
        padded = torch.cat([rows, rows.new_zeros(widest - len(rows), *rows.shape[1:])])
        found = [torch.empty_like(padded) for _ in range(self.size)]
        self._call("all_gather", padded, lambda: dist.all_gather(found, padded.contiguous()))
        return torch.cat([part[:size] for part, size in zip(found, self.sizes, strict=True)])

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        for bucket in _buckets(parameters):
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self.add_up(flat)
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def add_up(self, tensor: Tensor) -> Tensor:
        """Adds a tensor up over the ranks, in place."""
        self._call("all_reduce", tensor, lambda: dist.all_reduce(tensor))
        return tensor

    # Decisions

    def any(self, found: bool) -> bool:
        return any(row[0] for row in self._gather([float(found)]))

    def agree(self, refusal: str, loss: Tensor | None = None) -> str:
        rows = self._gather([float(bool(refusal)), 0.0 if loss is None else loss.item()])
        refusing = [rank for rank, row in enumerate(rows) if row[0]]
        if refusing:
            texts = self._exchange(refusal)
            return f"rank {refusing[0]}: {texts[refusing[0]]}"
        values = [row[1] for row in rows]
        if max(values) - min(values) > SAME_LOSS * max(1e-3, *map(abs, values)):
            raise Diverged(
                "expected the same loss on every rank, but got "
                + ", ".join(f"{value:.6g}" for value in values)
                + "; were all adapters made with the same classifier, source and options?"
            )
        return ""

    # BatchNorm

    def synchronise(self, layers: Sequence[_BatchNorm]) -> None:
        for layer in layers:
            SharedBatchNorm(self, layer)

    def var_mean(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        return var_mean(activations, self) if self.acting else super().var_mean(activations)

    def average(self, statistics: Sequence[Tensor]) -> None:
        if not statistics:
            return
        flat = torch.cat([statistic.flatten() for statistic in statistics])
        self.add_up(flat.mul_(self.own / self.total) if self.own else flat.zero_())
        for statistic, average in zip(statistics, flat.split([s.numel() for s in statistics]), strict=True):
            statistic.copy_(average.view_as(statistic))

    # Messages

    def _gather(self, values: list[float]) -> list[list[float]]:
        """A few numbers of every rank."""
        own = torch.tensor(values, dtype=torch.float64, device=self._place)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._call("all_gather", own, lambda: dist.all_gather(found, own))
        return [row.tolist() for row in found]

    def _exchange(self, text: str) -> list[str]:
        """A short text of every rank. Only where something went wrong."""
        content = text.encode()[:TEXT].ljust(TEXT, b"\0")
        own = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._place)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._call("all_gather", own, lambda: dist.all_gather(found, own))
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in found]

    def _listed(self, text: str) -> str:
        return "; ".join(f"rank {rank} has {found}" for rank, found in enumerate(self._exchange(text)))

    def _call(self, name: str, tensor: Tensor, collective: Callable[[], object]) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        started = time.monotonic()
        try:
            collective()
        except RuntimeError as error:
            waited = time.monotonic() - started
            self._lost = self._lost or f"{name} failed"
            raise RankError(
                f"{self._who_is_lost()} ({name} failed after {waited:.0f} s); no rank can go on; "
                "start again from the last saved state, on as many ranks as you like"
            ) from error

    def _who_is_lost(self) -> str:
        """Those who are left write their names where torchrun keeps them; who does not, is lost."""
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"cafe-tta/alive/{self.rank}", "yes")
            until = time.monotonic() + LISTENING
            silent = [rank for rank in range(self.size) if rank != self.rank]
            while silent and time.monotonic() < until:
                silent = [rank for rank in silent if not store.check([f"cafe-tta/alive/{rank}"])]
                time.sleep(0.05)
        except (RuntimeError, ValueError):
            return "the other ranks cannot be reached"
        if not silent:
            return "the connection between the ranks broke"
        names = "rank" if len(silent) == 1 else "ranks"
        return f"{names} {', '.join(map(str, silent))} died or did not answer in time"


class _Sum(torch.autograd.Function):
    """The sum over the ranks. The gradient of each rank's part is that of the sum, which every rank has."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Together) -> Tensor:
        return ranks.add_up(own.clone())

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


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names and bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name}\0{tensor.dtype}\0{len(tensor)}\0".encode())
        if len(tensor):
            digest.update(tensor.view(torch.uint8).numpy())
    return digest.hexdigest()


def _why_bad(adapter: Any, images: Any) -> Exception | None:
    try:
        adapter.check(images)
        adapter.probe(images)
    except (TypeError, ValueError) as error:
        return error
    return None


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
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


def _short_hash(text: str) -> float:
    return float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))
