"""Feature grouping: correlated dimensions together, every live one in exactly one group, reproducible."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cafe_tta as cafe
from cafe_tta.source.groups import correlation, dead_dims, group_features
from cafe_tta.source.images import SourceWarning


def block_cov(sizes, inside=0.8, seed=0):
    """A covariance of blocks of correlated dimensions, in shuffled order, and which block each dimension is of."""
    total = sum(sizes)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(total, generator=torch.Generator().manual_seed(seed))]
    cov = torch.where(labels[:, None] == labels, inside, 0.02) + (1 - inside) * torch.eye(total)
    scale = torch.linspace(0.5, 3, total)
    return (cov * scale[:, None] * scale).double(), labels


def test_correlated_blocks_come_back_as_groups():
    cov, labels = block_cov([7, 5, 3])
    groups = group_features(cov, 3)
    assert [len(dims) for dims in groups] == [7, 5, 3]
    for dims in groups:
        assert len(labels[dims].unique()) == 1


def test_negative_correlation_is_correlation():
    cov, labels = block_cov([6, 6])
    signs = torch.tensor([1.0, -1.0] * 6, dtype=torch.float64)
    groups = group_features(cov * signs[:, None] * signs, 2)
    assert all(len(labels[dims].unique()) == 1 for dims in groups)


@settings(max_examples=40, deadline=None)
@given(dims=st.integers(1, 30), data=st.data(), seed=st.integers(0, 5))
def test_every_live_dimension_is_in_exactly_one_group(dims, data, seed):
    generator = torch.Generator().manual_seed(dims)
    features = torch.randn(60, dims, generator=generator) @ torch.randn(dims, dims, generator=generator)
    dead = data.draw(st.sets(st.integers(0, dims - 1), max_size=dims - 1))
    features[:, list(dead)] = 1.25
    cov = torch.cov(features.T.double(), correction=0).reshape(dims, dims)
    live = dims - len(dead)
    num_groups = data.draw(st.integers(1, live))
    limit = data.draw(st.one_of(st.none(), st.integers(1, dims)))
    groups = group_features(cov, num_groups, seed=seed, max_group_size=limit)
    every = torch.cat(groups).tolist()
    assert sorted(every) == [d for d in range(dims) if d not in dead]
    assert all(len(dims) <= (limit or 30) for dims in groups)
    again = group_features(cov, num_groups, seed=seed, max_group_size=limit)
    assert all(map(torch.equal, groups, again))


@pytest.mark.parametrize("num_groups", [1, 2, 39, 40])
def test_from_one_group_to_one_for_each_dimension(num_groups):
    features = torch.randn(200, 40, generator=torch.Generator().manual_seed(0)).double()
    assert len(group_features(torch.cov(features.T), num_groups)) == num_groups


def test_oversized_groups_are_split_into_related_pieces():
    """One block of 24 may not stay whole; its pieces still hold what correlates most."""
    outer, _ = block_cov([24, 6], inside=0.5)
    groups = group_features(outer, 2, max_group_size=10)
    assert max(map(len, groups)) <= 10 and sum(map(len, groups)) == 30
    strong = outer.clone()
    groups = group_features(strong, 1, max_group_size=6)
    assert max(map(len, groups)) <= 6


def test_a_group_that_clustering_cannot_split_is_cut_evenly():
    """All dimensions equally correlated: nothing to cluster by."""
    cov = 0.9 * torch.ones(50, 50) + 0.1 * torch.eye(50)
    groups = group_features(cov.double(), 1, max_group_size=8)
    assert max(map(len, groups)) <= 8 and len(torch.cat(groups).unique()) == 50


def test_a_feature_that_hardly_varies_does_not_make_the_loss_explode():
    """Its source eigenvalue is floored, that of the batch is not: tr C⁻¹ of source images themselves would be huge."""
    features = torch.randn(4096, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features[:, 2] *= 1e-4
    stats = cafe.FeatureStats.from_features(features)
    grouped = stats.group(num_groups=2)
    assert grouped.meta["dead_dims"] == 1
    assert cafe.losses.alignment(features[:512], grouped) < 0.1
    kept = cafe.SourceStats(stats.mean, [torch.arange(6)], [stats.cov])  # as if it were a feature like the others
    assert cafe.losses.alignment(features[:512], kept) > 1e4


def test_features_that_are_copies_of_one_another_are_warned_of():
    features = torch.randn(2048, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cafe.FeatureStats.from_features(features).group(num_groups=2)  # no warning
    features[:, 3] = features[:, 2] + 1e-6 * features[:, 3]
    with pytest.warns(SourceWarning, match=r"source batches of 512 images themselves have an alignment loss of .*e\+0"):
        cafe.FeatureStats.from_features(features).group(num_groups=2)


def test_dead_dimensions_are_left_out_and_counted():
    features = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
    features[:, [1, 4]] = 0.5
    stats = cafe.FeatureStats.from_features(features)
    assert dead_dims(stats.cov).tolist() == [False, True, False, False, True, False]
    grouped = stats.group(2)
    assert torch.cat(list(grouped.groups)).sort().values.tolist() == [0, 2, 3, 5]
    assert grouped.meta["dead_dims"] == 2


def test_correlation_agrees_with_numpy():
    features = torch.randn(50, 5, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(correlation(torch.cov(features.T)), torch.corrcoef(features.T))


@pytest.mark.parametrize(
    ("num_groups", "limit", "message"),
    [
        (0, None, r"expected `num_groups` between 1 and 4, the number of features that vary \(of 5\), but got 0"),
        (5, None, "between 1 and 4.*but got 5"),
        (2, 0, "expected `max_group_size` to be at least 1 or None, but got 0"),
    ],
)
def test_impossible_groupings_are_refused(num_groups, limit, message):
    cov = torch.diag(torch.tensor([1.0, 2, 3, 4, 0])).double()
    with pytest.raises(ValueError, match=message):
        group_features(cov, num_groups, max_group_size=limit)


def test_constant_features_are_refused():
    with pytest.raises(ValueError, match="every dimension of the covariance is constant"):
        group_features(torch.zeros(3, 3), 1)
