"""BatchNorm over the batch of all ranks, on any device; torch's SyncBatchNorm works on GPUs only."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from cafe_tta import channels

if TYPE_CHECKING:
    from cafe_tta.distributed.synchronised import SynchronisedRanks


class SharedBatchNorm:
    """Hooks that make a BatchNorm layer normalise with the batch of all ranks whenever it would use its own batch.

    The layer receives activations that are normalised already, and statistics that leave them as they are. Hooks, not
    a layer of our own, because libraries have BatchNorm layers that also apply the activation.
    """

    def __init__(self, ranks: "SynchronisedRanks", layer: _BatchNorm) -> None:
        self.ranks = ranks
        self._saved: tuple[bool, Tensor | None, Tensor | None] | None = None  # mode and statistics of the layer
        layer.register_forward_pre_hook(self._before)
        layer.register_forward_hook(self._after, always_call=True)  # also if the layer fails

    def _before(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        assert isinstance(layer, _BatchNorm)
        if not self.ranks.in_step or not (layer.training or layer.running_mean is None):
            return None
        normalised, mean, var, count = _Normalise.apply(args[0], layer.eps, self.ranks)
        if layer.training and layer.track_running_stats and layer.running_mean is not None:
            _follow(layer, mean, var, count)
        self._saved = layer.training, layer.running_mean, layer.running_var
        layer.training = False
        layer.running_mean, layer.running_var = torch.zeros_like(mean), torch.full_like(var, 1 - layer.eps)
        return (normalised, *args[1:])

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._saved is not None and isinstance(layer, _BatchNorm):
            layer.training, layer.running_mean, layer.running_var = self._saved
            self._saved = None


def var_mean(activations: Tensor, ranks: "SynchronisedRanks") -> tuple[Tensor, Tensor]:
    """Variance and mean of each channel over the batch of all ranks, with gradients."""
    return _VarMean.apply(activations, ranks)


def _follow(layer: _BatchNorm, mean: Tensor, var: Tensor, count: int) -> None:
    """Moves the running statistics as torch does: with the unbiased variance, by momentum or as an average."""
    assert layer.running_mean is not None and layer.running_var is not None
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    factor = layer.momentum
    if factor is None:
        factor = 1 / float(layer.num_batches_tracked)  # type: ignore[arg-type] # it is there where momentum is None
    with torch.no_grad():
        layer.running_mean.lerp_(mean, factor)
        layer.running_var.lerp_(var * (count / (count - 1)), factor)


class _Normalise(torch.autograd.Function):
    """(x - mean) / √(var + ε) with mean and variance of each channel over all ranks. Also gives these, and n."""

    @staticmethod
    def forward(
        ctx: Any, activations: Tensor, eps: float, ranks: "SynchronisedRanks"
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        mean, var, count = _statistics(activations, ranks)
        if count < 2:
            raise ValueError("expected more than one value in each channel to normalise with, but got one")
        normalised = nn.functional.batch_norm(activations, mean, var, eps=eps)
        ctx.save_for_backward(normalised, (var + eps).rsqrt())
        ctx.ranks, ctx.count, ctx.empty = ranks, count, not ranks.own
        ctx.mark_non_differentiable(mean, var)
        return normalised, mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        normalised, scale = ctx.saved_tensors
        dims = channels.dims(grad)
        sums = torch.cat([grad.sum(dims), (grad * normalised).sum(dims)]).to(_wide(grad))
        sums = ctx.ranks.communicator.all_reduce(_own(sums, ctx.empty))
        by_mean, by_var = sums.div_(ctx.count).to(grad.dtype).chunk(2)
        if ctx.empty:  # placeholders are not part of the batch
            return grad * channels.spread(scale, grad), None, None
        correction = torch.addcmul(channels.spread(by_mean, grad), normalised, channels.spread(by_var, grad))
        return (grad - correction).mul_(channels.spread(scale, grad)), None, None


class _VarMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: Tensor, ranks: "SynchronisedRanks") -> tuple[Tensor, Tensor]:
        mean, var, count = _statistics(activations, ranks)
        ctx.save_for_backward(activations, mean)
        ctx.ranks, ctx.count, ctx.empty = ranks, count, not ranks.own
        return var, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_var: Tensor, by_mean: Tensor) -> tuple[Tensor, None]:
        activations, mean = ctx.saved_tensors
        # The statistics affect the activations of every rank, and every rank has its own part of the gradient.
        sums = ctx.ranks.communicator.all_reduce(torch.cat([by_mean, by_var]).to(_wide(activations)))
        if ctx.empty:
            return torch.zeros_like(activations), None
        by_mean, by_var = sums.div_(ctx.count).to(activations.dtype).chunk(2)
        return channels.by_statistics(activations, by_var, by_mean, mean, 1), None


def _statistics(activations: Tensor, ranks: "SynchronisedRanks") -> tuple[Tensor, Tensor, int]:
    """Mean and variance (divided by n) of each channel, and n, over all ranks: one sum of 2C numbers."""
    var, mean = channels.statistics(activations)  # (C,)
    wide = _wide(activations)
    mean, var = mean.to(wide), var.to(wide)
    # In float64, squares may be subtracted. All images are of one shape: a rank's part of them is its part of n.
    sums = torch.cat([mean, var + mean.square()]) * (ranks.own / ranks.total)
    mean, square = ranks.communicator.all_reduce(_own(sums, not ranks.own)).chunk(2)
    var = (square - mean.square()).clamp_(min=0)
    count = activations.numel() // activations.shape[1] * ranks.total // ranks.present
    return mean.to(activations.dtype), var.to(activations.dtype), count


def _own(sums: Tensor, empty: bool) -> Tensor:
    return torch.zeros_like(sums) if empty else sums


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # MPS has no float64
