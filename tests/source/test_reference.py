"""`Reference`: distances of features from the source, beside slow and obvious computations."""

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings

import cafe_tta as cafe
from cafe_tta import losses


def _stats(seed, dims=6, count=400, groups=3):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dims, dims, generator=generator, dtype=torch.float64)
    features = torch.randn(count, dims, generator=generator, dtype=torch.float64) @ mixing
    return cafe.FeatureStats.from_features(features), features, groups


def _frechet(mean_a, cov_a, mean_b, cov_b):
    root = scipy.linalg.sqrtm(cov_a @ cov_b)
    return float(((mean_a - mean_b) ** 2).sum() + np.trace(cov_a + cov_b - 2 * root.real))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), shift=st.floats(-3, 3), scale=st.floats(0.2, 3), floor=st.floats(1e-3, 2.0))
def test_frechet_distances_equal_scipys(seed, shift, scale, floor):
    """By group and in full; whatever the eigenvalue floor, which only the alignment loss knows."""
    stats, features, groups = _stats(seed)
    source = stats.group(groups, keep_full=True)
    reference = cafe.Reference(source, eigenvalue_floor=floor)
    batch = features[:150] * scale + shift
    mean, cov = batch.mean(0).numpy(), np.cov(batch.numpy().T, bias=True)
    whole = _frechet(source.mean.numpy(), source.full_cov.numpy(), mean, cov)
    parts = [
        _frechet(source.mean[dims].numpy(), block.numpy(), mean[dims], cov[np.ix_(dims, dims)])
        for dims, block in zip(source.groups, source.covs, strict=True)
    ]
    assert reference.full_frechet(batch) == pytest.approx(whole, rel=1e-6, abs=1e-6)
    assert reference.frechet(batch) == pytest.approx(sum(parts), rel=1e-6, abs=1e-6)


def test_groups_of_different_widths_are_padded_without_a_trace():
    stats, features, _ = _stats(3, dims=7)
    source = stats.group(3)
    assert len({len(dims) for dims in source.groups}) > 1
    reference = cafe.Reference(source)
    apart = sum(
        cafe.Reference(cafe.SourceStats(source.mean[dims], [torch.arange(len(dims))], [cov])).frechet(features[:, dims])
        for dims, cov in zip(source.groups, source.covs, strict=True)
    )
    assert reference.frechet(features + 1) > 1
    assert reference.frechet(features) == pytest.approx(apart, abs=1e-9)


def test_alignment_is_the_loss_and_its_threshold_says_what_looks_like_the_source():
    stats, features, groups = _stats(1, count=2000)
    source = stats.group(groups)
    reference = cafe.Reference(source)
    batch = features[:256] + 0.5
    assert reference.alignment(batch) == pytest.approx(losses.alignment(batch, source).item(), rel=1e-9)
    assert reference.divergences(batch).shape == (len(source.groups),)
    assert reference.looks_like_source(features[100:356]) is True
    assert reference.looks_like_source(features[100:356] * 3) is False
    assert reference.looks_like_source(features[:8]) is None  # too few images to say
    assert reference.dispersion(features * 2) == pytest.approx(4.0, rel=1e-6)


def _slow_drift(features, source, floor=1e-3):
    """Image by image and direction by direction."""
    total, dims = 0.0, 0
    for group, cov in zip(source.groups, source.covs, strict=True):
        values, vectors = np.linalg.eigh(cov.numpy())
        for value, vector in zip(values, vectors.T, strict=True):
            scale = max(float(value), floor) ** 0.5
            column = [
                sum(float(row[i] - source.mean[i]) * float(v) for i, v in zip(group, vector, strict=True)) / scale
                for row in features
            ]
            mean = sum(column) / len(column)
            variance = sum((value - mean) ** 2 for value in column) / (len(column) - 1)
            total += mean**2 - variance / len(column)
            dims += 1
    return max(0.0, 1 + 8 * total / dims) ** 0.5


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), images=st.integers(8, 40), shift=st.floats(-2, 2), scale=st.floats(0.1, 3))
def test_drift_equals_a_slow_computation(seed, images, shift, scale):
    stats, features, groups = _stats(seed, dims=7)
    source = stats.group(groups)
    batch = features[:images] * scale + shift
    assert cafe.Reference(source).drift(batch) == pytest.approx(_slow_drift(batch, source), rel=1e-9, abs=1e-9)


def test_drift_of_the_source_is_1_for_every_batch_size_and_that_of_a_shift_does_not_depend_on_it():
    stats, features, groups = _stats(5, count=6000)
    reference = cafe.Reference(stats.group(groups))
    scale = torch.sqrt(stats.cov.diagonal())
    for size in (8, 32, 256):
        clean = [reference.drift(part) for part in features[: 40 * size].split(size)]
        assert sum(clean) / len(clean) == pytest.approx(1, abs=0.08)
        shifted = [reference.drift(part + scale) for part in features[: 40 * size].split(size)]
        assert sum(shifted) / len(shifted) == pytest.approx(reference.drift(features + scale), rel=0.1)
    assert reference.drift(features[:7]) is None


def test_statistics_without_a_sample_have_no_threshold_and_those_without_covariance_no_full_distance():
    stats, features, groups = _stats(2)
    plain = cafe.FeatureStats(stats.mean, stats.cov, stats.count)
    reference = cafe.Reference(plain.group(groups))
    assert not reference.calibrated and reference.looks_like_source(features) is None
    assert reference.drift(features) == pytest.approx(1, abs=0.02) and reference.full_frechet(features) is None
    with pytest.raises(ValueError, match="gate needs to know how source batches look"):
        reference.threshold(64)
