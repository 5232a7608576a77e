"""Drift beside accuracy, and the alarms about images that were read differently: the figures of docs/drift.md.

python benchmarks/drift.py --model timm:resnet26 --weights W.safetensors --size 32 --source-data arrays:TRAIN \
    --data arrays:TEST
python benchmarks/drift.py --few 20 64 128 256 1024 4096 ...    accuracy by the number of source images instead
"""

import argparse
import warnings

import numpy as np
import torch
from torch import Tensor

import cafe_tta as cafe
from cafe_tta import corruptions, data, models
from cafe_tta.source import ImageRecord
from cafe_tta.source.images import ImageCheck, TrainingCheck

SIZES = (8, 32, 64, 256)
PASSES = 4


class Setting:
    """A model, the statistics of its source images, and test images."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.loaded = models.load(args.model, weights=args.weights, size=args.size, mean=args.mean, std=args.std)
        self.classifier = cafe.split_classifier(models.channels_last(self.loaded.model)).eval()
        self.source, test = data.load(args.source_data), data.load(args.data)
        chosen = np.random.default_rng(0).permutation(len(test))[: args.limit].tolist()
        self.pixels, self.labels = test.images(chosen), torch.from_numpy(np.asarray(test.labels)[chosen])
        self.shown: list[tuple[float, float]] = []  # accuracy and drift of what was shown

    def source_images(self, count: int | None = None) -> list[Tensor]:
        order = np.random.default_rng(3).permutation(len(self.source))[:count]
        return [
            self.loaded.preprocessing(self.source.images(part))
            for part in np.array_split(np.sort(order), max(1, len(order) // 256))
        ]

    def corrupted(self, name: str, severity: int) -> Tensor:
        return self.loaded.preprocessing(corruptions.corrupt(self.pixels, name, severity))

    def one_class(self, number: int) -> Tensor:
        chosen = np.flatnonzero(np.asarray(self.source.labels) == number)[:256].tolist()
        return self.loaded.preprocessing(self.source.images(chosen))

    def show(self, name: str, images: Tensor, reference: cafe.Reference) -> None:
        with torch.no_grad():
            parts = [self.classifier.features_and_logits(part) for part in images.split(128)]
        features, logits = (torch.cat(part) for part in zip(*parts, strict=True))
        accuracy = (logits.argmax(1) == self.labels).double().mean().item()
        print(f"{name:<22}{100 * accuracy:>10.1f}", end="")
        for size in SIZES:
            found = [reference.drift(part) or 0.0 for part in features.split(size) if len(part) == size]
            print(f"{np.mean(found):>8.2f} {min(found):.2f}..{max(found):.2f}", end="")
        print(f"{reference.alignment(features[:256]):>12.2f}", flush=True)
        self.shown.append((accuracy, float(np.mean(found))))

    def rank_correlation(self) -> float:
        """Spearman's, between drift in the largest batches and the share of wrong answers."""
        ranks = [np.argsort(np.argsort(values, kind="stable")) for values in zip(*self.shown, strict=True)]
        return -float(np.corrcoef(ranks)[0, 1])


def drift(setting: Setting) -> None:
    """Drift and alignment loss of clean and corrupted images, for several batch sizes."""
    preprocessing = setting.loaded.preprocessing
    stats = cafe.FeatureStats.fit(setting.classifier, setting.source_images(), preprocessing).group()
    reference = cafe.Reference(stats)
    print(
        f"{'images':<22}{'accuracy %':>10}{'drift (mean, min..max) of batches of ' + str(SIZES):>40}{'alignment':>32}"
    )
    clean = preprocessing(setting.pixels)
    setting.show("clean", clean, reference)
    alarms, records = (
        [],
        (stats.images, ImageRecord(shape=stats.images.shape, low=stats.images.low, high=stats.images.high)),
    )
    for name in corruptions.choose_names("all,held-out"):
        for severity in (1, 3, 5):
            images = setting.corrupted(name, severity)
            setting.show(f"{name}-{severity}", images, reference)
            batches = [part for part in images.split(16) if len(part) == 16]
            alarms += [name for part in batches for record in records if ImageCheck(record).look(part)]
    print(f"\nrank correlation of drift and errors over {len(setting.shown)} rows: {setting.rank_correlation():.2f}")
    found = []
    for number in range(setting.classifier.num_classes):
        images = setting.one_class(number)
        found.append(cafe.drift(setting.classifier, stats, images))
    print(f"drift of clean source images of one class: {min(found):.2f} to {max(found):.2f}")
    print(f"alarms on corrupted images, in batches of 16: {len(alarms)} {sorted(set(alarms))}")
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    plain = clean * std + mean
    for name, images in (("0..1", plain), ("0..255", 255 * plain), ("twice", (clean - mean) / std)):
        batches = [part for part in images.split(16) if len(part) == 16]
        found = [sum(bool(ImageCheck(record).look(part)) for part in batches) for record in records]
        print(f"{name:<8} alarms with and without known preprocessing: {found[0]}, {found[1]} of {len(batches)}")
    for name, images in (("right", clean), ("0..1", plain), ("0..255", 255 * plain), ("twice", (clean - mean) / std)):
        check = TrainingCheck(setting.classifier)
        with torch.no_grad(), check.watching():
            setting.classifier(images[:256])
        print(f"{name:<8} divergence of the first BatchNorm layer from training: {check.divergence():.3f}")


def few(setting: Setting, counts: list[int]) -> None:
    """Online accuracy in the last of some passes over mixed corruptions, by the number of source images."""
    random = np.random.default_rng(1)
    names = corruptions.choose_names("all")
    images = setting.loaded.preprocessing(setting.pixels)
    for number, image in enumerate(setting.pixels):
        name = names[random.integers(len(names))]
        images[number] = setting.loaded.preprocessing(corruptions.corrupt(image[None], name, 5, indices=[number]))[0]
    print(f"{'source images':>14}{'widest group':>14}{'cafe %':>9}{'cafe-plus %':>13}")
    for count in counts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cafe.SourceWarning)
            stats = cafe.FeatureStats.fit(setting.classifier, setting.source_images(count)).group()
        shown = []
        for method in ("cafe", "cafe-plus"):
            adapter = cafe.create(method, setting.classifier, stats)
            for _ in range(PASSES):
                answers = torch.cat([adapter(part) for part in images.split(256)]).argmax(1)
            shown.append((answers == setting.labels).double().mean().item())
        print(f"{count:>14}{stats.widest_group:>14}{100 * shown[0]:>9.1f}{100 * shown[1]:>13.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights")
    parser.add_argument("--source-data", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--size", type=int)
    parser.add_argument("--mean", type=float, nargs=3)
    parser.add_argument("--std", type=float, nargs=3)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--few", type=int, nargs="+", help="numbers of source images")
    args = parser.parse_args()
    setting = Setting(args)
    if args.few:
        few(setting, args.few)
    else:
        drift(setting)


if __name__ == "__main__":
    main()
