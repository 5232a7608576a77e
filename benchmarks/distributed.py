"""What adapting as one over several ranks costs: bytes and time of a step, against one process with the whole batch.

torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py                # measures, on this machine
python benchmarks/distributed.py --ranks 2 8 64 --gigabits 10 --latency 50        # works it out on paper
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import steps
import torch
from torch import Tensor, distributed

import cafe_tta as cafe
from cafe_tta import models
from cafe_tta.distributed.synchronised import buckets_of

CHOICES: dict[str, dict[str, object]] = {
    "cafe": {},
    "cafe, BatchNorm per rank": {"sync_batchnorm": False},
    "cafe, parameters=norm": {"parameters": "norm"},
    "cafe, parameters=norm, BatchNorm per rank": {"parameters": "norm", "sync_batchnorm": False},
}


GATHERED = 4 * 8 + 2 * 8  # who has how many images of what; whether anybody refuses the step


class Cost(NamedTuple):
    """Bytes that a rank hands to collectives in one step, and how many collectives these are."""

    gradients: int
    batchnorm: int
    blocks: int
    rest: int
    reductions: int
    gathers: int

    @property
    def bytes(self) -> int:
        return self.gradients + self.batchnorm + self.blocks + self.rest


def gradient_comes_by(adapter: cafe.CAFe, size: int) -> list[bool]:
    """Whether the gradient passes each BatchNorm layer: not where all that comes before stays as it is."""
    found: list[bool] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].requires_grad))
        for layer in adapter.normaliser.layers
    ]
    adapter.normaliser.evaluating()
    adapter.run(torch.randn(1, 3, size, size))
    for hook in hooks:
        hook.remove()
    return found


def cost_of(adapter: cafe.CAFe, size: int) -> Cost:
    """From the sizes alone; where ranks run, it is compared with what they report."""
    moving = adapter.moving()
    sizes = [p.numel() * p.element_size() for p in moving]
    layers = adapter.normaliser.layers
    channels = [layer.num_features for layer in layers]
    if adapter.config.sync_batchnorm:  # two float64 a channel: forward, and backward where a gradient comes by
        both = [2 if backward else 1 for backward in gradient_comes_by(adapter, size)]
        batchnorm = sum(c * times * 2 * 8 for c, times in zip(channels, both, strict=True))
        batchnorm_calls = sum(both)
    else:  # running mean and variance, once
        batchnorm, batchnorm_calls = sum(channels) * 2 * 4, 1
    widths = [tuple(m.mean.shape) for m in adapter.gaussians.moments(torch.zeros(1, adapter.gaussians.num_features))]
    blocks = sum(groups * (width + width * (width + 1) // 2) * 8 for groups, width in widths)
    classes = adapter.classifier.num_classes
    buckets = len(list(buckets_of(moving)))
    return Cost(sum(sizes), batchnorm, blocks, (classes + 1) * 4 + GATHERED, buckets + batchnorm_calls + 2, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="timm:resnet26")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256, help="images of all ranks together")
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8, 64], help="on paper: how many")
    parser.add_argument("--gigabits", type=float, default=10.0, help="on paper: of the network, each way")
    parser.add_argument("--latency", type=float, default=50.0, help="on paper: microseconds of a message")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    classifier = cafe.split_classifier(models.build(args.model, num_classes=args.classes, size=args.size).eval())
    loader = [torch.randn(16, 3, args.size, args.size) for _ in range(2)]
    steps.settle(classifier, loader)
    source = steps.made_up_groups(cafe.FeatureStats.fit(classifier, loader), args.groups)
    title = f"{args.model}, {args.size}×{args.size}, D={classifier.num_features}, {len(source.groups)} groups"
    make = partial(cafe.create, "cafe", classifier, source)
    with cafe.distributed.joined() as rank:
        if distributed.is_initialized():
            measure(make, args.batch, args.size, args.repeats, title, rank)
        else:
            on_paper(make, args, title)


def measure(make: Callable[..., cafe.CAFe], batch: int, size: int, repeats: int, title: str, rank: int) -> None:
    """One process with the whole batch, the others waiting; then all ranks with a part each; in turns."""
    world = distributed.get_world_size()
    images = torch.randn(batch, 3, size, size)
    own = images.tensor_split(world)[rank]
    say = print if rank == 0 else lambda *_: None
    say(f"{title}, B={batch}, {world} ranks with {torch.get_num_threads()} threads each, median of {repeats}\n")
    say("| what | one process, B images | ranks, B/N each | ratio | bytes per rank |\n|---|---:|---:|---:|---:|")
    for name, options in CHOICES.items():
        with cafe.distributed.apart():
            alone = make(**options)
        together = make(**options)
        # The first step compares all weights as well: it is not counted.
        one, many = [], []
        for turn in range(repeats + 1):
            distributed.barrier()
            first = seconds(alone, images) if rank == 0 else 0.0
            distributed.barrier()
            second = seconds(together, own)
            if turn:
                one.append(first)
                many.append(second)
        found, expected = together.report.notes["bytes"], cost_of(together, size).bytes
        if found != expected:
            raise AssertionError(f"{name}: the ranks report {found} bytes, but the sizes say {expected}")
        a, b = statistics.median(one), statistics.median(many)
        say(f"| {name} | {1000 * a:.1f} ms | {1000 * b:.1f} ms | {b / a if a else 0:.3f} | {found:,.0f} |")


def seconds(adapter: cafe.CAFe, images: Tensor) -> float:
    start = time.perf_counter()
    adapter(images)
    return time.perf_counter() - start


def on_paper(make: Callable[..., cafe.CAFe], args: argparse.Namespace, title: str) -> None:
    """A ring sums S bytes on N ranks in 2(N-1) messages one after the other, each of S/N; it gathers in N-1 of S."""
    print(f"{title}; {args.gigabits:g} Gbit/s, {args.latency:g} µs a message\n")
    print("| what | gradients | BatchNorm | blocks | rest | bytes per rank | collectives |\n|---|" + "---:|" * 6)
    costs = {name: cost_of(make(**options), args.size) for name, options in CHOICES.items()}
    for name, c in costs.items():
        cells = (c.gradients, c.batchnorm, c.blocks, c.rest, c.bytes, c.reductions + c.gathers)
        print(f"| {name} | " + " | ".join(f"{cell:,}" for cell in cells) + " |")
    print("\n| what | N | bytes a rank sends | of it: time on the wire | time for messages |\n|---|" + "---:|" * 4)
    for name, c in costs.items():
        for ranks in args.ranks:
            sent = (ranks - 1) * (2 * (c.bytes - GATHERED) / ranks + GATHERED)
            wire = sent * 8 / (args.gigabits * 1e9)
            waiting = (2 * c.reductions + c.gathers) * (ranks - 1) * args.latency / 1e6
            print(f"| {name} | {ranks} | {sent:,.0f} | {1000 * wire:.1f} ms | {1000 * waiting:.1f} ms |")


if __name__ == "__main__":
    main()
