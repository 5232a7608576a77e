"""What the alignment loss costs, forward and backward, against the obvious ways to compute it. Prints ratios.

python benchmarks/alignment_loss.py
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.distributions import MultivariateNormal, kl_divergence

import cafe_tta as cafe
from cafe_tta.gaussians import SourceGaussians

FLOOR = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dims", type=int, default=2048)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    loadings = torch.randn(64, args.dims, generator=generator) / 8

    def features_of(samples: int) -> torch.Tensor:
        noise = torch.randn(samples, args.dims, generator=generator)
        return (torch.randn(samples, 64, generator=generator) @ loadings + 0.5 * noise).relu()

    source = cafe.FeatureStats.from_features(features_of(4000)).group(args.groups, keep_full=True)
    gaussians = SourceGaussians(source, FLOOR)
    features = features_of(args.batch).requires_grad_()
    floored = [_floored(cov) for cov in source.covs]
    assert source.full_cov is not None
    whole = _floored(source.full_cov).float()

    def ours() -> torch.Tensor:
        return cafe.losses.alignment(features, gaussians)

    def distributions() -> torch.Tensor:
        total = features.new_zeros((), dtype=torch.float64)
        for dims, cov in zip(source.groups, floored, strict=True):
            group = features[:, dims].double()
            target = MultivariateNormal(group.mean(0), torch.cov(group.T, correction=0).reshape(cov.shape))
            origin = MultivariateNormal(source.mean[dims], cov)
            total = total + (kl_divergence(target, origin) + kl_divergence(origin, target)) / 2
        return total / len(source.groups)

    def inverses() -> torch.Tensor:
        total = features.new_zeros((), dtype=torch.float64)
        for dims, cov in zip(source.groups, floored, strict=True):
            group = features[:, dims].double()
            delta = group.mean(0) - source.mean[dims]
            theirs = torch.cov(group.T, correction=0).reshape(cov.shape)
            a, b = torch.linalg.inv(cov), torch.linalg.inv(theirs)
            total = total + (a * theirs).sum() + (b * cov).sum() - 2 * len(dims) + delta @ (a + b) @ delta
        return total / 4 / len(source.groups)

    def literal() -> torch.Tensor:
        total = features.new_zeros((), dtype=torch.float64)
        for dims, cov in zip(source.groups, floored, strict=True):
            group = features[:, dims].double()
            target = (group.mean(0), torch.cov(group.T, correction=0).reshape(cov.shape))
            origin = (source.mean[dims], cov)
            total = total + (_kl(*target, *origin) + _kl(*origin, *target)) / 2
        return total / len(source.groups)

    def full_covariance() -> torch.Tensor:
        centred = features - features.mean(0)
        cov = centred.T @ centred / len(features) + 1e-2 * torch.eye(args.dims)
        factor = torch.linalg.cholesky(cov)
        delta = features.mean(0) - source.mean.float()
        solved = torch.cholesky_solve(torch.cat([whole, delta[:, None]], 1), factor)
        return solved.diagonal().sum() + delta @ solved[:, -1] + (whole * cov).sum()

    print(f"B={args.batch} D={args.dims} k={args.groups} (widest group {source.widest_group}), {args.threads} threads")
    exact = inverses().item()
    print(
        f"value {ours().item():.6f}, literal float64 {exact:.6f}, relative error {abs(ours().item() / exact - 1):.1e}"
    )
    base = _seconds(ours, features, args.repeats)
    print(f"{'alignment loss':<46}{1000 * base:9.1f} ms")
    for name, function in (
        ("loop over groups, torch.distributions", distributions),
        ("loop over groups, Eq. 2-3 as printed", literal),
        ("loop over groups, log-determinants cancelled", inverses),
        ("full D×D covariance, one Cholesky", full_covariance),
    ):
        seconds = _seconds(function, features, max(3, args.repeats // 3))
        verdict = "slower" if seconds > base else "faster"
        print(f"{name:<46}{1000 * seconds:9.1f} ms  {seconds / base:6.1f} times the alignment loss ({verdict})")


def _kl(mean_a: torch.Tensor, cov_a: torch.Tensor, mean_b: torch.Tensor, cov_b: torch.Tensor) -> torch.Tensor:
    """Eq. 2, with an explicit inverse and determinants."""
    inverse, delta = torch.linalg.inv(cov_b), mean_a - mean_b
    log_ratio = torch.linalg.slogdet(cov_b).logabsdet - torch.linalg.slogdet(cov_a).logabsdet
    return (log_ratio - len(delta) + torch.trace(inverse @ cov_a) + delta @ inverse @ delta) / 2


def _floored(cov: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(cov)
    return (vectors * values.clamp(min=FLOOR)) @ vectors.T


def _seconds(function: Callable[[], torch.Tensor], features: torch.Tensor, repeats: int) -> float:
    """Median of forward and backward."""
    torch.autograd.grad(function(), features)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.autograd.grad(function(), features)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
