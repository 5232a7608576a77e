"""What the BatchNorm layers of a classifier normalise with: the batch, the source, a blend, or images like each one."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from cafe_tta import channels
from cafe_tta.distributed import ALONE, Ranks
from cafe_tta.mixture import Mixture
from cafe_tta.unmixing import Unmixer

Normalisation = Literal["batch", "source", "blend", "unmix", "slow", "unmix-tns"]
NORM_LAYERS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def batchnorm_layers(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def is_trained(layer: _BatchNorm) -> bool:
    """Whether a BatchNorm layer has running statistics that are not those of a new layer."""
    mean, var = layer.running_mean, layer.running_var
    return mean is not None and var is not None and bool((mean != 0).any() or (var != 1).any())


def norm_parameters(module: nn.Module, skip: re.Pattern[str] | None = None) -> list[nn.Parameter]:
    """Weight and bias of every normalisation layer, but of those whose name has a match of `skip`."""
    named = [(name.removeprefix("model."), layer) for name, layer in module.named_modules()]
    layers = [layer for name, layer in named if isinstance(layer, NORM_LAYERS) and not (skip and skip.search(name))]
    return [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


def keep_group_norm_from_crashing(module: nn.Module) -> list[RemovableHandle]:
    """Hooks that give GroupNorm a contiguous input where it needs no gradient but the layer's weight does.

    With a channels-last input on a CPU, PyTorch 2.13's backward pass ends the process there (a segmentation fault).
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.GroupNorm)]
    return [layer.register_forward_pre_hook(_contiguous_input) for layer in layers]


def _contiguous_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    harmless = inputs[0].requires_grad or not torch.is_grad_enabled()
    return None if harmless else (inputs[0].contiguous(), *inputs[1:])


class Normaliser:
    """Switches a classifier between adapting and evaluating, regardless of the caller's train() and eval().

    `batch`: normalise with the batch and let the running statistics follow it (the paper). `source`: statistics stay as
    trained. `blend`: (1 - w)·source + w·batch, with a fixed weight w, or w = n / (prior + n) for a batch of n images;
    the running statistics follow the blend. `slow`: (1 - w)·running + w·batch, which the running statistics become
    (RoTTA). `unmix`: each image is normalised with the images of the stream that are corrupted like it, also when
    evaluating (see `unmixing`); `unmix-tns`: with a mixture of components (see `mixture`). With the others, evaluating
    uses the running statistics. Only BatchNorm is ever in training mode: dropout stays off.

    Where several ranks adapt as one, the batch is that of all ranks; unless `shared` is off: then each rank normalises
    with its own images, and the running statistics are averaged over the ranks.
    """

    def __init__(
        self,
        classifier: nn.Module,
        kind: Normalisation,
        weight: float = 0.5,
        prior: float | None = None,
        ranks: Ranks = ALONE,
        shared: bool = True,
        unmixer: Unmixer | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        self.kind = kind
        self.unmixer = unmixer
        self.by_image: Unmixer | Mixture | None = unmixer or mixture  # what normalises each image by itself
        self.weight = weight
        self.prior = prior
        self.layers = batchnorm_layers(classifier)
        self._classifier = classifier
        self.ranks = ranks
        self.shared = shared
        self._to_average = False  # whether the running statistics differ between ranks after this pass
        self.blending = False  # read by the layers' hooks
        self.updating = True
        self.as_adapting = False  # whether `evaluating` normalises as `adapting` does, while nothing follows the pass
        if kind != "batch" and any(layer.running_mean is None for layer in self.layers):
            raise ValueError(f"normalisation={kind!r} needs source statistics, but a BatchNorm layer tracks none")
        if kind in ("blend", "slow"):
            for layer in self.layers:
                _Blend(self, layer)
        if kind == "batch" and shared:
            ranks.synchronise(self.layers)

    @property
    def uses_batch(self) -> bool:
        """Whether BatchNorm normalises with the batch, and its running statistics follow."""
        return self.kind in ("batch", "blend", "slow") and bool(self.layers)

    @property
    def needs_many(self) -> bool:
        """Whether a single image is too little to normalise with."""
        return self.kind in ("batch", "blend") and bool(self.layers)

    def adapting(self, update: bool = True) -> None:
        """The next pass normalises as `kind` says; running statistics follow it, unless `update` is off."""
        _evaluate(self._classifier)
        self.blending = self.kind in ("blend", "slow")
        self.updating = update
        self._to_average = update and not self.shared and self.uses_batch and self.ranks.in_step
        if self.kind == "batch":
            for layer in self.layers:
                layer.training = True
                layer.track_running_stats = update and layer.running_mean is not None

    def evaluating(self) -> None:
        """The next pass normalises with the running statistics."""
        if self.as_adapting:
            self.adapting(update=False)
        else:
            _evaluate(self._classifier)
            self.blending = self._to_average = self.updating = False

    def look(self, images: Tensor) -> None:
        """Is shown the images of every pass before it begins."""
        if self.by_image is not None:
            self.by_image.look(images, self.updating)

    def answered(self, logits: Tensor) -> bool:
        """Is shown the answers of every pass. True where they show that other statistics should have been used."""
        return self.unmixer is not None and self.unmixer.answered(logits)

    def leave(self, model: nn.Module) -> None:
        """Makes the layers of a copy of the classifier ordinary ones: without hooks, and with statistics of their own.

        For `unmix`, these are the statistics of the largest cluster.
        """
        if self.by_image is not None and self.unmixer is None:
            raise ValueError(
                f"normalisation={self.kind!r} normalises each image with statistics of its own, which an ordinary "
                "model cannot do: there is none to export"
            )
        layers = batchnorm_layers(model)
        for layer in layers:
            layer.__dict__.pop("forward", None)  # that of unmixing
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)
        if self.unmixer is not None:
            self.unmixer.use_largest(layers)

    def reset(self) -> None:
        """Forgets the stream, but for the running statistics, which the classifier has."""
        if self.by_image is not None:
            self.by_image.reset()

    @property
    def memory(self) -> Mapping[str, Tensor]:
        """What it remembers of the stream beside the running statistics: replaced by every pass, never changed."""
        return {} if self.by_image is None else self.by_image.memory

    @memory.setter
    def memory(self, tensors: Mapping[str, Tensor]) -> None:
        if self.by_image is not None:
            self.by_image.memory = dict(tensors)

    def average_statistics(self) -> None:
        """Averages the running statistics of ranks that normalised separately, after a pass and its backward pass."""
        if self._to_average:
            self._to_average = False
            self.ranks.average(self._statistics())

    def batch_size(self, images: Tensor) -> int:
        """Images that are normalised together: of the rank with the fewest, where each has its own."""
        return self.ranks.count(images) if self.shared else self.ranks.smallest(images)

    def statistics_are_finite(self) -> bool:
        """Whether the running statistics can be used: huge activations may be normalised well, and overflow here."""
        statistics = self._statistics()
        if not statistics:
            return True
        return bool(torch.isfinite(torch.stack(torch._foreach_norm(statistics, float("inf")))).all())

    def _statistics(self) -> list[Tensor]:
        return [s for layer in self.layers for s in (layer.running_mean, layer.running_var) if s is not None]

    def blend_weight(self, batch: int) -> float:
        return self.weight if self.prior is None else batch / (self.prior + batch)


def _evaluate(module: nn.Module) -> None:
    """Evaluation mode, at the price of a look where it is on already: setting it takes half a millisecond."""
    if any(child.training for child in module.modules()):
        module.eval()


def _is_ours(hook: Any) -> bool:
    owner = getattr(hook, "__self__", None)
    return (hook if owner is None else type(owner)).__module__.startswith("cafe_tta.")


class _Blend:
    """Hooks that let a layer normalise with the blend in place of its running statistics.

    Hooks, not a layer of our own: libraries have BatchNorm layers that also apply the activation.
    """

    def __init__(self, normaliser: Normaliser, layer: _BatchNorm) -> None:
        assert layer.running_mean is not None and layer.running_var is not None
        self.normaliser = normaliser
        self.source_mean = layer.running_mean.clone()
        self.source_var = layer.running_var.clone()
        self._had: tuple[Tensor, Tensor] | None = None  # the layer's running statistics, while it has the blend
        layer.register_forward_pre_hook(self._before)
        layer.register_forward_hook(self._after, always_call=True)  # also where the layer fails

    def _before(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not self.normaliser.blending:
            return None
        assert isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.running_var is not None
        activations = args[0]  # (B, C, ...)
        ranks = self.normaliser.ranks if self.normaliser.shared else ALONE
        var, mean = ranks.var_mean(activations)  # (C,)
        weight = self.normaliser.blend_weight(ranks.count(activations))
        slow = self.normaliser.kind == "slow"
        base = (layer.running_mean, layer.running_var) if slow else (self.source_mean, self.source_var)
        mean, var = torch.lerp(base[0].to(mean), mean, weight), torch.lerp(base[1].to(var), var, weight)
        if self.normaliser.updating:
            with torch.no_grad():  # `slow`: the running statistics become the blend
                layer.running_mean.lerp_(mean, 1.0 if slow else layer.momentum or 0.1)
                layer.running_var.lerp_(var, 1.0 if slow else layer.momentum or 0.1)
        self._had = layer.running_mean, layer.running_var
        layer.running_mean, layer.running_var = mean.detach(), var.detach()
        return (channels.normalised_by_layer(activations, mean, var + layer.eps), *args[1:])

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._had is not None and isinstance(layer, _BatchNorm):
            layer.running_mean, layer.running_var = self._had
            self._had = None
