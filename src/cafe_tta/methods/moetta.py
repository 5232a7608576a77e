"""MoETTA: every image takes one of several affine maps in each LayerNorm, chosen by a router.

MoETTA: test-time adaptation under mixed distribution shifts with MoE-LayerNorm, AAAI 2026.
Original: https://github.com/AnikiFan/MoETTA (MIT). Written from the formulas.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cafe_tta.adapter import Report
from cafe_tta.classifier import SplitClassifier
from cafe_tta.gradient import NothingToLearn
from cafe_tta.methods.selective import SelectiveAdapter, SelectiveConfig
from cafe_tta.options import option
from cafe_tta.traits import Traits


@dataclass(frozen=True)
class MoETTAConfig(SelectiveConfig):
    """Options of MoETTA.

    >>> MoETTAConfig().experts
    9
    """

    lr: float = 1e-3
    max_entropy: float | None = None
    experts: int = option(9, "E: affine maps of each layer, of which an image takes one.", least=1)
    balance: float = option(0.2, "Weight of the term that spreads the images over the experts.", least=0)
    seed: int = option(0, "Seed of the routers' initial weights.", least=0)


class MoETTA(SelectiveAdapter):
    """Minimises exp(E₀ - H)·H over images with at most the mean entropy of the stream; experts and routers move.

    In every LayerNorm and GroupNorm but the first, a router r = softmax(R x̄ + s) of the layer's mean input x̄ chooses an
    expert e = argmax r, whose weight and bias are added to the layer's own, times r_e / sg[r_e]. Experts begin at 0.
    Added to the loss: balance · ā · Σ_layers E Σ_e (mean r_e)(share of images that take e), ā the mean entropy.

    The mean entropy is a running one: the original keeps every output of the stream. E₀ follows the number of classes.

    >>> from cafe_tta import split_classifier
    >>> network = nn.Sequential(nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> adapter = MoETTA(split_classifier(network), config=MoETTAConfig(experts=2))
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([8, 3]), True)
    """

    name = "moetta"
    traits = Traits(
        "experts and routers in normalisation layers", smallest=(None, 1, 1), keeps="the mean entropy", licence="MIT"
    )
    Config = MoETTAConfig
    config: MoETTAConfig
    presets: ClassVar = {"cifar": MoETTAConfig(batch_size=200), "imagenet": MoETTAConfig()}

    def prepare(self, source: Any) -> None:
        kinds = (nn.LayerNorm, nn.GroupNorm)
        layers = [layer for layer in self.classifier.backbone.modules() if isinstance(layer, kinds) and _width(layer)]
        if len(layers) < 2:
            raise ValueError(
                f"moetta routes every LayerNorm and GroupNorm but the first, but this classifier has {len(layers)}"
            )
        generator = torch.Generator().manual_seed(self.config.seed)
        self.routed = nn.ModuleList(_Routed(layer, self.config.experts, generator) for layer in layers[1:])
        self.routed.to(self.classifier.head.weight)
        super().prepare(source)

    def moving(self) -> list[nn.Parameter]:
        return list(self.routed.parameters())

    def changing(self) -> dict[str, Tensor]:
        return super().changing() | {f"routed.{name}": p for name, p in self.routed.named_parameters()}

    def reset(self) -> None:
        super().reset()
        self.mean_entropy = nn.Buffer(torch.zeros((), dtype=torch.float64))
        self.entropies_seen = nn.Buffer(torch.zeros((), dtype=torch.long))  # batches that it averages over

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        try:
            return super().answer(images)
        finally:
            for layer in self._routed():
                layer.routing = None  # no graph outlives its batch

    def exported(self) -> SplitClassifier:
        raise ValueError("moetta routes each image to experts, which no ordinary model does: nothing to export")

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        entropies = self.uncertainty(logits)
        seen = self.entropies_seen + 1
        mean = self.mean_entropy + (entropies.detach().double().mean() - self.mean_entropy) / seen
        selected = entropies.detach() <= mean
        self.notes |= {"selected": float(selected.sum()), "mean_entropy": mean.item()}
        if not selected.any():
            raise NothingToLearn("every image has more than the mean entropy of the stream")
        self.mean_entropy, self.entropies_seen = nn.Buffer(mean), nn.Buffer(seen)
        entropy = (self.certainty(entropies[selected]) * entropies[selected]).mean()
        loads = torch.stack([self._load(layer) for layer in self._routed()]).sum()
        self.notes |= {"entropy": entropy.item(), "load": loads.item()}
        return entropy + (self.config.balance * mean.item()) * loads

    def _routed(self) -> "list[_Routed]":
        return [layer for layer in self.routed if isinstance(layer, _Routed)]

    def _load(self, layer: "_Routed") -> Tensor:
        """E Σ_e (mean r_e)(share of e): 1 where both are uniform, E where all images take one expert."""
        assert layer.routing is not None
        probs = layer.routing[self.kept]
        shares = torch.bincount(probs.argmax(1), minlength=probs.shape[1]).to(probs) / len(probs)
        return probs.shape[1] * (probs.mean(0) * shares).sum()


class _Routed(nn.Module):
    """The experts and the router of one layer, added to what the layer makes."""

    def __init__(self, layer: nn.LayerNorm | nn.GroupNorm, experts: int, generator: torch.Generator) -> None:
        super().__init__()
        width = _width(layer)
        self.router = nn.Linear(width, experts)
        with torch.no_grad():  # Xavier's normal initialisation, by seed
            self.router.weight.copy_(torch.randn(experts, width, generator=generator) * (2 / (width + experts)) ** 0.5)
            self.router.bias.zero_()
        self.weight = nn.Parameter(torch.zeros(experts, width))
        self.bias = nn.Parameter(torch.zeros(experts, width))
        self.routing: Tensor | None = None  # (B, E) of the last pass that has a graph
        layer.register_forward_hook(self._add)

    def _add(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs = args[0]
        width, last = self.weight.shape[1], inputs.dim() - 1
        plain = type(layer) is nn.LayerNorm  # libraries have LayerNorms of (B, C, H, W) that derive from it
        axis = last if plain or (isinstance(layer, nn.LayerNorm) and inputs.shape[1] != width) else 1
        others = [dim for dim in range(1, inputs.dim()) if dim != axis]
        routing = self.router(inputs.mean(others) if others else inputs).softmax(1)  # (B, E)
        if torch.is_grad_enabled():
            self.routing = routing
        chosen = routing.argmax(1)
        share = routing.gather(1, chosen[:, None])
        gate = share / share.detach()  # 1, with the router's gradient
        shape = [len(inputs), *(width if dim == axis else 1 for dim in range(1, inputs.dim()))]
        weight, bias = ((gate * part[chosen]).view(shape) for part in (self.weight, self.bias))
        return output + _normal(layer, inputs, axis) * weight + bias


def _width(layer: nn.Module) -> int:
    """Channels of a layer; 0 where there is no affine map along one dimension."""
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    assert isinstance(layer, nn.LayerNorm)
    return layer.normalized_shape[0] if len(layer.normalized_shape) == 1 else 0


def _normal(layer: nn.Module, inputs: Tensor, axis: int) -> Tensor:
    """What a layer makes without its weight and bias."""
    if isinstance(layer, nn.GroupNorm):
        return nn.functional.group_norm(inputs, layer.num_groups, None, None, layer.eps)
    assert isinstance(layer, nn.LayerNorm)
    moved = inputs.movedim(axis, -1)
    return nn.functional.layer_norm(moved, moved.shape[-1:], None, None, layer.eps).movedim(-1, axis)
