"""Unmixing: styles are told apart, and each image is normalised with the images of its own style."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import cafe_tta as cafe
from cafe_tta import styles
from cafe_tta.unmixing import PRIOR


def smooth(count, seed):
    """Images that vary smoothly, like photographs."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 5, 5, generator=generator)
    return nn.functional.interpolate(coarse, size=(24, 24), mode="bicubic")


def noisy(count, seed):
    return smooth(count, seed) + torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(seed + 1))


def dark(count, seed):
    return smooth(count, seed) * 0.1 - 2


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


# Styles of the source


def test_style_statistics_equal_numpys_and_merge_exactly(classifier):
    batches = [smooth(30, seed) for seed in range(4)]
    whole = cafe.FeatureStats.fit(classifier, batches).styles
    descriptors = np.concatenate([styles.describe(batch).numpy() for batch in batches])
    np.testing.assert_allclose(whole.mean, descriptors.mean(0), rtol=1e-10)
    np.testing.assert_allclose(whole.cov, np.cov(descriptors.T, bias=True), rtol=1e-6, atol=1e-10)
    parts = [cafe.FeatureStats.fit_part(classifier, batches[a:b], 30 * a) for a, b in ((0, 1), (1, 4))]
    merged = cafe.FeatureStats.merge(*parts).styles
    np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-10)
    np.testing.assert_allclose(merged.cov, whole.cov, rtol=1e-6, atol=1e-10)
    assert torch.equal(merged.sample, whole.sample)


def test_styles_are_saved_with_the_statistics(classifier, source, tmp_path):
    stats = cafe.FeatureStats.fit(classifier, [smooth(50, 1)])
    stats.save(tmp_path / "features")
    loaded = cafe.FeatureStats.load(tmp_path / "features").styles
    assert torch.equal(loaded.mean, stats.styles.mean) and torch.equal(loaded.sample, stats.styles.sample)
    source.save(tmp_path / "source")
    loaded = cafe.SourceStats.load(tmp_path / "source").styles
    assert torch.equal(loaded.cov, source.styles.cov) and loaded.radius == source.styles.radius > 0


def test_the_style_of_an_image_does_not_depend_on_the_images_beside_it():
    images = torch.cat([smooth(3, 1), noisy(3, 2)])
    alone = torch.cat([styles.describe(image[None]) for image in images])
    torch.testing.assert_close(styles.describe(images), alone, rtol=1e-5, atol=1e-6)


# Clusters


def test_two_styles_come_apart_and_an_image_of_a_third_opens_a_cluster(classifier, source):
    adapter = cafe.create("unmix", classifier, source)
    members = []
    for seed in range(5):
        adapter(torch.cat([smooth(20, seed), noisy(20, seed)]))
        members.append(adapter.normaliser.unmixer._members)
    clean, noise = (torch.cat([part[half] for part in members]) for half in (slice(20), slice(20, 40)))
    assert not set(clean.tolist()) & set(noise.tolist())
    assert adapter.report.notes["clusters"] == len(set(clean.tolist()) | set(noise.tolist())) <= 4
    before = adapter.report.notes["clusters"]
    adapter(dark(20, 9))
    assert adapter.report.notes["clusters"] > before


@pytest.mark.parametrize("style", [smooth, noisy, dark])
def test_one_style_stays_one_cluster_however_long_the_stream(classifier, source, style):
    adapter = cafe.create("unmix", classifier, source)
    for seed in range(60):
        adapter(style(16, seed))
    sizes = adapter.normaliser.unmixer.sizes
    assert sizes[0] >= 0.95 * sum(sizes)
    assert all(tensor.isfinite().all() for tensor in adapter.normaliser.memory.values())


def test_the_number_of_clusters_is_bounded(classifier, source):
    adapter = cafe.create("unmix", classifier, source)
    for power in range(60):
        adapter(noisy(4, power) * 1.5**power)
    assert len(adapter.normaliser.unmixer.sizes) <= 32


# Statistics


def test_cluster_statistics_equal_a_loop_over_the_images(classifier, source):
    """Two batches; each image is normalised with all images of its cluster so far and the source's as a prior."""
    adapter = cafe.create("unmix", classifier, source)
    seen: list[tuple[int, torch.Tensor]] = []
    conv, norm = classifier.backbone.model[0], classifier.backbone.model[1]
    for seed in range(2):
        images = torch.cat([smooth(12, seed), noisy(9, seed)])
        logits = adapter(images)
        members = adapter.normaliser.unmixer._members.tolist()
        maps = conv(images).detach().double()
        seen += [(member, image[:, ::2, ::2]) for member, image in zip(members, maps, strict=True)]  # 22 × 22 pixels
        for row, member in enumerate(members):
            own = [image for other, image in seen if other == member]
            means = [norm.running_mean.double()] * int(PRIOR) + [image.mean((1, 2)) for image in own]
            second = norm.running_var.double() + norm.running_mean.double() ** 2
            squares = [second] * int(PRIOR) + [(image**2).mean((1, 2)) for image in own]
            mean, square = torch.stack(means).mean(0), torch.stack(squares).mean(0)
            var = (square - mean**2)[:, None, None]
            normalised = (maps[row] - mean[:, None, None]) / (var + norm.eps).sqrt()
            normalised = normalised * norm.weight.double()[:, None, None] + norm.bias.double()[:, None, None]
            expected = (
                normalised.relu().mean((1, 2)) @ classifier.head.weight.double().T + classifier.head.bias.double()
            )
            torch.testing.assert_close(logits[row].double(), expected, rtol=1e-3, atol=1e-4)


def test_a_single_image_is_answered_as_in_a_batch(classifier, source):
    """Once the clusters are known, `predict` depends on nothing but the image."""
    adapter = cafe.create("unmix", classifier, source)
    images = torch.cat([smooth(20, 1), noisy(20, 1)])
    adapter(images)
    together = adapter.predict(images)
    alone = torch.cat([adapter.predict(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert adapter(images[:1]).isfinite().all() and adapter.report.stepped  # a batch of one adapts, too


def test_a_uniform_stream_is_normalised_as_by_adabn_with_a_prior(classifier, source):
    """One cluster, first batch: N/(N+n) source + n/(N+n) batch, up to the thinned pixels."""
    images = noisy(64, 3)
    unmixed = cafe.create("unmix", classifier, source)(images)
    blended = cafe.create("adabn", classifier, prior=PRIOR)(images)
    assert (unmixed - blended).abs().max() < 0.15 * blended.std()


def test_gradients_flow_through_the_statistics_of_the_batch(classifier, source):
    """Finite differences of the loss in the convolution's weights, with the clusters fixed."""
    adapter = cafe.create("cafe", classifier, source, normalisation="unmix", lr=0.0, momentum=0.0).double()
    images = torch.cat([smooth(10, 5), noisy(10, 5)]).double()
    weight = adapter.classifier.backbone.model[0].weight
    memory = adapter.normaliser.memory

    def loss():
        adapter.normaliser.memory = memory
        adapter.normaliser.adapting()
        features, _ = adapter.run(images)
        return features.square().sum()

    (grad,) = torch.autograd.grad(loss(), weight)
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        weight.add_(1e-5 * direction)
        above = loss()
        weight.sub_(2e-5 * direction)
        below = loss()
    assert float((above - below) / 2e-5) == pytest.approx(float((grad * direction).sum()), rel=1e-3)


# What is refused


def test_statistics_without_styles_say_what_to_do(classifier, source):
    with pytest.raises(ValueError, match="needs the styles of the source images, but got none; pass SourceStats that"):
        cafe.create("unmix", classifier, replace(source, styles=None))
    with pytest.raises(ValueError, match="needs the styles of the source images"):
        cafe.create("tent", classifier, normalisation="unmix")
    tent = cafe.create("tent", classifier, source, normalisation="unmix")
    assert tent(noisy(8, 1)).isfinite().all() and tent.report.stepped


def test_classifiers_without_batchnorm_and_images_of_another_shape_are_refused(classifier, source):
    plain = cafe.split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(1728, 4), nn.Linear(4, 4)))
    stats = cafe.FeatureStats.fit(plain, [smooth(50, 1)]).group(2)
    with pytest.raises(ValueError, match="normalisation='unmix' needs BatchNorm layers, but this classifier has none"):
        cafe.create("unmix", plain, stats)
    adapter = cafe.create("unmix", classifier, source)
    with pytest.raises(ValueError, match="at least 9 pixels a side"):
        adapter(torch.rand(4, 3, 8, 8))
    assert adapter.counters.batches == 0 and not adapter.normaliser.unmixer.sizes
