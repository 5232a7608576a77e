"""Random changes of images that do not change what they show: CoTTA's, which RoTTA, ROID and CMF also use.

In random order brightness, contrast, saturation, hue and gamma; then a rotation with translation and zoom, a little
blur, a mirror image, a little noise. One draw for the whole batch, but for the noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

BRIGHTNESS, CONTRAST, SATURATION, HUE, GAMMA = (0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06), (0.7, 1.3)
ROTATION, ZOOM, SHIFT = 15.0, (0.9, 1.1), 1 / 8  # degrees; factors; share of the image's side
BLUR, NOISE = (0.001, 0.5), 0.005
_GREY = (0.2989, 0.587, 0.114)


@dataclass(frozen=True)
class Augmentation:
    """Augments batches (B, C, H, W) of normalised images.

    The changes are made to pixels between 0 and 1. `mean` and `std` are what the images were normalised with; without
    them, the lowest and highest value of each channel in the batch are taken for 0 and 1.

    >>> images = torch.rand(4, 3, 8, 8)
    >>> augmented = Augmentation()(images, torch.Generator().manual_seed(0))
    >>> augmented.shape, torch.equal(augmented, images)
    (torch.Size([4, 3, 8, 8]), False)
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    edges: Literal["border", "reflection"] = "border"  # what lies beyond the image
    blur: bool = True
    noise: float = NOISE

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        if images.dim() != 4:
            raise ValueError(
                f"expected images (batch, channels, height, width) to augment, but got shape {tuple(images.shape)}"
            )
        low, span = self._range(images)
        pixels = ((images - low) / span).clamp(0, 1)
        pixels = _colours(pixels, generator)
        pixels = self._moved(pixels, generator)
        if _uniform(generator, 0, 1) < 0.5:
            pixels = pixels.flip(3)
        if self.noise:
            pixels = pixels + self.noise * torch.randn(pixels.shape, generator=generator).to(pixels)
        return pixels.clamp(0, 1) * span + low

    def _range(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The values of a pixel of 0, and what lies between it and a pixel of 1."""
        if self.mean is None or self.std is None:
            low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
            return low, (high - low).clamp_min(torch.finfo(images.dtype).eps)
        if not len(self.mean) == len(self.std) == images.shape[1]:
            raise ValueError(
                f"expected `pixel_mean` and `pixel_std` of {images.shape[1]} channels, "
                f"but got {len(self.mean)} and {len(self.std)}"
            )
        mean, std = (torch.tensor(v, dtype=images.dtype, device=images.device) for v in (self.mean, self.std))
        return (-mean / std).view(1, -1, 1, 1), (1 / std).view(1, -1, 1, 1)

    def _moved(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Rotated, shifted, zoomed and blurred: bilinear."""
        height, width = pixels.shape[2:]
        angle = math.radians(_uniform(generator, -ROTATION, ROTATION))
        down, right = (_uniform(generator, -SHIFT, SHIFT) * side for side in (height, width))
        zoom = _uniform(generator, *ZOOM)
        sigma = _uniform(generator, *BLUR) if self.blur else 0.0
        more = 2 if self.blur else 0  # pixels a side that the blur takes away again
        y, x = torch.meshgrid(
            torch.arange(-more, height + more, device=pixels.device, dtype=pixels.dtype) - (height - 1) / 2 - down,
            torch.arange(-more, width + more, device=pixels.device, dtype=pixels.dtype) - (width - 1) / 2 - right,
            indexing="ij",
        )
        cos, sin = math.cos(angle) / zoom, math.sin(angle) / zoom
        across, along = cos * x + sin * y, cos * y - sin * x  # where each pixel comes from, from the centre
        grid = torch.stack([across * 2 / max(width - 1, 1), along * 2 / max(height - 1, 1)], 2)
        grid = grid.expand(len(pixels), -1, -1, -1)
        moved = nn.functional.grid_sample(pixels, grid, padding_mode=self.edges, align_corners=True)
        return _blurred(moved, sigma) if self.blur else moved


def _colours(pixels: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(5, generator=generator).tolist()
    bounds = (BRIGHTNESS, CONTRAST, SATURATION, HUE, GAMMA)
    amounts = [_uniform(generator, *bound) for bound in bounds]
    for change in order:
        amount = amounts[change]
        if change == 0:
            pixels = pixels * amount
        elif change == 1:
            pixels = torch.lerp(_grey(pixels).mean((2, 3), keepdim=True), pixels, amount)
        elif change == 2:
            pixels = torch.lerp(_grey(pixels), pixels, amount)
        elif change == 3 and pixels.shape[1] == 3:
            pixels = shifted_hue(pixels, amount)
        elif change == 4:
            pixels = pixels.clamp_min(1e-8) ** amount
        pixels = pixels.clamp(0, 1)
    return pixels


def shifted_hue(pixels: Tensor, amount: float) -> Tensor:
    """Pixels (B, 3, H, W) with their hue, a number on a circle from 0 to 1, shifted.

    >>> red = torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1)
    >>> shifted_hue(red, 1 / 3).flatten().round().tolist()  # green
    [0.0, 1.0, 0.0]
    """
    value, largest = pixels.max(1)
    chroma = value - pixels.amin(1)
    red, green, blue = pixels.unbind(1)
    by = torch.where(chroma > 0, chroma, torch.ones_like(chroma))
    sixths = torch.stack([(green - blue) / by, (blue - red) / by + 2, (red - green) / by + 4], 1)
    hue = sixths.gather(1, largest[:, None]).squeeze(1) + 6 * amount  # in sixths of the circle
    # Each channel falls from `value` to `value - chroma` and rises again along the circle.
    channels = [value - chroma * _tent((hue + start) % 6) for start in (5.0, 3.0, 1.0)]
    return torch.stack(channels, 1)


def _tent(place: Tensor) -> Tensor:
    """0, up to 1 at 1, 1 until 3, down to 0 at 4, 0 until 6."""
    return torch.minimum(place, 4 - place).clamp(0, 1)


def _grey(pixels: Tensor) -> Tensor:
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True)
    return (pixels * pixels.new_tensor(_GREY).view(1, 3, 1, 1)).sum(1, keepdim=True)


def _blurred(pixels: Tensor, sigma: float) -> Tensor:
    """A 5 × 5 Gaussian blur; 2 pixels at each edge are lost."""
    places = torch.arange(-2, 3, device=pixels.device, dtype=torch.float64)
    weights = (-0.5 * (places / sigma).square()).exp()
    weights = (weights / weights.sum()).to(pixels)
    channels = pixels.shape[1]
    down = weights.view(1, 1, 5, 1).expand(channels, 1, 5, 1)
    across = weights.view(1, 1, 1, 5).expand(channels, 1, 1, 5)
    return nn.functional.conv2d(nn.functional.conv2d(pixels, down, groups=channels), across, groups=channels)


def _uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))
