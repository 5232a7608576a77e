"""Images that vary smoothly, like photographs, corrupted ones, and a toy network whose BatchNorm knows them."""

import torch
from torch import Tensor, nn

import cafe_tta as cafe


def smooth(count: int, seed: int) -> Tensor:
    coarse = torch.randn(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(coarse, size=(24, 24), mode="bicubic")


def noisy(count: int, seed: int) -> Tensor:
    return smooth(count, seed) + torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(seed + 1))


def dark(count: int, seed: int) -> Tensor:
    return smooth(count, seed) * 0.1 - 2


def smooth_classifier() -> cafe.SplitClassifier:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    )
    classifier = cafe.split_classifier(network).train()
    with torch.no_grad():
        for seed in range(20):
            classifier(smooth(64, seed))
    return classifier.eval()


def smooth_source(classifier: cafe.SplitClassifier) -> cafe.SourceStats:
    return cafe.FeatureStats.fit(classifier, [smooth(100, seed) for seed in range(100, 110)]).group()
