"""A plain convolutional network for 32×32 images, made to be trained quickly on a CPU.

After Keller Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (https://arxiv.org/abs/2404.00498): a fixed first
layer that whitens 2×2 patches, three blocks of two convolutions that begin near the identity, and max pooling right
after the first convolution of each. 0.24 GFLOP a forward pass. Written from the description.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

PATCH = 2  # pixels of the side of a whitened patch
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(channels // 16, channels),
}
SMALLEST = 5e-4  # added to the variances of the patches, so that directions without signal are not blown up


class CifarCNN(nn.Module):
    """Three blocks of two convolutions over 32×32 RGB images; max pooling gives `widths[2]` features to the head `fc`.

    With `norm="group"`, GroupNorm takes the place of BatchNorm: a network whose answers do not depend on the batch.

    >>> import torch
    >>> CifarCNN()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self, num_classes: int = 10, widths: tuple[int, int, int] = (64, 256, 256), norm: str = "batch"
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"expected `num_classes` to be at least 1, but got {num_classes}")
        if norm not in NORMS:
            raise ValueError(f"expected `norm` to be one of {', '.join(NORMS)}, but got {norm!r}")
        whitened = 2 * 3 * PATCH**2  # every direction of a patch, and its negative
        self.whitening = nn.Conv2d(3, whitened, PATCH)
        self.activation = nn.GELU()
        channels = (whitened, *widths)
        self.blocks = nn.Sequential(*(_Block(a, b, NORMS[norm]) for a, b in zip(channels[:-1], widths, strict=True)))
        self.pool = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten())
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.pool(self.blocks(self.activation(self.whitening(images)))))

    def see_source(self, images: Tensor) -> None:
        """Sets the first layer so that patches of these normalised images come out uncorrelated, with variance 1.

        Its weights are then fixed: training moves the biases and the other layers.
        """
        weight = self.whitening.weight
        patches = nn.functional.unfold(images.to(weight), PATCH).transpose(1, 2).reshape(-1, 3 * PATCH**2).double()
        variances, directions = torch.linalg.eigh(torch.cov(patches.T))
        filters = (directions / (variances + SMALLEST).sqrt()).T.reshape(-1, 3, PATCH, PATCH)
        with torch.no_grad():
            weight.copy_(torch.cat([filters, -filters]))
            nn.init.zeros_(self.whitening.bias)  # type: ignore[arg-type]
        weight.requires_grad_(False)


class _Block(nn.Module):
    """Two convolutions, each normalised; pooled to half the size after the first."""

    def __init__(self, channels: int, out_channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = _near_identity(channels, out_channels)
        self.pool = nn.MaxPool2d(2)
        self.norm1 = norm(out_channels)
        self.conv2 = _near_identity(out_channels, out_channels)
        self.norm2 = norm(out_channels)
        self.activation = nn.GELU()

    def forward(self, activations: Tensor) -> Tensor:
        hidden = self.activation(self.norm1(self.pool(self.conv1(activations))))
        return self.activation(self.norm2(self.conv2(hidden)))


def _near_identity(channels: int, out_channels: int) -> nn.Conv2d:
    """A 3×3 convolution whose first outputs are its inputs; the rest begin at random."""
    convolution = nn.Conv2d(channels, out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.dirac_(convolution.weight[: min(channels, out_channels)].data)
    return convolution
