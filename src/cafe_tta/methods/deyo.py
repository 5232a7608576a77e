"""DeYO: entropy minimisation on images whose prediction depends on the object's shape.

Lee et al., Entropy is not enough for test-time adaptation: from the perspective of disentangled factors, ICLR 2024.
https://arxiv.org/abs/2403.07366. Original: https://github.com/Jhyun17/DeYO (MIT). Written from the formulas.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from cafe_tta.gradient import NothingToLearn
from cafe_tta.methods.selective import SelectiveAdapter, SelectiveConfig
from cafe_tta.options import option
from cafe_tta.traits import NORM, Traits

GRID = 4  # patches a side


@dataclass(frozen=True)
class DeYOConfig(SelectiveConfig):
    """Options of DeYO.

    >>> DeYOConfig().min_drop
    0.2
    """

    max_entropy: float | None = 0.5
    skip_last_stage: bool = True
    min_drop: float = option(
        0.2,
        "τ: the probability that the predicted class must lose when the shape is destroyed.",
        least=-1,
        most=1,
    )
    destroy: Literal["patches", "pixels", "centre"] = option(
        "patches", "How the shape is destroyed: 4 × 4 patches or pixels shuffled, or the centre covered."
    )


class DeYO(SelectiveAdapter):
    """Minimises w·H over certain images that lose probability d > τ when their shape is destroyed.

    w = exp(E₀ - H) + exp(d); d = p_c(x) - p_c(x'), where c is the predicted class and x' the image with its patches
    shuffled. BatchNorm normalises the copies x' among themselves.

    Thresholds follow the number of classes, which the original sometimes takes to be 1000. A single certain image is
    not learnt from where BatchNorm would have to normalise its copy alone: the original fails there.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 3)))
    >>> adapter = DeYO(classifier, config=DeYOConfig(max_entropy=1.0, min_drop=-1))
    >>> adapter(torch.rand(8, 3, 4, 4)).shape, adapter.report.stepped
    (torch.Size([8, 3]), True)
    """

    name = "deyo"
    traits = Traits(NORM, (1, 2), licence="MIT")
    Config = DeYOConfig
    config: DeYOConfig
    presets: ClassVar = {
        "cifar": DeYOConfig(batch_size=200, lr=1e-3, optimizer="adam"),
        "imagenet": DeYOConfig(),
        "imagenet-vit": DeYOConfig(lr=1e-3),
        "imagenet-separated": DeYOConfig(min_drop=0.3),
    }

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        probs = logits.detach().softmax(1)
        predicted = probs.argmax(1, keepdim=True)
        drops = (probs.gather(1, predicted) - self._destroyed_probs().gather(1, predicted)).squeeze(1)  # (B,)
        selected = drops > self.config.min_drop
        self.notes["selected"] = float(selected.sum())
        if not selected.any():
            raise NothingToLearn(
                f"no certain image loses enough when its shape is destroyed (min_drop={self.config.min_drop:g})"
            )
        entropies = self.uncertainty(logits[selected])
        weights = self.certainty(entropies) + drops[selected].exp()
        return (weights * entropies).mean()

    def _destroyed_probs(self) -> Tensor:
        """Predictions of the certain images without their shape."""
        images = self.batch[self.kept]
        if self.normaliser.needs_many and len(images) < self.config.min_batch:
            raise NothingToLearn(f"only {len(images)} certain image, too few for BatchNorm to normalise its copy with")
        destroyed = destroy_shape(images, self.config.destroy, self.generator())
        self.normaliser.adapting(update=False)
        with torch.no_grad():
            return self.run(destroyed)[1].softmax(1)


def destroy_shape(images: Tensor, how: Literal["patches", "pixels", "centre"], generator: torch.Generator) -> Tensor:
    """Images (B, C, H, W) without the shape of what they show.

    Every image has its 4 × 4 patches shuffled by itself; pixels are shuffled alike in all images; the centre, half the
    image high and wide, is covered with the mean colour.
    """
    if images.dim() != 4 or min(images.shape[2:]) < GRID:
        raise ValueError(
            f"expected images (batch, channels, height, width) of at least {GRID} × {GRID} pixels, whose shape can be "
            f"destroyed, but got shape {tuple(images.shape)}"
        )
    count, channels, height, width = images.shape
    if how == "pixels":
        order = torch.randperm(height * width, generator=generator).to(images.device)
        return images.flatten(2)[:, :, order].view_as(images)
    if how == "centre":
        covered = images.clone()
        mean = images.mean((2, 3), keepdim=True)
        covered[:, :, height // 4 : height // 4 + height // 2, width // 4 : width // 4 + width // 2] = mean
        return covered
    high, wide = height // GRID * GRID, width // GRID * GRID
    fitted = _resized(images, high, wide)
    patches = fitted.unfold(2, high // GRID, high // GRID).unfold(3, wide // GRID, wide // GRID)
    patches = patches.reshape(count, channels, GRID * GRID, high // GRID, wide // GRID)
    orders = torch.rand(count, GRID * GRID, generator=generator).argsort(1).to(images.device)
    shuffled = patches.gather(2, orders[:, None, :, None, None].expand_as(patches))
    grid = shuffled.view(count, channels, GRID, GRID, high // GRID, wide // GRID)
    return _resized(grid.transpose(3, 4).reshape(count, channels, high, wide), height, width)


def _resized(images: Tensor, height: int, width: int) -> Tensor:
    if images.shape[2:] == (height, width):
        return images
    return nn.functional.interpolate(images, (height, width), mode="bilinear", antialias=True)
