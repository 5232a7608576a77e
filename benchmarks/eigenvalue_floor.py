"""Which eigenvalue floor ε? Source images, corrupted by the four held-out corruptions, mixed; never a test image.

python benchmarks/eigenvalue_floor.py --model timm:resnet26 --weights W.safetensors --size 32 --data arrays:TRAIN
"""

import argparse

import torch

from cafe_tta import corruptions, data, models
from cafe_tta.bench.evaluate import Stream, evaluate
from cafe_tta.bench.protocols import all_mixed
from cafe_tta.classifier import split_classifier
from cafe_tta.methods import create
from cafe_tta.source.stats import FeatureStats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights")
    parser.add_argument("--data", required=True, help="labelled source images")
    parser.add_argument("--size", type=int)
    parser.add_argument("--mean", type=float, nargs=3)
    parser.add_argument("--std", type=float, nargs=3)
    parser.add_argument("--floors", type=float, nargs="+", default=[1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
    parser.add_argument("--num-groups", type=int, default=128)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = models.load(args.model, weights=args.weights, size=args.size, mean=args.mean, std=args.std)
    images = data.load(args.data)
    classifier = split_classifier(loaded.model)
    batches = data.Loader(images, loaded.preprocessing, 256)
    stats = FeatureStats.fit(classifier, batches)
    source = stats.group(args.num_groups)
    eigenvalues = torch.cat([torch.linalg.eigvalsh(cov) for cov in source.covs])
    (episode,) = all_mixed(len(images), corruptions.HELD_OUT, [5], limit=args.limit)
    stream = Stream(images, episode, loaded.preprocessing)
    print(f"{len(stream)} source images, mixed, severity 5: {', '.join(corruptions.HELD_OUT)}")
    print(f"eigenvalues of the groups: {eigenvalues.min():.1e} to {eigenvalues.max():.1e}")
    print(f"{'method':<10}{'floor':>8}{'floored':>9}{'online %':>10}{'offline %':>11}")
    for name, floors in (("source", [None]), ("infomax", [None]), ("cafe", args.floors)):
        for floor in floors:
            options = {} if floor is None else {"eigenvalue_floor": floor}
            adapter = create(name, classifier, source, **options)
            online = evaluate(adapter, stream, "online").accuracy
            offline = _evaluate(adapter, stream)
            share = "" if floor is None else f"{100 * (eigenvalues < floor).double().mean().item():.0f} %"
            floor_text = "" if floor is None else f"{floor:g}"
            print(f"{name:<10}{floor_text:>8}{share:>9}{100 * online:>10.2f}{100 * offline:>11.2f}", flush=True)


def _evaluate(adapter, stream) -> float:  # type: ignore[no-untyped-def]
    hits = [adapter.predict(batch.images).argmax(1) == batch.labels for batch in stream.batches(256)]
    return torch.cat(hits).double().mean().item()


if __name__ == "__main__":
    main()
