"""Do a checkpoint's BatchNorm statistics describe its own clean images? The same images, normalised in several ways.

The last two lines recompute the running statistics: on the training images as they are, and as they come from the usual
augmentation, cropped out of a black border of 4 pixels and half of them mirrored.

python benchmarks/running_statistics.py --model timm:resnet26 --weights W.safetensors --size 32 \
    --source arrays:TRAIN --test arrays:TEST
"""

import argparse
from collections.abc import Iterator

import numpy as np
import torch

from cafe_tta import data, models
from cafe_tta.classifier import SplitClassifier, split_classifier
from cafe_tta.normalisation import Normaliser
from cafe_tta.source.stats import FeatureStats
from cafe_tta.source.swag import recompute_batchnorm

BORDER = 4


def cropped(images: torch.Tensor, black: torch.Tensor) -> torch.Tensor:
    """Each image moved by up to BORDER pixels each way, black where it was not, and mirrored half of the time."""
    height, width = images.shape[2:]
    padded = torch.nn.functional.pad(images - black, (BORDER,) * 4) + black
    moved = []
    for image in padded:
        top, left = torch.randint(2 * BORDER + 1, (2,)).tolist()
        image = image[:, top : top + height, left : left + width]
        moved.append(image.flip(2) if torch.rand(()) < 0.5 else image)
    return torch.stack(moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights")
    parser.add_argument("--source", required=True, help="clean training images")
    parser.add_argument("--test", required=True, help="clean test images, with labels")
    parser.add_argument("--size", type=int)
    parser.add_argument("--mean", type=float, nargs=3)
    parser.add_argument("--std", type=float, nargs=3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--limit", type=int, default=2048, help="images of each set")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = models.load(args.model, weights=args.weights, size=args.size, mean=args.mean, std=args.std)
    source, test = data.load(args.source), data.load(args.test)

    @torch.no_grad()
    def answered(classifier: SplitClassifier, images: data.ImageSet) -> tuple[torch.Tensor, float]:
        """Features of the images, and the share that is classified rightly."""
        features, hits = [], 0
        count = min(args.limit, len(images))
        for batch in data.Loader(images, loaded.preprocessing, args.batch, order=range(count)).batches():
            found, logits = classifier.features_and_logits(batch.images)
            features.append(found)
            hits += int((logits.argmax(1).numpy() == images.labels[batch.indices]).sum())
        return torch.cat(features), hits / count

    def batches(augmented: bool) -> Iterator[torch.Tensor]:
        """Training images, as they are or augmented."""
        black = loaded.preprocessing(np.zeros_like(source.images(np.arange(1))))[:, :, :1, :1]
        order = range(min(args.limit, len(source)))
        for batch in data.Loader(source, loaded.preprocessing, args.batch, order=order).batches():
            yield cropped(batch.images, black) if augmented else batch.images

    def with_batch() -> SplitClassifier:
        classifier = split_classifier(loaded.model)
        Normaliser(classifier, "batch").adapting(update=False)
        return classifier

    def recomputed(augmented: bool) -> SplitClassifier:
        torch.manual_seed(0)
        classifier = split_classifier(loaded.model)
        recompute_batchnorm(classifier, batches(augmented))
        return classifier.eval()

    print(f"{args.limit} images of each set, batches of {args.batch}")
    print("| BatchNorm normalises with | trace of the feature covariance, training images | accuracy %, test images |")
    print("|---|---:|---:|")
    for name, made in (
        ("running statistics", lambda: split_classifier(loaded.model).eval()),
        ("the batch", with_batch),
        ("running statistics of plain training images", lambda: recomputed(augmented=False)),
        ("running statistics of cropped and mirrored ones", lambda: recomputed(augmented=True)),
    ):
        classifier = made()
        features, _ = answered(classifier, source)
        _, accuracy = answered(classifier, test)
        trace = FeatureStats.from_features(features).cov.trace().item()
        print(f"| {name} | {trace:.1f} | {100 * accuracy:.2f} |")


if __name__ == "__main__":
    main()
