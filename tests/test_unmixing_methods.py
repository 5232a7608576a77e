"""Any method may unmix: its clusters, and the styles that it is given beside its own source value."""

import pytest
import torch

import cafe_tta as cafe

from .smooth import noisy, smooth, smooth_classifier, smooth_source

# The running statistics of a toy network are not quite those of its source images.
pytestmark = pytest.mark.filterwarnings("ignore:source images that are normalised:cafe_tta.SourceWarning")


@pytest.fixture(scope="module")
def classifier():
    return smooth_classifier()


@pytest.fixture(scope="module")
def source(classifier):
    return smooth_source(classifier)


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
