"""Do a checkpoint's BatchNorm statistics describe its own clean images? The same images, normalised in both ways.

python benchmarks/running_statistics.py --model timm:resnet26 --weights W.safetensors --size 32 \
    --source arrays:TRAIN --test arrays:TEST
"""

import argparse

import torch

from cafe_tta import data, models
from cafe_tta.classifier import split_classifier
from cafe_tta.normalisation import Normaliser
from cafe_tta.source.stats import FeatureStats


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
    classifier = split_classifier(loaded.model)
    normaliser = Normaliser(classifier, "batch")
    source, test = data.load(args.source), data.load(args.test)

    @torch.no_grad()
    def answered(images: data.ImageSet) -> tuple[torch.Tensor, float]:
        """Features of the images, and the share that is classified rightly."""
        features, hits = [], 0
        count = min(args.limit, len(images))
        for batch in data.Loader(images, loaded.preprocessing, args.batch, order=range(count)).batches():
            found, logits = classifier.features_and_logits(batch.images)
            features.append(found)
            hits += int((logits.argmax(1).numpy() == images.labels[batch.indices]).sum())
        return torch.cat(features), hits / count

    print(f"{args.limit} images of each set, batches of {args.batch}")
    print("| BatchNorm normalises with | trace of the feature covariance, training images | accuracy %, test images |")
    print("|---|---:|---:|")
    for name, switch in (
        ("running statistics", normaliser.evaluating),
        ("the batch", lambda: normaliser.adapting(update=False)),
    ):
        switch()
        features, _ = answered(source)
        _, accuracy = answered(test)
        trace = FeatureStats.from_features(features).cov.trace().item()
        print(f"| {name} | {trace:.1f} | {100 * accuracy:.2f} |")


if __name__ == "__main__":
    main()
