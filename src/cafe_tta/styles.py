"""The style of an image: how it is corrupted, as opposed to what it shows.

A descriptor of some fifty numbers (colours, contrast, high-pass energies at several scales, the radial spectrum, block
edges) is whitened by the covariance that it has over clean source images. Directions in which clean images hardly vary
are then long: they are the directions of corruption, and the content of the image hardly shows. The length r of the
whitened vector is compressed to log(1 + r), so that a few extreme images do not decide everything.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

LEVELS = 3  # scales of the high-pass energies: full, half and quarter size
BANDS = 12  # of the radial spectrum
BLOCKS = (8, 4, 2)  # pixels between the block edges that are looked for
SMALLEST_SIDE = 9  # pixels: a smaller image has no edges between blocks of 8
LEAST_MEDIAN = 1e-2  # high-pass energy, about a grey level of 8 bits: less is none, however its logarithm may vary
EIGENVALUE_FLOOR = 1e-2  # of the descriptor's correlations, as a share of the largest eigenvalue


def describe(images: Tensor) -> Tensor:
    """The style descriptor of images (B, C, H, W), as the classifier receives them. (B, S) float64

    >>> describe(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 47])
    """
    if images.dim() != 4 or min(images.shape[2:]) < SMALLEST_SIDE:
        raise ValueError(
            f"expected images of shape (batch, channels, height, width) with at least {SMALLEST_SIDE} pixels a side "
            f"to describe their style, but got {tuple(images.shape)}"
        )
    images = images.detach().float()
    parts = [*_colours(images), *_high_passes(images), *_spectrum(images.mean(1))]
    return torch.cat(parts, 1).double()


def _log(values: Tensor) -> Tensor:
    return (values + 1e-6).log()


def _colours(images: Tensor) -> list[Tensor]:
    flat = images.flatten(2)
    grey = images.mean(1, keepdim=True)
    colour = (images - grey).abs().mean((1, 2, 3))[:, None]
    mean = flat.mean(2)
    spread = (flat.square().mean(2) - mean.square()).clamp(min=0).sqrt()  # many times as fast as `std`
    return [mean, _log(spread), flat.amin(2), flat.amax(2), _log(colour)]


def _high_passes(images: Tensor) -> list[Tensor]:
    """For each scale: mean and median high-pass energy, its coloured part, its direction, and its heavy tail."""
    parts = []
    for level in range(LEVELS):
        images = functional.avg_pool2d(images, 2) if level else images
        if min(images.shape[2:]) < 4:
            break
        high = images[:, :, 1:-1, 1:-1] - _blurred(images)
        grey = high.mean(1, keepdim=True)
        energy = grey.abs().flatten(1)
        mean = energy.mean(1, keepdim=True)
        shown = images.mean(1)
        across = (shown[:, :, 1:] - shown[:, :, :-1]).abs().mean((1, 2))[:, None]
        down = (shown[:, 1:] - shown[:, :-1]).abs().mean((1, 2))[:, None]
        parts += [
            _log(mean),
            _log(_median(energy).clamp(min=LEAST_MEDIAN)),
            _log((high - grey).abs().mean((1, 2, 3))[:, None]),
            _log(across) - _log(down),
            _log(energy.square().mean(1, keepdim=True)) - 2 * _log(mean),
        ]
    return parts


def _median(values: Tensor) -> Tensor:
    """The lower median of every row. (B, 1)"""
    if values.device.type != "cpu":
        return values.median(1, keepdim=True).values
    middle = (values.shape[1] - 1) // 2
    return torch.from_numpy(np.partition(values.numpy(), middle, axis=1)[:, [middle]])  # eight times as fast as torch


def _blurred(images: Tensor) -> Tensor:
    """Means over 3 × 3 pixels, without the border: by slices, which is many times as fast as pooling."""
    rows = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
    return (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]) / 9


def _spectrum(grey: Tensor) -> list[Tensor]:
    """Energy in rings of frequency, block edges against other edges, and horizontal against vertical energy."""
    height, width = grey.shape[1:]
    centred = grey - grey.mean((1, 2), keepdim=True)
    power = torch.fft.rfft2(centred).abs().square() / (height * width)  # (B, H, W/2 + 1)
    rows = torch.fft.fftfreq(height, device=grey.device)[:, None]
    columns = torch.fft.rfftfreq(width, device=grey.device)[None]
    ring = ((rows.square() + columns.square()).sqrt() / math.sqrt(0.5) * BANDS).long().clamp(max=BANDS - 1).flatten()
    energy = power.new_zeros(len(grey), BANDS).index_add(1, ring, power.flatten(1))
    parts = [_log(energy / torch.bincount(ring, minlength=BANDS).clamp(min=1))]
    for edges in ((grey[:, :, 1:] - grey[:, :, :-1]).abs().mean(1), (grey[:, 1:] - grey[:, :-1]).abs().mean(2)):
        for block in BLOCKS:
            on = torch.arange(1, edges.shape[1] + 1, device=grey.device) % block == 0
            parts.append(_log(edges[:, on].mean(1, keepdim=True)) - _log(edges[:, ~on].mean(1, keepdim=True)))
    parts.append(_log(power[:, 0, 1:].mean(1, keepdim=True)) - _log(power[:, 1:, 0].mean(1, keepdim=True)))
    return parts


@dataclass(frozen=True)
class StyleStats:
    """Mean and covariance of the style descriptor over source images.

    >>> stats = StyleStats(torch.zeros(2), torch.tensor([[4.0, 0.0], [0.0, 1.0]]))
    >>> stats.embed(torch.tensor([[6.0, 0.0], [0.0, 3.0]])).norm(dim=1)  # both are three standard deviations away
    tensor([1.3863, 1.3863], dtype=torch.float64)
    """

    mean: Tensor  # (S,) float64
    cov: Tensor  # (S, S) float64

    @cached_property
    def _whitener(self) -> Tensor:
        return self._eigen[1] / self._eigen[0].sqrt() / self._deviations[:, None]

    @cached_property
    def _deviations(self) -> Tensor:
        """Standard deviation of each number; 1 where it never varies."""
        deviations = self.cov.diagonal().double().clamp(min=0).sqrt()
        return torch.where(deviations > 1e-9, deviations, 1.0)

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues, floored, and eigenvectors of the correlations."""
        values, vectors = torch.linalg.eigh(self.cov.double() / torch.outer(self._deviations, self._deviations))
        return values.clamp(min=EIGENVALUE_FLOOR * max(float(values.max()), 1e-12)), vectors

    @cached_property
    def spread(self) -> float:
        """Variance of an embedded source image in each direction: log(1 + r)² / S for its expected length r."""
        whitened = self._whitener.T @ self.cov.double() @ self._whitener
        return math.log1p(math.sqrt(max(float(whitened.trace()), 1e-12))) ** 2 / len(self.mean)

    def embed(self, descriptors: Tensor) -> Tensor:
        """Descriptors (B, S), whitened by the source, with their length r compressed to log(1 + r). (B, S)"""
        if descriptors.shape[1] != len(self.mean):
            raise ValueError(
                f"expected images that look like the source images, with a style of {len(self.mean)} numbers, but got "
                f"{descriptors.shape[1]}; make the statistics with images of the same shape"
            )
        whitened = (descriptors.cpu().double() - self.mean) @ self._whitener
        length = whitened.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return whitened / length * torch.log1p(length)
