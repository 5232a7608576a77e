"""Mean and variance of each channel of activations (B, C, ...), with gradients, in as few passes as possible."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm


def var_mean(activations: Tensor) -> tuple[Tensor, Tensor]:
    """Variance (divided by n) and mean of each channel, with gradients."""
    return _VarMean.apply(activations)


def statistics(activations: Tensor) -> tuple[Tensor, Tensor]:
    """Variance (divided by n) and mean of each channel, without gradients."""
    if activations.device.type in ("cpu", "cuda"):  # BatchNorm's own kernel: many times as fast as `torch.var_mean`
        mean, var = torch.batch_norm_update_stats(activations.detach(), None, None, 0.0)
        return var, mean
    return torch.var_mean(activations.detach(), dims(activations), correction=0)


def by_statistics(activations: Tensor, by_var: Tensor, by_mean: Tensor, mean: Tensor, count: int) -> Tensor:
    """The gradient of activations, `count` per channel, from the gradients of their variance and mean."""
    slope = 2 * by_var / count
    constant = by_mean / count - slope * mean
    return torch.addcmul(spread(constant, activations), activations, spread(slope, activations))


def normalised_by_layer(activations: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """The identity in front of a layer that computes (x - mean) / √var with constants for `mean` and `var`.

    The layer's gradient is that of x alone; this backward pass adds those of `mean` and `var`, which follow from it.
    """
    return _NormalisedByLayer.apply(activations, mean, var)


def dims(activations: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [0, *range(2, activations.dim())]


def spread(values: Tensor, activations: Tensor) -> Tensor:
    """One value for each channel, reshaped to broadcast over the activations."""
    return values.view(1, -1, *([1] * (activations.dim() - 2)))


class _VarMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: Tensor) -> tuple[Tensor, Tensor]:
        var, mean = statistics(activations)
        ctx.save_for_backward(activations, mean)
        return var, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_var: Tensor, by_mean: Tensor) -> Tensor:
        activations, mean = ctx.saved_tensors
        return by_statistics(activations, by_var, by_mean, mean, activations.numel() // len(mean))


class _NormalisedByLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        ctx.save_for_backward(activations, mean, var)
        return activations.view_as(activations)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        activations, mean, var = ctx.saved_tensors
        # Σ grad and Σ grad·(x - mean) are what BatchNorm's bias and weight get, where the scale is 1.
        one = torch.ones_like(mean)
        _, product, total = torch.ops.aten.native_batch_norm_backward(
            grad, activations, one, None, None, mean, one, True, 0.0, (False, True, True)
        )
        return grad, -total, -0.5 * product / var


class NormalisedInput:
    """Hooks that hand a BatchNorm layer activations that are normalised already, by `normalise`.

    The layer has a mean of 0 and a variance of 1 meanwhile, and only scales and shifts. Hooks, not a layer of our own:
    libraries have BatchNorm layers that also apply the activation.
    """

    def __init__(self, layer: _BatchNorm, normalise: Callable[[Tensor], Tensor | None]) -> None:
        self.layer, self.normalise = layer, normalise  # which returns None to leave the layer alone
        self._had: tuple[Tensor | None, Tensor | None] | None = None
        layer.register_forward_pre_hook(self._before)
        layer.register_forward_hook(self._after, always_call=True)  # also where the layer fails

    def _before(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        normalised = self.normalise(args[0])
        if normalised is None:
            return None
        self._had = self.layer.running_mean, self.layer.running_var
        self.layer.running_mean = normalised.new_zeros(normalised.shape[1])
        self.layer.running_var = torch.full_like(self.layer.running_mean, 1 - self.layer.eps)
        return (normalised, *args[1:])

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._had is not None:
            self.layer.running_mean, self.layer.running_var = self._had
            self._had = None
