"""Source statistics: exact, streaming, mergeable, and refused where they do not belong."""

import copy
import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cafe_tta as cafe
from cafe_tta.storage import StorageError


def features_of(samples, dims, seed, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dims, dims, generator=generator)
    return torch.randn(samples, dims, generator=generator) @ mixing + offset


@settings(max_examples=50, deadline=None)
@given(
    samples=st.integers(1, 60),
    dims=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    offset=st.sampled_from([0.0, 1.0, 1e4]),
)
def test_streaming_merging_and_numpy_agree(samples, dims, cuts, offset):
    features = features_of(samples, dims, seed=samples, offset=offset).double()
    bounds = [0, *sorted(min(cut, samples) for cut in cuts), samples]
    shards = [features[a:b] for a, b in itertools.pairwise(bounds) if b > a]
    merged = cafe.FeatureStats.merge(*map(cafe.FeatureStats.from_features, shards))
    whole = cafe.FeatureStats.from_features(features)
    expected = np.cov(features.numpy().T, bias=True).reshape(dims, dims)
    scale = max(1.0, np.abs(expected).max())
    for stats in (merged, whole):
        assert stats.count == samples
        np.testing.assert_allclose(stats.mean.numpy(), features.numpy().mean(0), rtol=1e-12, atol=1e-9)
        np.testing.assert_allclose(stats.cov.numpy(), expected, rtol=1e-9, atol=1e-9 * scale)


def test_fit_is_one_pass_in_evaluation_mode_that_leaves_the_classifier_alone(source):
    classifier = copy.deepcopy(source.classifier)
    classifier.train()
    classifier.backbone.model[1].eval()
    modes = [module.training for module in classifier.modules()]
    before = copy.deepcopy(classifier.state_dict())
    stats = cafe.FeatureStats.fit(classifier, iter(source.loader))  # an iterator: one pass must do
    assert [module.training for module in classifier.modules()] == modes
    assert all(torch.equal(before[name], tensor) for name, tensor in classifier.state_dict().items())
    features = source.classifier.backbone(source.images).detach().double()
    torch.testing.assert_close(stats.mean, features.mean(0))
    torch.testing.assert_close(stats.cov, torch.cov(features.T, correction=0))


def test_fit_takes_batches_of_images_alone(source):
    with_labels = cafe.FeatureStats.fit(source.classifier, source.loader)
    alone = cafe.FeatureStats.fit(source.classifier, [images for images, _ in source.loader])
    assert torch.equal(with_labels.cov, alone.cov)


def test_fit_restores_the_modes_when_it_fails(source):
    classifier = copy.deepcopy(source.classifier).train()
    with pytest.raises(ValueError, match="batch 1 of the source images gives features that are NaN"):
        cafe.FeatureStats.fit(classifier, [source.images[:4], source.images[:4] * float("nan")])
    assert all(module.training for module in classifier.modules())


@pytest.mark.parametrize(
    ("loader", "error", "message"),
    [
        ([], ValueError, "expected at least one source image, but the loader was empty"),
        ([np.zeros((2, 3, 8, 8))], TypeError, r"expected batches of tensors or of \(images, labels\), but got ndarray"),
        ([torch.zeros(3, 8, 8)], ValueError, r"of shape \(3, 8, 8\): .*; is it one image\? Pass image\[None\]"),
        ([torch.zeros(2, 3, 8, 8).byte()], TypeError, "expected floating-point images.*but got torch.uint8"),
    ],
)
def test_fit_refuses_what_it_cannot_use(source, loader, error, message):
    with pytest.raises(error, match=message):
        cafe.FeatureStats.fit(source.classifier, loader)


def test_fit_refuses_a_model_that_was_not_split():
    with pytest.raises(TypeError, match=r"expected a SplitClassifier, but got Linear; make one with cafe_tta.split_cl"):
        cafe.FeatureStats.fit(nn.Linear(2, 2), [])


def test_memory_does_not_grow_with_the_number_of_images():
    """100,000 vectors of 2048 would be 800 MB in float32; the sums are 32 MB."""
    import resource

    from cafe_tta.source.stats import FeatureSums

    accumulator = FeatureSums()
    chunk = torch.randn(500, 2048)
    accumulator.add(chunk)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(6):
        accumulator.add(chunk)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert accumulator.count == 3500
    assert grown < 100  # MB


def test_merge_refuses_shards_of_other_classifiers(source):
    other = copy.deepcopy(source.classifier)
    with torch.no_grad():
        other.backbone.model[0].bias.add_(0.1)
    ours, theirs = (cafe.FeatureStats.fit(c, source.loader) for c in (source.classifier, other))
    with pytest.raises(ValueError, match=r"not belong to the same classifier: 1 of \d+ tensors differ.*model.0.bias"):
        cafe.FeatureStats.merge(ours, theirs)
    with pytest.raises(ValueError, match="expected shards of 12 features, but got one of 2"):
        cafe.FeatureStats.merge(ours, cafe.FeatureStats.from_features(torch.randn(5, 2)))


def test_feature_stats_survive_a_file(source, tmp_path):
    path = tmp_path / "shard.safetensors"
    source.feature_stats.save(path)
    loaded = cafe.FeatureStats.load(path)
    assert torch.equal(loaded.cov, source.feature_stats.cov) and loaded.count == 240
    cafe.FeatureStats.merge(loaded, source.feature_stats)  # still knows whose it is


def test_group_keeps_blocks_of_the_covariance(source):
    stats = source.feature_stats
    grouped = stats.group(num_groups=4, seed=0)
    assert len(grouped.groups) == 4
    for dims, cov in zip(grouped.groups, grouped.covs, strict=True):
        assert torch.equal(cov, stats.cov[dims][:, dims])
    assert grouped.meta["count"] == 240 and grouped.meta["feature_layer"] == "9"
    assert grouped.full_cov is None
    assert torch.equal(stats.group(4, keep_full=True).full_cov, stats.cov)


def test_source_stats_survive_a_file(source, tmp_path):
    path = tmp_path / "stats.safetensors"
    stats = source.feature_stats.group(4, keep_full=True)
    size = stats.save(path)
    loaded = cafe.SourceStats.load(path)
    assert size == os.path.getsize(path)
    assert torch.equal(loaded.mean, stats.mean) and torch.equal(loaded.full_cov, stats.full_cov)
    assert all(map(torch.equal, loaded.groups, stats.groups)) and all(map(torch.equal, loaded.covs, stats.covs))
    assert loaded.meta == stats.meta
    adapter = cafe.CAFe(source.classifier, loaded)
    other = cafe.CAFe(source.classifier, stats)
    assert torch.equal(adapter(source.corrupted), other(source.corrupted))


def test_file_holds_only_what_the_target_site_needs(source, tmp_path):
    """Mean, groups, blocks and the statistics of styles: never the whole covariance, unless asked for."""
    from safetensors import safe_open

    path = tmp_path / "stats.safetensors"
    stats = source.feature_stats.group(4)
    stats.save(path)
    with safe_open(path, "pt") as file:
        values = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    styles = len(stats.styles.mean)
    assert values == 12 + 4 + 12 + sum(len(dims) ** 2 for dims in stats.groups) + styles + styles**2


@pytest.mark.parametrize("position", [0.2, 0.5, 0.99])
def test_a_flipped_bit_is_noticed(source, tmp_path, position):
    path = tmp_path / "stats.safetensors"
    source.needs["stats"].save(path)
    content = bytearray(path.read_bytes())
    content[int(len(content) * position)] ^= 4
    path.write_bytes(content)
    with pytest.raises(StorageError, match="damaged|not a whole|holds|version"):
        cafe.SourceStats.load(path)


def test_a_truncated_file_is_noticed(source, tmp_path):
    path = tmp_path / "stats.safetensors"
    source.needs["stats"].save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StorageError, match="is not a whole safetensors file"):
        cafe.SourceStats.load(path)


def test_other_files_are_refused(source, tmp_path):
    path = tmp_path / "shard.safetensors"
    source.feature_stats.save(path)
    with pytest.raises(StorageError, match="expected a source-stats file, but it holds 'feature-stats'"):
        cafe.SourceStats.load(path)
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(StorageError, match=r"no kind at all \(a file of plain weights\?\)"):
        cafe.SourceStats.load(tmp_path / "weights.safetensors")
    with pytest.raises(FileNotFoundError, match="no file at .*expected a source-stats file"):
        cafe.SourceStats.load(tmp_path / "nowhere.safetensors")
    with pytest.raises(FileNotFoundError, match="create it first"):
        source.feature_stats.save(tmp_path / "no" / "folder.safetensors")


def test_a_failing_write_leaves_the_old_file(source, tmp_path, monkeypatch):
    path = tmp_path / "stats.safetensors"
    source.needs["stats"].save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        source.needs["stats"].dimwise().save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["stats.safetensors"]


def test_a_classifier_of_other_weights_is_refused_with_what_differs(source):
    other = copy.deepcopy(source.classifier)
    with torch.no_grad():
        other.backbone.model[3].weight[0, 0, 0, 0] += 1e-3
    with pytest.raises(ValueError, match=r"do not belong to this classifier: 1 of \d+ tensors differ.*3.weight"):
        cafe.CAFe(other, source.needs["stats"])
    with torch.no_grad():
        other = copy.deepcopy(source.classifier)
        other.backbone.model[1].running_mean += 1
    with pytest.raises(ValueError, match="running_mean"):
        cafe.CAFe(other, source.needs["stats"])
    small = cafe.split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(300, 5), nn.ReLU(), nn.Linear(5, 4)))
    with pytest.raises(ValueError, match="have 12 features, but the classifier's `3` receives 5"):
        cafe.CAFe(small, source.needs["stats"])


def test_the_same_classifier_in_double_precision_is_recognised(source):
    cafe.CAFe(copy.deepcopy(source.classifier).double(), source.needs["stats"])


def test_plain_tensors_make_source_stats(source):
    groups = [torch.arange(0, 6), torch.arange(6, 12)]
    stats = cafe.SourceStats(torch.zeros(12), groups, [torch.eye(6), torch.eye(6)])
    cafe.CAFe(source.classifier, stats)(source.corrupted)


@pytest.mark.parametrize(
    ("mean", "groups", "covs", "message"),
    [
        (torch.zeros(4), [torch.tensor([0, 1]), torch.tensor([1, 2])], [torch.eye(2)] * 2, "in at most one group"),
        (torch.zeros(4), [torch.tensor([0, 4])], [torch.eye(2)], "every dimension of 0..3"),
        (torch.zeros(4), [torch.tensor([0, 1])], [torch.eye(3)], r"shape \(2, 2\) for group 0, but got shape \(3, 3\)"),
        (torch.zeros(4), [torch.tensor([0])], [], "one covariance a group, but got 1 groups, 0 covs"),
        (torch.zeros(4, 1), [torch.tensor([0])], [torch.eye(1)], r"mean of shape \(D,\), but got shape \(4, 1\)"),
    ],
)
def test_bad_source_stats_are_refused(mean, groups, covs, message):
    with pytest.raises(ValueError, match=message):
        cafe.SourceStats(mean, groups, covs)


def test_dimwise_keeps_every_live_dimension(source):
    stats = source.needs["stats"]
    dimwise = stats.dimwise()
    assert [int(dims) for dims in dimwise.groups] == sorted(int(d) for dims in stats.groups for d in dims)
    for dims, cov in zip(dimwise.groups, dimwise.covs, strict=True):
        assert cov.item() == source.feature_stats.cov[dims, dims].item()


def test_histograms_survive_a_file_and_know_their_classifier(source, tmp_path):
    histograms = source.needs["histograms"]
    histograms.save(tmp_path / "h.safetensors")
    loaded = cafe.SourceHistograms.load(tmp_path / "h.safetensors")
    first, second = (cafe.create("fr", source.classifier, h) for h in (histograms, loaded))
    assert torch.equal(first(source.corrupted), second(source.corrupted))
    other = copy.deepcopy(source.classifier)
    with torch.no_grad():
        other.head.bias.add_(1)
    with pytest.raises(ValueError, match="source histograms do not belong to this classifier"):
        cafe.create("fr", other, loaded)


def test_histograms_need_a_loader_that_can_be_read_twice(source):
    with pytest.raises(TypeError, match="read more than once, but got list_iterator; histograms take two passes"):
        cafe.SourceHistograms.fit(source.classifier, iter(source.loader))
    with pytest.raises(ValueError, match="the loader was empty"):
        cafe.SourceHistograms.fit(source.classifier, [])


def test_histograms_leave_dead_units_out(source):
    classifier = copy.deepcopy(source.classifier)
    with torch.no_grad():
        classifier.backbone.model[4].weight[2] = 0
        classifier.backbone.model[4].bias[2] = -5  # never positive before the ReLU
    histograms = cafe.SourceHistograms.fit(classifier, source.loader)
    assert not histograms.features.live[2] and histograms.features.live.sum() == 11
    adapter = cafe.create("fr", classifier, histograms)
    adapter(source.corrupted)
    assert adapter.report.stepped


def test_the_same_content_makes_the_same_file(source, tmp_path):
    for name in ("one", "two"):
        source.needs["stats"].save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_wide_covariances_are_added_up_in_blocks(monkeypatch):
    from cafe_tta.source import stats as sums

    monkeypatch.setattr(sums, "BLOCK", 4)
    features = features_of(40, 11, seed=3).double()
    found = cafe.FeatureStats.from_features(features)
    np.testing.assert_allclose(found.cov.numpy(), np.cov(features.numpy().T, bias=True), rtol=1e-10, atol=1e-12)
    assert torch.equal(found.cov, found.cov.T)


def test_sample_is_drawn_from_the_whole_stream_and_merges(monkeypatch):
    from cafe_tta.source import stats

    monkeypatch.setattr(stats, "SAMPLE", 50)
    features = torch.arange(1000.0)[:, None].repeat(1, 2)
    accumulator = stats.FeatureSums()
    for part in features.split(70):
        accumulator.add(part)
    sample = accumulator.sample
    assert len(sample) == 50 and 300 < sample.mean() < 700 and len(sample.unique(dim=0)) == 50
    parts = [features[:800], features[800:]]
    a, b = map(cafe.FeatureStats.from_features, parts)
    merged = cafe.FeatureStats.merge(a, b)
    assert len(merged.sample) == 50 and 5 <= (merged.sample[:, 0] >= 800).sum() <= 15
    # Without keys, each part is represented in proportion to its size.
    a, b = (replace(part, keys=None) for part in (a, b))
    merged = cafe.FeatureStats.merge(a, b)
    assert len(merged.sample) == 50 and (merged.sample[:, 0] >= 800).sum() == 10


def test_parts_that_know_their_offset_have_the_sample_of_the_whole(source, monkeypatch):
    from cafe_tta.source import stats

    monkeypatch.setattr(stats, "SAMPLE", 50)
    monkeypatch.setattr(stats, "CHUNK", 64)
    loader = [images for images, _ in source.loader]  # 4 of 60 images
    whole = cafe.FeatureStats.fit(source.classifier, loader)
    parts = [cafe.FeatureStats.fit_part(source.classifier, loader[a:b], 60 * a) for a, b in ((0, 1), (1, 1), (1, 4))]
    assert parts[1] is None
    for first, second in ((parts[0], parts[2]), (parts[2], parts[0])):
        merged = cafe.FeatureStats.merge(first, second)
        assert torch.equal(merged.sample, whole.sample) and torch.equal(merged.keys, whole.keys)
