"""SWAG: moments of the weights, BatchNorm statistics of their mean, and the posterior as a file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cafe_tta import create
from cafe_tta.classifier import SplitClassifier, split_classifier
from cafe_tta.source.swag import Posterior, SwagCollector, recompute_batchnorm


def network(seed: int = 0) -> SplitClassifier:
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return split_classifier(nn.Sequential(*layers, nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)))


def pictures(count: int = 40) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 3 + 1


def wander(classifier: SplitClassifier) -> None:
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)


def collected(seed: int = 0, count: int = 7) -> tuple[SplitClassifier, SwagCollector, list[dict[str, np.ndarray]]]:
    classifier = network(seed)
    collector, snapshots = SwagCollector(classifier), []
    for _ in range(count):
        wander(classifier)
        collector.collect(classifier)
        snapshots.append({name: p.detach().numpy().astype(np.float64) for name, p in classifier.named_parameters()})
    return classifier, collector, snapshots


def test_moments_agree_with_numpy_over_the_snapshots() -> None:
    classifier, collector, snapshots = collected()
    (member,) = collector.posterior(classifier, pictures().split(20)).members
    for name in snapshots[0]:
        values = np.stack([snapshot[name] for snapshot in snapshots])
        np.testing.assert_allclose(member.mean[name].numpy(), values.mean(0), rtol=1e-6, atol=1e-9)
        # The weights differ by a thousandth: float32 sums would lose most digits of their variance.
        np.testing.assert_allclose(member.variance[name].numpy(), values.var(0), rtol=1e-4, atol=1e-15)


def test_the_classifier_becomes_the_mean_of_the_posterior() -> None:
    classifier, collector, _ = collected()
    (member,) = collector.posterior(classifier, pictures().split(20)).members
    assert all(torch.equal(parameter, member.mean[name]) for name, parameter in classifier.named_parameters())
    assert all(torch.equal(buffer, member.buffers[name]) for name, buffer in classifier.named_buffers())
    other = network(seed=5)
    member.put_into(other)
    assert other.fingerprint() == classifier.fingerprint()


def test_recomputed_statistics_are_the_average_over_the_batches() -> None:
    classifier = network().train()
    batches = pictures().split(8)
    recompute_batchnorm(classifier, [(images, None) for images in batches])

    model = classifier.get_submodule("backbone.model")
    convolution, linear = model.get_submodule("0"), model.get_submodule("6")
    first, second = model.get_submodule("1"), model.get_submodule("7")
    assert isinstance(first, nn.BatchNorm2d) and isinstance(second, nn.BatchNorm1d)
    values: dict[str, list[Tensor]] = {"mean1": [], "var1": [], "mean2": [], "var2": []}
    with torch.no_grad():
        for images in batches:  # by hand, with dropout off
            hidden = convolution(images)  # (B, 4, H, W)
            mean, var = hidden.mean((0, 2, 3)), hidden.var((0, 2, 3), correction=0)
            values["mean1"].append(mean)
            values["var1"].append(hidden.var((0, 2, 3)))
            hidden = (hidden - mean.view(4, 1, 1)) / (var.view(4, 1, 1) + first.eps).sqrt()
            hidden = hidden * first.weight.view(4, 1, 1) + first.bias.view(4, 1, 1)
            hidden = linear(hidden.relu().mean((2, 3)))
            values["mean2"].append(hidden.mean(0))
            values["var2"].append(hidden.var(0))
    for number, layer in ((1, first), (2, second)):
        torch.testing.assert_close(layer.running_mean, torch.stack(values[f"mean{number}"]).mean(0))
        torch.testing.assert_close(layer.running_var, torch.stack(values[f"var{number}"]).mean(0))
        assert layer.momentum == 0.1
    assert all(child.training for child in model.modules())


def test_recomputing_needs_no_batchnorm_and_restores_after_an_error() -> None:
    plain = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2)))
    recompute_batchnorm(plain, iter(()))
    classifier = network().eval()
    with pytest.raises(TypeError, match="expected batches of tensors"):
        recompute_batchnorm(classifier, ["not images"])
    layer = classifier.get_submodule("backbone.model.1")
    assert layer.momentum == 0.1 and not layer.training


def test_a_posterior_needs_two_collections() -> None:
    classifier, collector, _ = collected(count=1)
    before = classifier.fingerprint()
    with pytest.raises(RuntimeError, match="at least 2 collections of the parameters, but has 1"):
        collector.posterior(classifier, [pictures()])
    assert classifier.fingerprint() == before


def test_the_state_of_a_collector_goes_on_exactly() -> None:
    classifier, collector, _ = collected(count=3)
    other = SwagCollector(classifier)
    other.set_state(collector.state())
    wander(classifier)
    for one in (collector, other):
        one.collect(classifier)
    a, b = collector.state(), other.state()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_posteriors_come_back_from_a_file_and_join(tmp_path: Path) -> None:
    posteriors = []
    for seed in (0, 1):
        classifier, collector, _ = collected(seed)
        posteriors.append(collector.posterior(classifier, [pictures()]))
    ensemble = Posterior.join(*posteriors)
    path = tmp_path / "posterior.safetensors"
    assert ensemble.save(path) == path.stat().st_size
    loaded = Posterior.load(path)
    assert len(loaded.members) == 2
    for ours, theirs in zip(ensemble.members, loaded.members, strict=True):
        for part in ("mean", "variance", "buffers"):
            a, b = getattr(ours, part), getattr(theirs, part)
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    images = pictures(16)
    assert torch.equal(create("bacs", network(), loaded)(images), create("bacs", network(), ensemble)(images))


def test_a_posterior_of_another_network_is_refused() -> None:
    classifier, collector, _ = collected()
    posterior = collector.posterior(classifier, [pictures()])
    other = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2)))
    with pytest.raises(
        ValueError, match=r"member 0 of the posterior does not belong to this classifier: `backbone.model"
    ):
        posterior.check_belongs_to(other)
    with pytest.raises(ValueError, match="at least one member, but got none"):
        Posterior(())
