"""What the source side costs: statistics against the forward passes alone, grouping, and getting ready to adapt.

python benchmarks/source_side.py
"""

import argparse
import tempfile
import time
from pathlib import Path

import timing
import torch

import cafe_tta as cafe
from cafe_tta import models
from cafe_tta.classifier import evaluating


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--grouping", type=int, nargs="*", default=[2048, 4096])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    classifier = cafe.split_classifier(models.build("timm:resnet26", num_classes=10, size=32).eval())
    loader = list(torch.randn(args.images, 3, 32, 32).split(256))

    def forward() -> None:
        with torch.no_grad(), evaluating(classifier):
            for images in loader:
                classifier.backbone(images)

    print(f"ResNet-26, 32×32, D=2048, {args.images} images, {args.threads} threads, median of {args.repeats}\n")
    print("| what | time | against | time | ratio | goal |\n|---|---:|---|---:|---:|---:|")
    sides = {"fit": lambda: cafe.FeatureStats.fit(classifier, loader), "forward": forward}
    seconds = timing.in_turns(sides, args.repeats)
    print(timing.line("FeatureStats.fit", seconds["fit"], "forward passes alone", seconds["forward"], "≤ 1.05"))

    for dims in args.grouping:
        loadings = torch.randn(64, dims) / 8
        features = (torch.randn(2 * dims, 64) @ loadings + 0.5 * torch.randn(2 * dims, dims)).relu()
        stats = cafe.FeatureStats.from_features(features)
        start = time.perf_counter()
        source = stats.group(128)
        goal = "≤ 5 s" if dims <= 2048 else "≤ 40 s"
        print(f"| grouping, D={dims}, k=128 | {time.perf_counter() - start:.1f} s | – | – | – | {goal} |")

    stats = cafe.FeatureStats.fit(classifier, loader[:2])
    groups = torch.arange(2048).split(16)
    source = cafe.SourceStats(stats.mean, groups, [stats.cov[g][:, g] for g in groups], stats.meta)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stats.safetensors"
        source.save(path)
        start = time.perf_counter()
        cafe.CAFe(classifier, cafe.SourceStats.load(path))
        print(f"| load statistics, make the adapter | {time.perf_counter() - start:.2f} s | – | – | – | ≤ 1 s |")


if __name__ == "__main__":
    main()
