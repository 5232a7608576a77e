"""Memory of streaming statistics: 100,000 feature vectors of D=2048 within 1 GB, whatever their number.

python benchmarks/statistics_memory.py
"""

import argparse
import resource
import time

import torch

from cafe_tta.source.stats import FeatureSums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--dims", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    accumulator = FeatureSums()
    generator = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    for done in range(0, args.vectors, args.batch):
        size = min(args.batch, args.vectors - done)
        accumulator.add(torch.randn(size, args.dims, generator=generator))
    cov = accumulator.mean_and_cov()[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    error = (cov - torch.eye(args.dims)).abs().max().item()
    seconds = time.perf_counter() - start
    print(f"{accumulator.count} vectors of {args.dims}: peak {peak:.0f} MB of the whole process, {seconds:.0f} s")
    print(f"covariance of standard normal vectors, largest deviation from the identity: {error:.4f}")


if __name__ == "__main__":
    main()
