"""A small residual network with BatchNorm for 32×32 images: the demonstration's classifier, quick on any CPU."""

from torch import Tensor, nn


class DigitsResNet(nn.Module):
    """Three residual blocks over 32×32 RGB images; global average pooling gives 8 · `width` features to the head `fc`.

    >>> import torch
    >>> DigitsResNet()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        if num_classes < 1 or width < 1:
            raise ValueError(f"expected `num_classes` and `width` to be at least 1, but got {num_classes} and {width}")
        self.stem = nn.Sequential(  # halves the image at once: most of the time would go into full-size layers
            nn.Conv2d(3, width, kernel_size=3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.Sequential(
            _Block(width, 2 * width, stride=2),  # 16×16 -> 8×8
            _Block(2 * width, 4 * width, stride=2),  # 4×4
            _Block(4 * width, 8 * width, stride=2),  # 2×2
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.pool(self.blocks(self.stem(images))))


class _Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if channels != out_channels or stride != 1:
            convolution = nn.Conv2d(channels, out_channels, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out_channels))

    def forward(self, activations: Tensor) -> Tensor:
        hidden = self.relu(self.bn1(self.conv1(activations)))
        return self.relu(self.bn2(self.conv2(hidden)) + self.shortcut(activations))
