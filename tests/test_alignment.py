"""The alignment loss against literal computations of Eq. 2-3."""

import math
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal, kl_divergence

import cafe_tta as cafe
from cafe_tta import gaussians
from cafe_tta.gaussians import Moments, SourceGaussians, merge


def literal_alignment(features, source, eigenvalue_floor):
    """Eq. 2-3 as they are printed, with explicit inverses and determinants, a loop over groups, in float64."""
    features = features.double()
    total = 0.0
    for dims, cov in zip(source.groups, source.covs, strict=True):
        eigenvalues, vectors = torch.linalg.eigh(cov.double())
        source_cov = vectors @ torch.diag(eigenvalues.clamp(min=eigenvalue_floor)) @ vectors.T
        source_mean = source.mean.double()[dims]
        group = features[:, dims]
        target_mean = group.mean(0)
        target_cov = (group - target_mean).T @ (group - target_mean) / len(group)
        total += (_kl(target_mean, target_cov, source_mean, source_cov)) / 2
        total += (_kl(source_mean, source_cov, target_mean, target_cov)) / 2
    return total / len(source.groups)


def _kl(mean_a, cov_a, mean_b, cov_b):
    inverse = torch.linalg.inv(cov_b)
    log_ratio = torch.linalg.slogdet(cov_b).logabsdet - torch.linalg.slogdet(cov_a).logabsdet
    distance = (mean_a - mean_b) @ inverse @ (mean_a - mean_b)
    return (log_ratio - len(mean_a) + torch.trace(inverse @ cov_a) + distance) / 2


def correlated(samples, dims, seed, factors=4, noise=0.5):
    """Post-ReLU features with correlated dimensions, like a network's."""
    generator = torch.Generator().manual_seed(seed)
    loadings = torch.randn(dims, factors, generator=torch.Generator().manual_seed(99))
    latent = torch.randn(samples, factors, generator=generator)
    return (latent @ loadings.T / factors**0.5 + noise * torch.randn(samples, dims, generator=generator) + 0.5).relu()


def grouped(dims, num_groups, samples=2000):
    return cafe.FeatureStats.from_features(correlated(samples, dims, seed=0)).group(num_groups, max_group_size=None)


@settings(max_examples=40, deadline=None)
@given(
    dims=st.integers(1, 24),
    data=st.data(),
    shift=st.floats(-1, 1),
    scale=st.floats(0.3, 3),
    floor=st.sampled_from([1e-6, 1e-3, 0.05, 0.5]),
)
def test_agrees_with_the_printed_formula(dims, data, shift, scale, floor):
    source = grouped(dims, data.draw(st.integers(1, dims)))
    batch = data.draw(st.integers(2 * dims + 8, 2 * dims + 60))
    features = (correlated(batch, dims, seed=data.draw(st.integers(1, 1000))) * scale + shift).double()
    value = cafe.losses.alignment(features, source, eigenvalue_floor=floor)
    expected = literal_alignment(features, source, floor)
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-9)


def test_agrees_with_torch_distributions():
    source = grouped(10, 3)
    features = correlated(64, 10, seed=3).double() * 1.3
    total = 0.0
    for dims, cov in zip(source.groups, source.covs, strict=True):
        group = features[:, dims]
        target = MultivariateNormal(group.mean(0), torch.cov(group.T, correction=0).reshape(len(dims), len(dims)))
        ours = MultivariateNormal(source.mean[dims], cov)
        total += (kl_divergence(target, ours) + kl_divergence(ours, target)) / 2
    value = cafe.losses.alignment(features, source, eigenvalue_floor=1e-9)
    torch.testing.assert_close(value, total / len(source.groups))


@pytest.mark.parametrize("batch", [40, 9, 3, 1])
def test_gradient_agrees_with_finite_differences(batch):
    """For batches larger than the groups, smaller, and for a single image."""
    source = grouped(9, 2)
    features = (correlated(batch, 9, seed=4).double() * 1.2 + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda f: cafe.losses.alignment(f, source, eigenvalue_floor=0.01), features)


def test_gradient_agrees_with_autograd_of_the_printed_formula():
    source = grouped(16, 4)
    features = correlated(80, 16, seed=5).double().requires_grad_()
    (ours,) = torch.autograd.grad(cafe.losses.alignment(features, source, eigenvalue_floor=0.02), features)
    (expected,) = torch.autograd.grad(literal_alignment(features, source, 0.02), features)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-10)


@pytest.fixture(scope="module")
def wide_source():
    """D=2048 in 128 groups, as in the paper. Groups are dealt out here: clustering is tested elsewhere."""
    stats = cafe.FeatureStats.from_features(correlated(6000, 2048, seed=0, factors=40))
    sizes = torch.tensor([181, 90, *[16] * 80, *[11] * 45, 2])
    sizes[-1] = 2048 - sizes[:-1].sum()
    groups = torch.arange(2048).split(sizes.tolist())
    return cafe.SourceStats(stats.mean, groups, [stats.cov[dims][:, dims] for dims in groups])


def test_float32_at_full_width_agrees_with_float64(wide_source):
    features = (correlated(256, 2048, seed=6, factors=40) * 1.2).requires_grad_()
    value = cafe.losses.alignment(features, wide_source, eigenvalue_floor=1e-3)
    assert value.dtype == torch.float32
    expected = literal_alignment(features, wide_source, 1e-3)
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=0)
    (ours,) = torch.autograd.grad(value, features)
    (theirs,) = torch.autograd.grad(expected, features)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_batch_covariance_is_never_formed(wide_source):
    """No tensor of the forward and backward pass is as large as D×D."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return result

    gaussians = SourceGaussians(wide_source, 1e-3)
    features = correlated(256, 2048, seed=6).requires_grad_()
    with Watch():
        cafe.losses.alignment(features, gaussians).backward()
    assert largest < 2048 * 2048 / 4


@pytest.mark.parametrize("num_groups", [1, 2, 7, 23, 24])
@pytest.mark.parametrize("batch", [1, 2, 10, 23, 24, 25, 200])
def test_every_number_of_groups_and_every_batch_gives_a_finite_loss(num_groups, batch):
    source = grouped(24, num_groups)
    features = (correlated(batch, 24, seed=7) * 2).requires_grad_()
    value = cafe.losses.alignment(features, source)
    value.backward()
    assert math.isfinite(value.item()) and value.item() > 0
    assert torch.isfinite(features.grad).all()


def test_a_small_batch_is_padded_with_source_moments():
    """A batch of B < d images counts as B images and d - B exact samples of the source."""
    source = grouped(12, 1)
    features = correlated(5, 12, seed=8).double()
    value = cafe.losses.alignment(features, source, eigenvalue_floor=1e-6)
    (cov,) = source.covs
    (dims,) = source.groups
    mean, missing = source.mean[dims], 7
    group = features[:, dims]
    total_mean = (group.sum(0) + missing * mean) / 12
    second = group.T @ group + missing * (cov + torch.outer(mean, mean))
    total_cov = second / 12 - torch.outer(total_mean, total_mean)
    expected = (_kl(total_mean, total_cov, mean, cov) + _kl(mean, cov, total_mean, total_cov)) / 2
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)


def test_constant_features_give_a_finite_loss_and_gradient():
    source = grouped(8, 2)
    features = torch.full((64, 8), 0.7, requires_grad=True)
    value = cafe.losses.alignment(features, source)
    value.backward()
    assert math.isfinite(value.item()) and torch.isfinite(features.grad).all()


def test_duplicated_images_do_not_make_a_group_singular():
    """256 copies of 4 images have covariances of rank 3."""
    source = grouped(8, 1)
    features = correlated(4, 8, seed=9).repeat(64, 1)
    assert 0 < cafe.losses.alignment(features, source).item() < 1e3


def test_features_that_are_not_finite_give_nan():
    """Not a number that looks like a good alignment: the adapter refuses such a step."""
    features = correlated(30, 8, seed=10)
    features[3, 2] = math.nan
    assert math.isnan(cafe.losses.alignment(features, grouped(8, 2)).item())


def test_is_zero_at_home_and_grows_with_the_shift():
    source = grouped(20, 4)
    home = correlated(4000, 20, seed=11)
    values = [cafe.losses.alignment(home + shift, source).item() for shift in (0, 0.1, 0.3, 1)]
    assert values[0] < 0.02 and values == sorted(values)


def test_notices_lost_correlation_where_dimwise_does_not():
    """Shuffling each dimension by itself keeps means and variances, and destroys the correlations."""
    source = grouped(12, 2)
    features = correlated(3000, 12, seed=12, noise=0.2)
    stats = cafe.FeatureStats.from_features(features)
    source = stats.group(2, max_group_size=None)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.stack([column[torch.randperm(3000, generator=generator)] for column in features.T], dim=1)
    assert cafe.losses.alignment(shuffled, source.dimwise()).item() < 1e-3
    assert cafe.losses.alignment(shuffled, source).item() > 1


def test_dimwise_is_the_formula_of_one_dimension():
    source = grouped(6, 2).dimwise()
    features = correlated(50, 6, seed=13).double()
    mean, var = features.mean(0), features.var(0, correction=0)
    ours = torch.cat([cov.flatten() for cov in source.covs])
    delta = (mean - source.mean).square()
    expected = ((var / ours + ours / var - 2 + delta * (1 / ours + 1 / var)) / 4).mean()
    torch.testing.assert_close(cafe.losses.alignment(features, source, eigenvalue_floor=1e-12), expected)


def test_moments_merge_exactly():
    """The moments of two shards are those of the whole: what many machines add up."""
    gaussians = SourceGaussians(grouped(12, 3), 1e-3)
    features = correlated(70, 12, seed=14)
    whole = gaussians.moments(features)
    parts = [
        merge(a, b) for a, b in zip(gaussians.moments(features[:26]), gaussians.moments(features[26:]), strict=True)
    ]
    for expected, found in zip(whole, parts, strict=True):
        for name in ("count", "mean", "cov"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-12)


def test_moments_survive_packing():
    gaussians = SourceGaussians(grouped(12, 3), 1e-3)
    moments = gaussians.moments(correlated(70, 12, seed=14))
    for expected, found in zip(moments, gaussians.unpack(*gaussians.pack(moments)), strict=True):
        assert all(torch.equal(getattr(expected, name), getattr(found, name)) for name in ("count", "mean", "cov"))


def test_a_small_batch_is_padded_with_memory_before_source_moments():
    gaussians = SourceGaussians(grouped(10, 1), 1e-3)
    features = correlated(60, 10, seed=15)
    memory = gaussians.moments(features[20:])
    joined = gaussians.divergence(gaussians.moments(features[:20]), samples_per_dim=6, memory=memory)
    whole = gaussians.divergence(gaussians.moments(features), samples_per_dim=6)
    torch.testing.assert_close(joined.values, whole.values)
    assert joined.padded.all() and not whole.padded.any()


@pytest.mark.parametrize(
    ("features", "floor", "message"),
    [
        (torch.zeros(4, 3), 1e-3, r"expected features of shape \(batch, 8\).*but got \(4, 3\)"),
        (torch.zeros(0, 8), 1e-3, r"at least one row, but got \(0, 8\)"),
        (torch.zeros(4, 8), 0.0, "expected `eigenvalue_floor` to be above 0, but got 0.0"),
    ],
)
def test_bad_arguments_are_refused(features, floor, message):
    with pytest.raises(ValueError, match=message):
        cafe.losses.alignment(features, grouped(8, 2), eigenvalue_floor=floor)


def test_merge_is_symmetric():
    gaussians = SourceGaussians(grouped(6, 1), 1e-3)
    (a,), (b,) = gaussians.moments(correlated(9, 6, seed=1)), gaussians.moments(correlated(30, 6, seed=2))
    first, second = merge(a, b), merge(b, a)
    assert isinstance(first, Moments)
    torch.testing.assert_close(first.cov, second.cov)
    torch.testing.assert_close(first.mean, second.mean)


def test_group_a_little_wider_than_the_batch_keeps_a_gentle_gradient():
    """Batch and memory together may just span a group: an inverse there would be enormous, and the step too."""
    source = grouped(60, 1)
    gaussians = SourceGaussians(source, 1e-3)
    memory = gaussians.moments(correlated(58, 60, seed=20))
    features = correlated(4, 60, seed=21).requires_grad_()
    whole = correlated(600, 60, seed=22).requires_grad_()
    gaussians.divergence(gaussians.moments(whole), 1.25).values.mean().backward()
    gaussians.divergence(gaussians.moments(features), 1.25, memory, at_least=58).values.mean().backward()
    assert features.grad.norm() < 10 * whole.grad.norm()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 2000))
def test_buckets_are_the_cheapest_cuts(widths, bucket_cost):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussians, "BUCKET_COST", bucket_cost)
        buckets = gaussians._partition(widths)
    assert sorted(number for bucket in buckets for number in bucket) == list(range(len(widths)))
    ordered = sorted(widths)
    cheapest = min(
        sum((b - a) * ordered[b - 1] ** 2 + bucket_cost for a, b in pairwise([0, *cuts, len(ordered)]))
        for count in range(len(ordered))
        for cuts in combinations(range(1, len(ordered)), count)
    )
    assert sum(len(b) * max(widths[n] for n in b) ** 2 + bucket_cost for b in buckets) == cheapest
