"""Does adapting to few images, or to clean ones, do harm? Source model, library and `adapt`, all with their defaults.

python benchmarks/few_images.py
python benchmarks/few_images.py --model timm:resnet26 --weights W.safetensors --size 32 --source-data arrays:TRAIN \
    --data arrays:TEST --small 1000

The test images are dealt into folders of n images, and each folder is answered on its own, by the default method (or
another one, with `--method`): in Python, by `adapter(images)` in batches of its default size; and as `cafe-tta adapt`
does, which also judges the steps and may give the source model's answers instead (docs/when-not-to-adapt.md). Clean
images; fog at severity 5; and a mixture of the 15 corruptions at severity 5. Accuracy in %, over all folders of a size.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import cafe_tta as cafe
from cafe_tta import corruptions, data, models, runs
from cafe_tta.bench.embedded import embedded_digits
from cafe_tta.data.arrays import ArraySet
from cafe_tta.data.imageset import Images
from cafe_tta.judge import FEWEST
from cafe_tta.methods.choice import MethodOptions

SIZES = (1, 2, 5, 10, 100, 1000, 10_000)
SMALL = 100  # folders up to this size are made of `--small` images


@dataclass(frozen=True)
class Setting:
    """A model, the statistics of its source images, and test images."""

    model: models.Model
    stats: cafe.SourceStats
    pixels: Images
    labels: Tensor
    method: str = MethodOptions().method

    def adapter(self) -> cafe.Adapter:
        return cafe.create(self.method, self.model.classifier, self.stats)

    def of_kind(self, kind: str, count: int) -> Images:
        """The first test images, clean or corrupted."""
        pixels = self.pixels[:count]
        if kind == "clean":
            return pixels
        if kind != "mixed":
            return corruptions.corrupt(pixels, kind, 5)
        drawn = np.random.default_rng(1).integers(0, len(corruptions.NAMES), len(pixels))
        mixed = pixels.copy()
        for number, name in enumerate(corruptions.NAMES):
            chosen = np.flatnonzero(drawn == number)
            if len(chosen):
                mixed[chosen] = corruptions.corrupt(pixels[chosen], name, 5, indices=chosen.tolist())
        return mixed

    def source_hits(self, images: Tensor) -> int:
        with torch.no_grad():
            logits = torch.cat([self.model.classifier(part) for part in images.split(256)])
        return self.hits(logits, 0)

    def hits(self, logits: Tensor, first: int) -> int:
        return int((logits.argmax(1).cpu() == self.labels[first : first + len(logits)]).sum())


def of_library(setting: Setting, images: Tensor, size: int) -> int:
    """Right answers of `adapter(images)`, each folder on its own."""
    adapter, right = setting.adapter(), 0
    for first in range(0, len(images), size):
        adapter.reset()
        parts = images[first : first + size].split(adapter.config.batch_size)
        right += setting.hits(torch.cat([adapter(part) for part in parts]), first)
    return right


def of_adapt(setting: Setting, pixels: Images, size: int) -> tuple[int, int]:
    """Right answers of `cafe-tta adapt`, each folder on its own; and folders that got the source model's answers."""
    right, of_source = 0, 0
    for first in range(0, len(pixels), size):
        part = pixels[first : first + size]
        labels = setting.labels[first : first + size].numpy()
        images, reference = ArraySet("folder", part, labels), cafe.Reference(setting.stats)
        with tempfile.TemporaryDirectory() as output:
            summary = runs.FolderRun(setting.model, setting.adapter(), images, output, reference=reference).run()
        right += round(summary["accuracy"] * summary["labelled_images"])
        of_source += summary["answers"] == "source"
    return right, of_source


def load(args: argparse.Namespace) -> Setting:
    if args.model is None:
        embedded = embedded_digits(say=print)
        model, stats = embedded.model, embedded.stats
    else:
        loaded = models.load(args.model, weights=args.weights, size=args.size, mean=args.mean, std=args.std)
        classifier = cafe.split_classifier(models.channels_last(loaded.model)).eval()
        model = models.Model(classifier, args.model, loaded.preprocessing, None)
        source = data.load(args.source_data)
        batches = (loaded.preprocessing(source.images(part)) for part in np.array_split(np.arange(len(source)), 40))
        stats = cafe.FeatureStats.fit(classifier, batches, loaded.preprocessing).group()
    test = data.load(args.data)
    order = np.random.default_rng(0).permutation(len(test))
    if args.by_class:
        order = order[np.argsort(np.asarray(test.labels)[order], kind="stable")]
    labels = torch.from_numpy(np.asarray(test.labels)[order])
    return Setting(model, stats, test.images(order.tolist()), labels, args.method)


def arguments(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the embedded digits, if not given")
    parser.add_argument("--weights")
    parser.add_argument("--source-data")
    parser.add_argument("--data", default="digits:test")
    parser.add_argument("--size", type=int)
    parser.add_argument("--mean", type=float, nargs=3)
    parser.add_argument("--std", type=float, nargs=3)
    parser.add_argument("--method", default=MethodOptions().method)
    parser.add_argument("--by-class", action="store_true", help="the images come class by class, not in random order")
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kinds", nargs="+", default=["clean", "fog", "mixed"])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--small", type=int, default=100_000, help=f"images for folders of up to {SMALL}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = load(args)
    print("| images | folders of | number of folders | source % | library % | `adapt` % | source's answers given | s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind in args.kinds:
        for size in args.sizes:
            if size > len(setting.pixels) and size != min(s for s in args.sizes if s >= len(setting.pixels)):
                continue
            began = time.perf_counter()
            budget = min(args.small, len(setting.pixels)) if size <= SMALL else min(size, len(setting.pixels))
            size = min(size, budget)
            pixels = setting.of_kind(kind, budget // size * size)
            images, count = setting.model.preprocessing(pixels), len(pixels)
            source, library = setting.source_hits(images), of_library(setting, images, size)
            # Fewer than 16 images are not judged: `adapt` then answers as the library does.
            adapt, of_source = of_adapt(setting, pixels, size) if size >= FEWEST else (library, 0)
            shown = " | ".join(f"{100 * right / count:.1f}" for right in (source, library, adapt))
            seconds = time.perf_counter() - began
            print(f"| {kind} | {size} | {count // size} | {shown} | {of_source} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
