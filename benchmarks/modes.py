"""Which statistics should CAFe align to, and what should BatchNorm describe? On held-out corruptions. Prints a table.

    python benchmarks/modes.py --weights data/resnet26_cifar10.safetensors --data arrays:data/cifar10_train10k

Three footings for a network whose BatchNorm does not describe plain images, because it was trained on augmented ones:

- as it is: source statistics in evaluation mode, as in the paper;
- statistics of batches: source statistics of clean images that are normalised with their batch, as the methods that
  adapt will see them;
- BatchNorm recomputed: on plain source images, as a first step.

Some of the images come clean, and mixed with the held-out corruptions, online. A run that was stopped goes on.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from cafe_tta import bench, corruptions
from cafe_tta.bench.experiments import choose_dataset
from cafe_tta.bench.source_side import SourceSide, SourceSideOptions
from cafe_tta.models import ModelOptions
from cafe_tta.normalisation import batchnorm_layers
from cafe_tta.source import FeatureStats
from cafe_tta.source.modes import SMALLEST_BATCH, normalising_with_batch
from cafe_tta.source.train import TrainConfig
from cafe_tta.source.train_folder import TrainingRun

METHODS = "source,adabn,tent,infomax,cafe-no-infomax,cafe,unmix,cafe-plus"
OF_BATCH = ("cafe-no-infomax", "cafe")  # that the statistics of batches are for
STREAMS = ("clean", "all-mixed")


def statistics_of_batches(side: SourceSide, path: Path) -> Path:
    """Source statistics of features that are normalised with their batch, in a file."""
    if not path.exists():
        with torch.no_grad(), normalising_with_batch(batchnorm_layers(side.classifier)):
            batches = (images for images in side._image_batches() if len(images) >= SMALLEST_BATCH)
            features = torch.cat([side.classifier.backbone(images) for images in batches])
        meta = side.stats.images.into(side.classifier.identity())
        stats = replace(FeatureStats.from_features(features, meta), styles=side.stats.styles)
        stats.group(side.dataset.num_groups, max_group_size=None).save(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data", required=True, help="training images, also those of the streams")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=5000, help="images of a stream")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("results/modes"))
    args = parser.parse_args()
    dataset = choose_dataset(args.dataset, data=args.data, source_data=args.data)
    args.output.mkdir(parents=True, exist_ok=True)

    given = SourceSideOptions(weights=args.weights)
    side = SourceSide(dataset, args.output / "as-it-is" / "source", given, say=print)
    stats = statistics_of_batches(side, args.output / "statistics.safetensors")
    model = ModelOptions(
        str(dataset.model), weights=args.weights, image_size=dataset.size, mean=dataset.mean, std=dataset.std
    )
    recomputed = TrainingRun(args.data, args.output / "model", model, TrainConfig(epochs=0, swag_epochs=0))
    recomputed.finished() or recomputed.train()
    sides = {
        "as it is": (dataset, given, METHODS),
        "statistics of batches": (dataset, replace(given, source=[stats]), ",".join(OF_BATCH)),
        "BatchNorm recomputed": (
            choose_dataset(
                args.dataset, data=args.data, source_data=args.data, model=str(recomputed.output / "model.safetensors")
            ),
            SourceSideOptions(),
            METHODS,
        ),
    }
    found: dict[tuple[str, str, str], list[float]] = {}
    for footing, (used, options, methods) in sides.items():
        plan = bench.plan(
            "mixed",
            used,
            methods,
            mode="online",
            frechet=False,
            protocols=STREAMS,
            seeds=tuple(range(args.seeds)),
            limit=args.limit,
            corruptions=corruptions.HELD_OUT,
        )
        folder = args.output / footing.replace(" ", "-").lower()
        for record in bench.run(plan, folder, options, say=print):
            found.setdefault((footing, record.label, record.protocol), []).append(100 * record.accuracy)
    print(f"| method | {' | '.join(f'{footing}: {stream}' for footing in sides for stream in STREAMS)} |")
    print("|---|" + "---:|" * len(sides) * len(STREAMS))
    for label in METHODS.split(","):
        values = (found.get((footing, label, stream), []) for footing in sides for stream in STREAMS)
        print(f"| {label} | {' | '.join(f'{sum(v) / len(v):.2f}' if v else '–' for v in values)} |")


if __name__ == "__main__":
    main()
