"""A small network with all that matters: convolutions, BatchNorm, dropout, a linear head; and its source data."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cafe_tta as cafe

# Several processes or threads race each other here, and a busy machine may halt one of them at any moment. Such a test
# is run once more if it fails; the summary counts it as rerun.
RACING = ("serve", "distributed", "cli/test_torchrun.py", "test_tutorials.py", "test_examples.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if any(item.path.is_relative_to(here / name) for name in RACING):
            item.add_marker(pytest.mark.flaky(reruns=1))


def small_network(seed: int = 0, batchnorm: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d if batchnorm else lambda width: nn.GroupNorm(2, width)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2),
        norm(6),
        nn.ReLU(),
        nn.Conv2d(6, 12, 3),
        norm(12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(12, 4),
    )


class Tokens(nn.Module):
    """(B, C, H, W) -> (B, H·W, C)"""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(2).transpose(1, 2)


class MeanToken(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.mean(1)


def small_transformer() -> nn.Sequential:
    """LayerNorms on tokens, as in a vision transformer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=3),
        Tokens(),
        nn.LayerNorm(8),
        nn.Linear(8, 12),
        nn.GELU(),
        nn.LayerNorm(12),
        MeanToken(),
        nn.Linear(12, 4),
    )


def make_source(network: nn.Module) -> SimpleNamespace:
    """A classifier with statistics that belong to it, and all that any method needs from the source domain."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(240, 3, 10, 10, generator=generator)
    labels = torch.randint(0, 4, (240,), generator=generator)
    loader = list(zip(images.split(60), labels.split(60), strict=True))
    classifier = cafe.split_classifier(network)
    classifier.train()
    with torch.no_grad():
        for batch, _ in loader * 10:  # BatchNorm statistics of the source
            classifier(batch)
    classifier.eval()
    stats = cafe.FeatureStats.fit(classifier, loader)
    posterior = make_posterior(classifier, loader)
    return SimpleNamespace(
        classifier=classifier,
        images=images,
        labels=labels,
        loader=loader,
        feature_stats=stats,
        needs={
            None: None,
            "stats": stats.group(num_groups=3, seed=0),
            "histograms": cafe.SourceHistograms.fit(classifier, loader),
            "posterior": posterior,
            "activations": cafe.ActivationStats.fit(classifier, loader),
            "class-moments": cafe.ClassMoments.fit(classifier, loader),
            "fisher": cafe.FisherInformation.fit(classifier, loader),
            "data": loader,
        },
        corrupted=images[:48] * 1.7 + 0.4,
    )


def make_posterior(classifier: cafe.SplitClassifier, loader: list[tuple[torch.Tensor, torch.Tensor]]) -> cafe.Posterior:
    generator = torch.Generator().manual_seed(2)
    posteriors = []
    for _ in range(2):
        walker = copy.deepcopy(classifier)
        collector = cafe.SwagCollector(walker)
        for _ in range(4):
            with torch.no_grad():
                for parameter in walker.parameters():
                    parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
            collector.collect(walker)
        posteriors.append(collector.posterior(walker, loader))
    return cafe.Posterior.join(*posteriors)


@pytest.fixture(scope="session")
def make_network():
    return small_network


@pytest.fixture(scope="session")
def source() -> SimpleNamespace:
    return make_source(small_network())


@pytest.fixture(scope="session")
def source_without_batchnorm() -> SimpleNamespace:
    return make_source(small_network(batchnorm=False))


@pytest.fixture(scope="session")
def source_with_layernorm() -> SimpleNamespace:
    return make_source(small_transformer())
