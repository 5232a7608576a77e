"""Unmixing: styles are told apart, and each image is normalised with the images of its own style."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cafe_tta as cafe
from cafe_tta import clusters, styles
from cafe_tta.clusters import StyleClusters
from cafe_tta.diversity import Diversity
from cafe_tta.styles import StyleStats
from cafe_tta.unmixing import PRIOR

from .smooth import dark, noisy, smooth, smooth_classifier, smooth_source

# The running statistics of a toy network are not quite those of its source images.
pytestmark = pytest.mark.filterwarnings("ignore:source images that are normalised:cafe_tta.SourceWarning")


@pytest.fixture(scope="module")
def classifier():
    return smooth_classifier()


@pytest.fixture(scope="module")
def source(classifier):
    return smooth_source(classifier)


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


def test_styles_are_saved_with_the_statistics(classifier, source, tmp_path):
    stats = cafe.FeatureStats.fit(classifier, [smooth(50, 1)])
    stats.save(tmp_path / "features")
    loaded = cafe.FeatureStats.load(tmp_path / "features").styles
    assert torch.equal(loaded.mean, stats.styles.mean) and torch.equal(loaded.cov, stats.styles.cov)
    source.save(tmp_path / "source")
    loaded = cafe.SourceStats.load(tmp_path / "source").styles
    assert torch.equal(loaded.mean, source.styles.mean) and torch.equal(loaded.cov, source.styles.cov)


def test_styles_are_whitened_by_the_source_and_shortened(source):
    """Against explicit loops over the eigenvectors of the correlations."""
    stats, descriptors = source.styles, styles.describe(noisy(5, 1))
    deviations = np.sqrt(np.diag(stats.cov))
    values, vectors = np.linalg.eigh(stats.cov.numpy() / np.outer(deviations, deviations))
    for descriptor, embedded in zip(descriptors.numpy(), stats.embed(descriptors).numpy(), strict=True):
        scaled = (descriptor - stats.mean.numpy()) / deviations
        whitened = [scaled @ v / np.sqrt(max(x, 0.01 * values.max())) for x, v in zip(values, vectors.T, strict=True)]
        length = np.linalg.norm(whitened)
        np.testing.assert_allclose(np.linalg.norm(embedded), np.log1p(length), rtol=1e-9)
        np.testing.assert_allclose(np.abs(embedded), np.abs(whitened) / length * np.log1p(length), rtol=1e-6, atol=1e-9)


def test_the_spread_is_that_of_source_images(source):
    embedded = source.styles.embed(styles.describe(smooth(500, 77)))
    assert embedded.square().sum(1).mean() / embedded.shape[1] == pytest.approx(source.styles.spread, rel=0.15)


def test_the_style_of_an_image_does_not_depend_on_the_images_beside_it():
    images = torch.cat([smooth(3, 1), noisy(3, 2)])
    alone = torch.cat([styles.describe(image[None]) for image in images])
    torch.testing.assert_close(styles.describe(images), alone, rtol=1e-5, atol=1e-6)


# Clusters


def plain(width=8):
    """Styles that are embedded almost as they are: only their length is compressed."""
    return StyleStats(torch.zeros(width, dtype=torch.float64), torch.eye(width, dtype=torch.float64))


def clouds(sizes, seed=0, width=8, distance=12.0):
    """Embedded styles of several corruptions, and the number of each style's corruption."""
    generator = torch.Generator().manual_seed(seed)
    centres = distance * torch.eye(width, dtype=torch.float64)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=generator)]
    points = centres[labels] + torch.randn(len(labels), width, generator=generator, dtype=torch.float64)
    return plain(width).embed(points), labels


@given(st.lists(st.integers(30, 90), min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_clouds_become_clusters(sizes, seed):
    points, labels = clouds(sizes, seed)
    found = StyleClusters(plain())
    cells, _ = found.follow(points)
    assert found.sizes == sorted(sizes, reverse=True)
    for label in range(len(sizes)):
        own = cells[(labels == label) & (cells >= 0)]
        assert len(set(found.memory["cluster"][own].tolist())) == 1


def test_cells_are_joined_as_by_a_loop_that_recomputes_everything():
    generator = np.random.default_rng(0)
    points = np.concatenate([generator.normal(size=(60, 3)), generator.normal((3.5, 0, 0), size=(40, 3))])
    labels = generator.integers(3, size=100) + 3 * (np.arange(100) >= 60)
    groups = [{cell} for cell in range(6)]

    def separation(one, other):
        a, b = (points[np.isin(labels, list(cells))] for cells in (one, other))
        line = a.mean(0) - b.mean(0)
        unit = line / np.linalg.norm(line)
        return np.linalg.norm(line) / (max((a @ unit).std(), 0.1) + max((b @ unit).std(), 0.1))

    while len(groups) > 1:
        pairs = [(separation(a, b), a, b) for i, a in enumerate(groups) for b in groups[:i]]
        smallest, a, b = min(pairs, key=lambda pair: pair[0])
        if smallest > 1.5:
            break
        groups = [group for group in groups if group not in (a, b)] + [a | b]
    found = clusters._joined(points, labels, 6, threshold=1.5, narrowest=0.1)
    assert {frozenset(np.flatnonzero(found == cluster).tolist()) for cluster in found} == {frozenset(g) for g in groups}
    assert len(groups) == 2


@pytest.mark.parametrize("centre", [0.0, 9.0])
def test_one_style_stays_one_cluster_after_10000_batches(centre):
    found = StyleClusters(plain())
    generator = torch.Generator().manual_seed(1)
    shapes = {name: tensor.shape for name, tensor in found.memory.items()}
    counts = []
    for _ in range(10_000):
        points = torch.randn(1, 8, generator=generator, dtype=torch.float64) + centre
        found.follow(plain().embed(points))
        counts.append(len(found.sizes))
    assert counts[-1] == 1 and np.mean(np.array(counts) == 1) > 0.95
    assert {name: tensor.shape for name, tensor in found.memory.items()} == shapes
    assert found.sizes == [clusters.BUFFER]
    assert (found.memory["shift"][found.memory["images"] > 0] == (centre > 0)).all()


def test_clusters_are_born_and_forgotten_as_the_stream_changes():
    found = StyleClusters(plain())
    for seed in range(4):
        found.follow(clouds([100], seed)[0])
    assert len(found.sizes) == 1
    for seed in range(4):
        found.follow(clouds([0, 60, 60], seed)[0])
    assert len(found.sizes) == 3
    for seed in range(20):
        found.follow(clouds([0, 0, 120], seed)[0])
    assert len(found.sizes) == 1


def test_a_stream_of_many_kinds_is_cut_finer():
    """Two clouds at t = 1.7 are one among few others, and two among many."""

    def found(others):
        random = np.random.default_rng(0)
        centres = 12.0 * np.eye(8)[: others + 1]
        near = centres[0] + 3.4 * np.eye(8)[7]
        points = np.concatenate([centre + random.normal(size=(200, 8)) for centre in [*centres, near]])
        clusters = StyleClusters(plain())
        labels = np.repeat(np.arange(others + 2), 200)
        return len(np.unique(clusters._join(points, labels, others + 2)[1]))

    assert [found(others) for others in (1, 4, 5, 6)] == [2, 5, 7, 8]


@pytest.mark.parametrize(("few", "far", "shifted"), [(20, 4.5, False), (20, 9.0, True), (60, 4.5, True)])
def test_a_few_images_apart_count_as_rare_source_images_unless_they_are_far_away(few, far, shifted):
    """200 images like the source's, and some at t = far / 2 from them."""
    random = np.random.default_rng(0)
    points = random.normal(size=(200 + few, 8)) * np.r_[np.full(7, 0.3), 1.0]
    points[200:, 7] += far
    found = StyleClusters(StyleStats(torch.zeros(8), torch.eye(8)))
    found.spread = 1.0
    cells, _ = found.follow(torch.from_numpy(points))
    shift = found.memory["shift"][cells[200:].clamp(min=0)]
    assert len(found.sizes) == 2 and (found.memory["shift"][cells[:200].clamp(min=0)] < 0.5).float().mean() > 0.95
    assert (shift > 0.5).float().mean() > 0.8 if shifted else (shift == 0).all()


def test_a_stranger_belongs_to_no_cluster():
    found = StyleClusters(plain())
    found.follow(clouds([200])[0])
    assert (found.nearest(clouds([50], seed=1)[0]) >= 0).float().mean() > 0.9
    assert (found.nearest(clouds([0, 50], seed=1)[0]) == -1).all()


def test_repeated_images_are_no_reason_to_split():
    found = StyleClusters(plain())
    points, _ = clouds([2])
    found.follow((points[:1] + 1e-3 * torch.arange(2.0)[:, None]).repeat(100, 1))
    assert found.sizes == [200]


def test_two_styles_of_images_come_apart(classifier, source):
    adapter = cafe.create("unmix", classifier, source)
    for seed in range(5):
        adapter(torch.cat([smooth(40, seed), noisy(40, seed)]))
        members = adapter.normaliser.unmixer.members
        cluster = adapter.normaliser.unmixer.clusters.memory["cluster"]
        clean, noise = (set(cluster[part[part >= 0]].tolist()) for part in members.split(40))
        assert not clean & noise
    assert adapter.report.notes["clusters"] == 2 and adapter.report.notes["shifted"] == pytest.approx(0.5, abs=0.05)


GATED = {"normalisation": "unmix", "gate": True}


@pytest.mark.parametrize(
    ("method", "options"), [("unmix", {}), ("cafe-plus", {}), ("cafe", GATED), ("cafe-no-infomax", GATED)]
)
@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_images_like_the_sources_are_answered_as_by_the_source(classifier, source, method, options, size):
    adapter = cafe.create(method, classifier, source, **options)
    reasons = []
    for seed in range(200, 203):
        images = smooth(size, seed)
        torch.testing.assert_close(adapter(images), classifier(images), rtol=1e-4, atol=1e-4)
        reasons.append(adapter.report.reason)
    if method != "unmix":
        assert adapter.counters.steps == 0 and reasons[0] == "the images look like the source's"
        adapter(noisy(64, 1))
        assert adapter.report.stepped


def test_cafe_plus_aligns_with_the_normalisation_layers_alone(classifier, source):
    adapter = cafe.create("cafe-plus", classifier, source, momentum=0.0, max_change=None)
    adapter(noisy(64, 1))
    assert adapter.report.loss == pytest.approx(adapter.report.notes["alignment"]) and adapter.report.stepped
    assert "infomax" not in adapter.report.notes
    before = dict(classifier.named_parameters())
    moved = {name for name, now in adapter.classifier.named_parameters() if not torch.equal(now, before[name])}
    layers = {name for name, layer in classifier.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    assert moved and {name.rsplit(".", 1)[0] for name in moved} <= layers


@pytest.mark.filterwarnings("ignore::cafe_tta.SourceWarning")
def test_no_step_aligns_with_statistics_of_few_source_images(classifier, source):
    """Eight source images for each feature of the widest group: with fewer, the covariance is mostly noise."""
    few = cafe.FeatureStats.fit(classifier, [smooth(4, 1)]).group(1)
    for options in ({}, {"gate": False}):
        adapter = cafe.create("cafe-plus", classifier, few, **options)
        adapter(noisy(64, 1))
        assert adapter.report.stepped == ("gate" in options)
        if not options:
            assert adapter.report.reason.startswith("the statistics are of 4 images, but the widest group has ")


@pytest.mark.parametrize(("size", "stepped"), [(64, [0, 1, 2, 3]), (32, [0, 2]), (16, [0]), (1, [0])])
def test_small_batches_share_a_step_of_cafe_plus(classifier, source, size, stepped):
    """At most one for 64 images. A short last batch has its own, padded to the batches before it."""
    adapter = cafe.create("cafe-plus", classifier, source, gate=False)
    taken = []
    for number in range(4):
        adapter(noisy(size, number))
        taken += [number] if adapter.report.stepped else []
    assert taken == stepped
    assert size == 64 or adapter.report.reason == f"a step is taken on one batch in {64 // size}"
    if size == 64:
        adapter(noisy(3, 5))
        assert adapter.report.stepped


# Statistics


@pytest.mark.parametrize(("batches", "cut"), [(3, False), (6, False), (1, True)])
def test_cluster_statistics_equal_a_loop_over_the_images(classifier, source, monkeypatch, batches, cut):
    """Each image is normalised with all images of its cluster so far and the source's as a prior.

    Where kinds are cut into clusters, the prior is 128 images with the statistics of the kind. (In one batch: cells
    that are split later have halves of the sums, not the images themselves.)
    """
    if cut:
        monkeypatch.setattr(clusters, "MANY", 1)
        monkeypatch.setattr(clusters, "FINER", 0.01)
        monkeypatch.setattr(clusters, "PER_CELL", 8)
    window = 100
    adapter = cafe.create("unmix", classifier, source, window=window)
    seen: list[tuple[int, int, torch.Tensor]] = []  # batch, cell, activations
    parts = 0
    conv, norm = classifier.backbone.model[0], classifier.backbone.model[1]
    second = norm.running_var.double() + norm.running_mean.double() ** 2
    strangers = 0
    for batch in range(batches):
        images = torch.cat([dark(30, batch), noisy(34, batch)])
        logits = adapter(images)
        memory, members = adapter.normaliser.unmixer.clusters.memory, adapter.normaliser.unmixer.members.tolist()
        maps = conv(images).detach().double()
        for cell, image in zip(members, maps, strict=True):
            seen.append((batch, cell, image[:, ::2, ::2]))  # 22 × 22 pixels
        for row, member in enumerate(members):
            mean, square = norm.running_mean.double(), second
            same_kind = memory["kind"] == memory["kind"][member]
            same_cluster = memory["cluster"] == memory["cluster"][member]
            priors = [(same_kind, PRIOR)]
            if (same_kind != same_cluster).any():
                priors.append((same_cluster, 128))
            for same, prior in priors if member >= 0 else []:
                weights, means, squares = prior, prior * mean, prior * square
                for when, cell, image in seen:
                    if cell >= 0 and same[cell]:
                        weight = np.exp(-(batch - when) * 64 / window)
                        weights = weights + weight
                        means = means + weight * image.mean((1, 2))
                        squares = squares + weight * (image**2).mean((1, 2))
                mean, square = means / weights, squares / weights
            parts += len(priors) == 2
            strangers += member < 0
            var = (square - mean**2)[:, None, None]
            normalised = (maps[row] - mean[:, None, None]) / (var + norm.eps).sqrt()
            normalised = normalised * norm.weight.double()[:, None, None] + norm.bias.double()[:, None, None]
            expected = (
                normalised.relu().mean((1, 2)) @ classifier.head.weight.double().T + classifier.head.bias.double()
            )
            torch.testing.assert_close(logits[row].double(), expected, rtol=1e-3, atol=1e-4)
    assert (adapter.report.notes["clusters"] > 2) == cut and strangers < 40 and (memory["shift"] == 1).all()
    assert (parts > 20) == cut


# Few classes


def classes_by_a_loop(predictions):
    """Effective number of classes: 16 images of all classes, then each image with the 63 before it."""
    collisions, weight, keep = 16 / predictions.shape[1], 16.0, np.exp(-1 / 128)
    for place, prediction in enumerate(predictions):
        before = predictions[max(place - 63, 0) : place]
        collisions, weight = keep * collisions, keep * weight
        if len(before):
            collisions += np.mean([prediction @ other for other in before])
            weight += 1
    return weight / collisions


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=4), st.integers(2, 12), st.integers(0, 99))
def test_the_number_of_classes_equals_a_loop_however_the_stream_is_cut_into_batches(sizes, classes, seed):
    logits = np.random.default_rng(seed).normal(size=(sum(sizes), classes)) * 3
    predictions = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    found = Diversity(classes)
    for batch in torch.from_numpy(predictions).split(sizes):
        found.follow(batch)
    assert found.classes == pytest.approx(classes_by_a_loop(predictions), rel=1e-9)


def test_runs_of_classes_are_told_from_shuffled_ones():
    shuffled, runs = Diversity(10), Diversity(10)
    labels = torch.arange(1000) % 10
    shuffled.follow(nn.functional.one_hot(labels, 10))
    runs.follow(nn.functional.one_hot(labels[:1].repeat(31), 10))
    assert runs.trust == 1  # of so few
    runs.follow(nn.functional.one_hot(labels.sort().values, 10))
    assert shuffled.trust == 1 and shuffled.classes == pytest.approx(10, rel=0.1)
    assert runs.trust == 0 and runs.classes < 2
    assert Diversity(10, expected=1).trust == 1


@pytest.mark.parametrize("method", ["unmix", "cafe-plus"])
def test_images_of_few_classes_are_answered_as_by_the_source(classifier, source, method):
    one_class = copy.deepcopy(classifier)
    with torch.no_grad():
        one_class.head.bias[2] += 50
    own = cafe.FeatureStats.fit(one_class, [smooth(100, seed) for seed in range(100, 110)]).group()
    adapter = cafe.create(method, one_class, own)
    trusting = cafe.create(method, one_class, own, **{"classes" if method == "unmix" else "unmix_classes": 1})
    for seed in range(3):  # the first time, after it has seen the answers
        images = noisy(64, seed)
        expected = one_class(images)
        torch.testing.assert_close(adapter(images), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(trusting(images), expected, rtol=1e-2, atol=1e-2)
    assert adapter.report.notes["classes"] < 2
    if method == "cafe-plus":
        assert not adapter.counters.steps and trusting.counters.steps == 3
        assert adapter.report.reason == "the last images are of few classes (about 1.0)"


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
    """One cluster, first batch: N/(N+n) source + n/(N+n) batch, up to the thinned pixels and strangers."""
    images = noisy(64, 3)
    unmixed = cafe.create("unmix", classifier, source)(images)
    blended = cafe.create("adabn", classifier, prior=PRIOR)(images)
    assert (unmixed - blended).abs().median() < 0.15 * blended.std()


def test_gradients_flow_through_the_statistics_of_the_batch(classifier, source):
    """Finite differences of the loss in the convolution's weights, with the clusters fixed."""
    adapter = cafe.create("cafe", classifier, source, normalisation="unmix", lr=0.0, momentum=0.0).double()
    images = torch.cat([dark(10, 5), noisy(10, 5)]).double()
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


@pytest.mark.filterwarnings("ignore::cafe_tta.SourceWarning")
def test_classifiers_without_batchnorm_and_images_of_another_shape_are_refused(classifier, source):
    plain = cafe.split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(1728, 4), nn.Linear(4, 4)))
    stats = cafe.FeatureStats.fit(plain, [smooth(50, 1)]).group(2)
    with pytest.raises(ValueError, match="BatchNorm layers normalise with, but this classifier has none; use a method"):
        cafe.create("unmix", plain, stats)
    adapter = cafe.create("cafe-plus", plain, stats)  # nothing to unmix; but it still knows what the source looks like
    adapter(noisy(64, 1))
    assert adapter.report.stepped
    assert adapter.optimizer.param_groups[0]["lr"] == pytest.approx(adapter.config.lr / 10)  # all weights move
    moved = zip(adapter.classifier.backbone.parameters(), plain.backbone.parameters(), strict=True)
    assert all(not torch.equal(now, before) for now, before in moved)
    adapter.reset()
    adapter(smooth(64, 1))
    assert not adapter.report.stepped
    adapter = cafe.create("unmix", classifier, source)
    with pytest.raises(ValueError, match="at least 9 pixels a side"):
        adapter(torch.rand(4, 3, 8, 8))
    assert adapter.counters.batches == 0 and not adapter.normaliser.unmixer.sizes
