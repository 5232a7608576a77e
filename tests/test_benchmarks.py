"""Benchmarks are run by hand: at least, all that they import is there."""

import ast
import importlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from cafe_tta import CAFe, FeatureStats, split_classifier

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_everything_that_a_benchmark_imports_of_the_package_exists(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cafe_tta"):
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


def test_variants_of_the_alignment_are_what_they_say(monkeypatch):
    """Against the divergence of torch.distributions, in the groups of the statistics."""
    monkeypatch.syspath_prepend(str(SCRIPTS[0].parent))
    variants = importlib.import_module("alignments")
    classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)))
    random = torch.Generator().manual_seed(0)
    source = FeatureStats.fit(classifier, [torch.randn(256, 3, 2, 2, generator=random)]).group(num_groups=3)
    features = classifier.backbone(2 * torch.randn(64, 3, 2, 2, generator=random)).detach()

    expected = []
    for dims, cov in zip(source.groups, source.covs, strict=True):
        part = features[:, dims].double()
        own = torch.cov(part.T, correction=0).reshape(len(dims), len(dims))
        target = MultivariateNormal(part.mean(0), own + 1e-6 * torch.eye(len(dims)))
        expected.append(kl_divergence(target, MultivariateNormal(source.mean[dims].double(), cov.double())))
    one_sided = variants.OneSided(classifier, source, eigenvalue_floor=1e-6)
    assert float(one_sided.alignment(features)) == pytest.approx(float(torch.stack(expected).mean()), rel=0.02)

    plain, twice = variants.Weighted(classifier, source), variants.Weighted(classifier, source, weight=2.0)
    cafe = float(CAFe(classifier, source).alignment(features))
    assert float(plain.alignment(features)) == pytest.approx(cafe)
    assert float(twice.alignment(features)) == pytest.approx(2 * cafe)
    assert variants.WeightedDimwise(classifier, source).reference.widest == 1
