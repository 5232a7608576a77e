"""Any method may unmix: its clusters, and the styles that it is given beside its own source value."""

import pytest
import torch
from torch import nn

import cafe_tta as cafe

# The running statistics of a toy network are not quite those of its source images.
pytestmark = pytest.mark.filterwarnings("ignore:source images that are normalised:cafe_tta.SourceWarning")


def smooth(count, seed):
    """Images that vary smoothly, like photographs."""
    coarse = torch.randn(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(coarse, size=(24, 24), mode="bicubic")


def noisy(count, seed):
    return smooth(count, seed) + torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(seed + 1))


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    )
    classifier = cafe.split_classifier(network).train()
    with torch.no_grad():
        for seed in range(20):
            classifier(smooth(64, seed))
    return classifier.eval()


@pytest.fixture(scope="module")
def source(classifier):
    return cafe.FeatureStats.fit(classifier, [smooth(100, seed) for seed in range(100, 110)]).group()


def needed(name, classifier):
    """What a method needs from the source domain."""
    loader = [(smooth(100, 1), torch.arange(100) % 4)]
    if name == "fr":
        return cafe.SourceHistograms.fit(classifier, loader)
    return cafe.Posterior.fit(classifier, loader, epochs=1, batch_size=20) if name == "bacs" else None


def test_images_are_counted_by_the_number_of_their_cluster(classifier, source):
    adapter = cafe.create("unmix", classifier, source)
    assert adapter.clusters.counts == {} and adapter.clusters.sizes == []
    adapter(torch.cat([smooth(60, 1), noisy(90, 1)]))
    numbers = adapter.clusters.numbers.tolist()
    clean, noise = set(numbers[:60]) - {-1}, set(numbers[60:]) - {-1}
    assert clean and noise and not clean & noise
    counts = adapter.clusters.counts
    assert list(counts.values()) == adapter.clusters.sizes and sum(counts.values()) == 150
    assert set(counts) >= clean | noise
    assert all(numbers.count(number) <= count for number, count in counts.items())  # strangers have none
    adapter.predict(smooth(5, 2))
    assert len(adapter.clusters.numbers) == 5 and adapter.clusters.counts == counts
    assert cafe.create("adabn", classifier).clusters is None


@pytest.mark.parametrize("name", ["fr", "bacs"])
def test_styles_are_given_beside_another_source_value(name, classifier, source, tmp_path):
    value = needed(name, classifier)
    with pytest.raises(ValueError, match="but got none; pass `styles`, those of SourceStats that were made with"):
        cafe.create(name, classifier, value, normalisation="unmix")
    with pytest.raises(TypeError, match=r"expected `styles` of the source images, as in `stats.styles`, but got Sour"):
        cafe.create(name, classifier, value, normalisation="unmix", styles=source)
    adapter = cafe.create(name, classifier, value, normalisation="unmix", styles=source.styles)
    images = torch.cat([smooth(60, 3), noisy(60, 3)])
    for _ in range(2):
        adapter(images)
    assert adapter.report.stepped and adapter.report.notes["clusters"] == len(adapter.clusters.sizes) >= 2
    clean, noise = (set(part.tolist()) - {-1} for part in adapter.clusters.numbers.split(60))
    assert clean and noise and not clean & noise
    adapter.save(tmp_path / "state")
    again = cafe.create(name, classifier, value, normalisation="unmix", styles=source.styles)
    again.load(tmp_path / "state")
    assert torch.equal(again.predict(images), adapter.predict(images))
    assert again.clusters.counts == adapter.clusters.counts


@pytest.mark.parametrize("name", ["tent", "infomax", "unmix"])
def test_styles_are_those_given_or_else_those_of_the_statistics(name, classifier, source):
    options = {} if name == "unmix" else {"normalisation": "unmix"}
    other = cafe.FeatureStats.fit(classifier, [noisy(100, 1)]).group().styles
    assert cafe.create(name, classifier, source, **options).clusters.styles is source.styles
    adapter = cafe.create(name, classifier, source, styles=other, **options)
    assert adapter.clusters.styles is other and adapter.config.unmixes
    if name != "unmix":  # which needs the statistics themselves
        assert cafe.create(name, classifier, styles=other, **options).clusters.styles is other
        assert not cafe.create(name, classifier).config.unmixes
