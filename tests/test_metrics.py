import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cafe_tta import metrics


@settings(max_examples=30, deadline=None)
@given(dims=st.integers(1, 12), seed=st.integers(0, 1000), rank=st.integers(1, 12))
def test_frechet_distance_agrees_with_scipy(dims, seed, rank):
    """Also for covariances that are not of full rank."""
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(2, dims))
    roots = rng.normal(size=(2, dims, dims + 2))
    roots[1, :, rank:] = 0
    covs = roots @ roots.transpose(0, 2, 1)
    # tr (AB)^½ is the sum of the roots of the eigenvalues of AB, which are real and not negative.
    root = np.sqrt(scipy.linalg.eigvals(covs[0] @ covs[1]).real.clip(min=0)).sum()
    expected = ((means[0] - means[1]) ** 2).sum() + np.trace(covs[0] + covs[1]) - 2 * root
    found = metrics.frechet_distance(*map(torch.tensor, (means[0], covs[0], means[1], covs[1])))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_frechet_distance_of_a_distribution_to_itself_is_zero():
    features = torch.randn(100, 8, generator=torch.Generator().manual_seed(0)).double()
    mean, cov = features.mean(0), torch.cov(features.T)
    assert metrics.frechet_distance(mean, cov, mean, cov) == pytest.approx(0, abs=1e-9)


def test_frechet_distance_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"a mean \(D,\) and a covariance \(D, D\), but got \(2,\) and \(3, 3\)"):
        metrics.frechet_distance(torch.zeros(2), torch.eye(3), torch.zeros(2), torch.eye(2))


def test_accuracy():
    assert metrics.accuracy(torch.tensor([[1.0, 2], [3, 1], [0, 1], [5, 4]]), torch.tensor([1, 0, 0, 1])) == 0.5


def slow_calibration_error(confidences, right, bins):
    """Bin by bin, in numpy."""
    total = 0.0
    for number in range(bins):
        low, high = number / bins, (number + 1) / bins
        inside = (confidences > low) & (confidences <= high) | ((number == 0) & (confidences == 0))
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidences[inside].mean())
    return total


@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 10**6))
def test_calibration_error_agrees_with_numpy(count, bins, seed):
    random = np.random.default_rng(seed)
    confidences, right = random.beta(3, 1, count), random.random(count) < 0.6
    found = metrics.calibration_error(torch.tensor(confidences), torch.tensor(right), bins)
    assert found == pytest.approx(slow_calibration_error(confidences, right, bins), abs=1e-12)


def test_calibration_error_of_known_answers():
    sure, right = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([True, True, True, False])
    assert metrics.calibration_error(sure, right) == 0.25
    assert metrics.calibration_error(sure[:3], right[:3]) == 0.0
    # An edge belongs to the bin below it: one bin of two, not two of one.
    assert metrics.calibration_error(torch.tensor([0.4, 0.5]), torch.tensor([True, False]), bins=2) == pytest.approx(
        0.05
    )


def test_calibration_error_of_what_are_no_confidences():
    with pytest.raises(ValueError, match=r"expected as many confidences as answers, .* shapes \(2,\) and \(3,\)"):
        metrics.calibration_error(torch.rand(2), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="expected confidences between 0 and 1; take the largest value of a softmax"):
        metrics.calibration_error(torch.tensor([3.0]), torch.tensor([True]))
