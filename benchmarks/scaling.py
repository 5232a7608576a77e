"""How the cost of the alignment loss and of the statistics grows with B, D, k and N: times and fitted exponents.

python benchmarks/scaling.py
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence

import timing
import torch

import cafe_tta as cafe
from cafe_tta.gaussians import SourceGaussians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{args.threads} threads, median of {args.repeats}; from B=256, D=2048, k=128\n")
    print("| what grows | values | ms | exponent |\n|---|---|---|---:|")
    show("alignment loss, B", [64, 128, 256, 512, 1024], lambda n: loss(batch=n), args.repeats)
    show("alignment loss, D", [512, 1024, 2048, 4096], lambda n: loss(dims=n, groups=n // 16), args.repeats)
    show("alignment loss, k", [16, 32, 64, 128, 256, 512, 1024], lambda n: loss(groups=n), args.repeats)
    show("statistics, N", [1024, 2048, 4096, 8192], statistics_of, args.repeats)


def loss(batch: int = 256, dims: int = 2048, groups: int = 128) -> Callable[[], object]:
    parts = torch.arange(dims).split(dims // groups)
    source = cafe.SourceStats(torch.zeros(dims), parts, [torch.eye(len(part)).double() for part in parts])
    gaussians = SourceGaussians(source, 1e-3)
    features = torch.randn(batch, dims, requires_grad=True)
    return lambda: cafe.losses.alignment(features, gaussians).backward()


def statistics_of(count: int) -> Callable[[], object]:
    features = torch.randn(count, 2048)
    return lambda: cafe.FeatureStats.from_features(features)


def show(what: str, values: Sequence[int], make: Callable[[int], Callable[[], object]], repeats: int) -> None:
    seconds = [timing.in_turns({"it": make(value)}, repeats)["it"] for value in values]
    xs, ys = [math.log(value) for value in values], [math.log(second) for second in seconds]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)
    times = ", ".join(f"{1000 * second:.1f}" for second in seconds)
    print(f"| {what} | {', '.join(map(str, values))} | {times} | {slope:.2f} |", flush=True)


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - start:.0f} s")
