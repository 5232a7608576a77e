"""Whether BatchNorm's running statistics describe the source images: features in batch mode against the statistics."""

import copy

import pytest
import torch
from torch import nn

import cafe_tta as cafe
from cafe_tta.source import Reference, recompute_batchnorm
from cafe_tta.source.modes import ENOUGH, BatchMode


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return cafe.split_classifier(nn.Sequential(*layers, nn.Linear(8, 3)).eval())


def batches(count=6, size=128):
    generator = torch.Generator().manual_seed(1)
    bright = torch.rand(count * size, 1, 1, 1, generator=generator)
    images = bright * torch.randn(count * size, 3, 8, 8, generator=generator)
    return list(images.split(size))


@pytest.fixture
def agreeing():
    """A network whose BatchNorm describes the images."""
    classifier = network()
    recompute_batchnorm(classifier, batches())
    return classifier


def test_agreeing_modes_are_recorded_and_nothing_is_said(agreeing):
    source = cafe.FeatureStats.fit(agreeing, batches()).group()
    found = source.meta["batch_mode"]
    assert found["alignment"] <= found["threshold"] == Reference(source).threshold(ENOUGH)


def test_running_statistics_of_other_images_are_warned_of(agreeing):
    for layer in agreeing.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_var *= 4
    stats = cafe.FeatureStats.fit(agreeing, batches())
    with pytest.warns(cafe.SourceWarning, match=r"normalised with their batch are far from .* use cafe-plus or unmix"):
        source = stats.group()
    twin = copy.deepcopy(agreeing).train()
    with torch.no_grad():  # by hand: each batch normalises itself
        features = torch.cat([twin.backbone(images) for images in batches()])[:ENOUGH]
    assert source.meta["batch_mode"]["alignment"] == pytest.approx(Reference(source).alignment(features), rel=1e-4)


def test_looking_leaves_the_classifier_as_it_was(agreeing):
    before = {name: tensor.clone() for name, tensor in agreeing.state_dict().items()}
    modes = {
        name: (module.training, getattr(module, "track_running_stats", None))
        for name, module in agreeing.named_modules()
    }
    cafe.FeatureStats.fit(agreeing, batches())
    assert all(torch.equal(before[name], tensor) for name, tensor in agreeing.state_dict().items())
    assert modes == {n: (m.training, getattr(m, "track_running_stats", None)) for n, m in agreeing.named_modules()}


def test_parts_give_what_the_whole_gives_and_files_keep_it(agreeing, tmp_path):
    images = batches()
    whole = cafe.FeatureStats.fit(agreeing, images)
    parts = [cafe.FeatureStats.fit_part(agreeing, images[:2]), cafe.FeatureStats.fit_part(agreeing, images[2:], 256)]
    merged = cafe.FeatureStats.merge(*parts)
    assert len(whole.batch_mode) == ENOUGH and torch.equal(whole.batch_mode, merged.batch_mode)
    merged.save(tmp_path / "stats.safetensors")
    assert torch.equal(cafe.FeatureStats.load(tmp_path / "stats.safetensors").batch_mode, whole.batch_mode)


def test_small_batches_new_layers_and_other_networks_are_not_looked_at(agreeing):
    assert cafe.FeatureStats.fit(agreeing, batches(size=32)).batch_mode is None
    assert cafe.FeatureStats.fit(network(), batches()).batch_mode is None  # never trained
    plain = cafe.split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 3)))
    looked = BatchMode(plain)
    looked.add(batches()[0])
    assert looked.features is None
