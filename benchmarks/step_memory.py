"""Peak memory of a step of CAFe, against a plain forward + backward + SGD step of the same network.

python benchmarks/step_memory.py

Each side runs in a process of its own, so that neither profits from what the other left behind.
"""

import argparse
import subprocess
import sys

import torch
from steps import made_up_groups, plain_step, settle

import cafe_tta as cafe
from cafe_tta import models
from cafe_tta.bench.cost import Memory

SIDES = ("plain step", "cafe", "cafe-plus", "cafe, parameters=norm", "cafe, adapt_from=layer3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="timm:resnet26")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", choices=SIDES, help="only this one, as a number")
    args = parser.parse_args()
    if args.side:
        print(measure(args.side, args.model, args.size, args.batch))
        return
    print(f"{args.model}, {args.size}×{args.size}, B={args.batch}\n")
    print(
        "| what | peak memory of three steps, beyond the loaded model | against the plain step | goal |\n"
        "|---|---:|---:|---:|"
    )
    options = ["--model", args.model, "--size", str(args.size), "--batch", str(args.batch)]
    plain = 0.0
    for side in SIDES:
        found = subprocess.run(
            [sys.executable, __file__, "--side", side, *options], check=True, capture_output=True, text=True
        )
        used = float(found.stdout)
        plain = plain or used
        goal = "≤ 1.05" if side == "cafe" else ""
        print(f"| {side} | {used:.0f} MB | {used / plain:.3f} | {goal} |", flush=True)


def measure(side: str, name: str, size: int, batch: int) -> float:
    """Peak memory above what is used before the first step, in MB."""
    torch.manual_seed(0)
    classifier = cafe.split_classifier(models.channels_last(models.build(name, num_classes=10, size=size).eval()))
    loader = [torch.randn(32, 3, size, size) for _ in range(4)]
    settle(classifier, loader)
    images = torch.randn(batch, 3, size, size)
    if side == "plain step":
        step = plain_step(classifier, lambda c: list(c.backbone.parameters()))
    else:
        source = made_up_groups(cafe.FeatureStats.fit(classifier, loader), 128)
        method, _, setting = side.partition(", ")
        options: dict[str, object] = dict([setting.split("=")]) if setting else {}
        if method == "cafe-plus":
            options["gate"] = False  # these images look like the source's
        step = cafe.create(method, classifier, source, **options)
    memory = Memory()
    for _ in range(3):
        step(images)
    assert memory.added is not None, "the peak of memory is known on Linux, and on GPUs"
    return memory.added


if __name__ == "__main__":
    main()
