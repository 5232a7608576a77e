"""How well unmixing tells corruptions apart that it was not made for, and what that is worth; on source images.

python benchmarks/styles.py --data arrays:DIR --weights FILE [--model timm:resnet26] [--mean …] [--std …]

The constants of `cafe_tta.clusters` were chosen with this: twenty corruptions, none of them of the benchmark, in two
halves and together, mixed with clean images; and each of them alone, where there should be one cluster. `oracle` is
unmixing with the true corruption of each image in place of its cluster.
"""

import argparse
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import torch
from scipy import ndimage
from sklearn.metrics import adjusted_rand_score

import cafe_tta as cafe
from cafe_tta import corruptions, data, models
from cafe_tta.bench.protocols import correlated_order

Images = np.ndarray[Any, np.dtype[np.uint8]]


def whole(images: Any) -> Images:
    return np.clip(np.rint(images), 0, 255).astype(np.uint8)


def low_frequency_noise(images: Images, random: np.random.Generator) -> Images:
    side = images.shape[1]
    noise = [
        cv2.resize(grid, (side, side), interpolation=cv2.INTER_CUBIC)
        for grid in random.normal(size=(len(images), 8, 8))
    ]
    return whole(images + 35 * np.stack(noise)[..., None])


def half_size(images: Images, random: np.random.Generator) -> Images:
    side = images.shape[1]
    small = (cv2.resize(image, (side // 2, side // 2), interpolation=cv2.INTER_AREA) for image in images)
    return np.stack([cv2.resize(image, (side, side), interpolation=cv2.INTER_LINEAR) for image in small])


def haze(images: Images, random: np.random.Generator) -> Images:
    ramp = np.linspace(0, 1, images.shape[1])
    veil = 0.35 * (ramp[:, None] + ramp)[None, :, :, None]
    return whole(images * (1 - veil) + 200 * veil)


def vignette(images: Images, random: np.random.Generator) -> Images:
    ramp = np.linspace(-1, 1, images.shape[1])
    return whole(images * np.exp(-1.2 * (ramp[:, None] ** 2 + ramp**2))[None, :, :, None])


def pepper_and_salt(images: Images, random: np.random.Generator) -> Images:
    chance = random.random(images.shape[:3])[..., None]
    return np.where(chance < 0.06, 0, np.where(chance > 0.94, 255, images)).astype(np.uint8)


def gaussian(images: Any, sigma: float) -> Any:
    return ndimage.gaussian_filter(images.astype(float), (0, sigma, sigma, 0))


def official(name: str) -> Callable[[Images, np.random.Generator], Images]:
    return lambda images, random: corruptions.corrupt(images, name, severity=5, seed=0, preset="cifar")


HALVES: tuple[dict[str, Callable[[Images, np.random.Generator], Images]], ...] = (
    {
        "speckle": lambda x, random: whole(x * (1 + 0.3 * random.normal(size=x.shape))),
        "box": lambda x, random: whole(ndimage.uniform_filter(x.astype(float), (1, 3, 3, 1))),
        "pepper_and_salt": pepper_and_salt,
        "low_frequency_noise": low_frequency_noise,
        "dark": lambda x, random: whole(255 * (x / 255) ** 2.4),
        "posterize": lambda x, random: whole(x // 64 * 64 + 32),
        "cast": lambda x, random: whole(x * np.array([1.25, 0.95, 0.6])),
        "half_size": half_size,
        "haze": haze,
        "spatter": official("spatter"),
    },
    {
        "gaussian_blur": lambda x, random: whole(gaussian(x, 1.2)),
        "median": lambda x, random: ndimage.median_filter(x, (1, 4, 4, 1)),
        "grey_noise": lambda x, random: whole(x + 22 * random.normal(size=(*x.shape[:3], 1))),
        "bright": lambda x, random: whole(255 * (x / 255) ** 0.45),
        "grey": lambda x, random: np.repeat(whole(x.mean(3, keepdims=True)), 3, 3),
        "stripes": lambda x, random: whole(
            x + 20 * np.sign(np.sin(np.arange(x.shape[1]) * np.pi / 2 + 0.3))[None, :, None, None]
        ),
        "solarize": lambda x, random: np.where(x > 160, 255 - x, x).astype(np.uint8),
        "sharpen": lambda x, random: whole(3 * x.astype(float) - 2 * gaussian(x, 1)),
        "vignette": vignette,
        "saturate": official("saturate"),
    },
)
EVERY = HALVES[0] | HALVES[1]


def mixture(images: Images, names: list[str], seed: int) -> tuple[Images, Any]:
    """Each image with one of the corruptions, and the number of each image's."""
    random = np.random.default_rng(seed)
    labels = random.integers(len(names), size=len(images))
    mixed = images.copy()
    for number, name in enumerate(names):
        if name != "clean" and (labels == number).any():
            mixed[labels == number] = EVERY[name](images[labels == number], random)
    return mixed, labels


class Oracle:
    """In place of the clusters of an unmixer: cells that are the true corruptions."""

    def __init__(self, adapter: cafe.Adapter, labels: Any) -> None:
        self.memory = adapter.normaliser.unmixer.clusters.memory
        self.joined = self.akin = torch.eye(len(self.memory["images"]), dtype=torch.float64)
        self.sizes: list[int] = []
        self._labels = torch.from_numpy(labels)

    def follow(self, styles: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        self._last, self._labels = self._labels[: len(styles)], self._labels[len(styles) :]
        return self._last, []

    def nearest(self, styles: torch.Tensor) -> torch.Tensor:
        """Of the same images once more."""
        return self._last


def accuracy(adapter: cafe.Adapter, images: torch.Tensor, truth: torch.Tensor, batch: int) -> tuple[float, Any]:
    """Accuracy in %, online, and the cluster of every image."""
    right, clusters = [], []
    unmixer = adapter.normaliser.unmixer
    for start in range(0, len(images), batch):
        right.append(adapter(images[start : start + batch]).argmax(1) == truth[start : start + batch])
        if unmixer is not None:
            number = torch.cat([unmixer.clusters.memory["cluster"], torch.tensor([-1])])
            clusters.append(number[unmixer.members])
    return 100 * torch.cat(right).float().mean().item(), torch.cat(clusters).numpy() if clusters else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="labelled source images, as for cafe-tta")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--model", default="timm:resnet26")
    parser.add_argument("--mean", type=float, nargs=3, default=(0.4914, 0.4822, 0.4465))
    parser.add_argument("--std", type=float, nargs=3, default=(0.2470, 0.2435, 0.2616))
    parser.add_argument("--limit", type=int, default=3000, help="images of each mixture")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--delta", type=float, help="the classes come in runs: parameter of a Dirichlet distribution")
    parser.add_argument("--threshold", type=float, default=cafe.UnmixConfig().threshold)
    args = parser.parse_args()
    source_images = data.load(args.data)
    images, truth = source_images.images(range(len(source_images))), torch.as_tensor(np.asarray(source_images.labels))
    options = models.ModelOptions(
        args.model,
        weights=args.weights,
        num_classes=int(truth.max()) + 1,
        image_size=images.shape[1],
        mean=tuple(args.mean),
        std=tuple(args.std),
    )
    loaded = models.load_classifier(options)
    batches = (loaded.preprocessing(images[start : start + 250]) for start in range(0, len(images), 250))
    source = cafe.FeatureStats.fit(loaded.classifier, batches).group()

    def measure(names: list[str], seed: int, limit: int) -> tuple[list[float], int, float]:
        mixed, labels = mixture(images[:limit], names, seed)
        order = np.arange(len(mixed))
        if args.delta is not None:
            order = correlated_order(truth[: len(mixed)].numpy(), np.random.default_rng(seed), args.delta)
        inputs, labels, classes = loaded.preprocessing(mixed[order]), labels[order], truth[order]
        unmix = cafe.create("unmix", loaded.classifier, source, threshold=args.threshold)
        oracle = cafe.create("unmix", loaded.classifier, source)
        oracle.normaliser.unmixer.clusters = Oracle(oracle, labels)
        rows = []
        for adapter in (
            cafe.create("source", loaded.classifier),
            cafe.create("adabn", loaded.classifier),
            unmix,
            oracle,
        ):
            result, clusters = accuracy(adapter, inputs, classes, args.batch)
            rows.append(result)
            if adapter is unmix:
                found = clusters
        return rows, len(unmix.normaliser.unmixer.sizes), adjusted_rand_score(labels, found)

    print(
        "| corruptions | source | adabn | unmix | oracle | clusters | adjusted Rand index |\n"
        "|---|---:|---:|---:|---:|---:|---:|"
    )
    mixtures = {"first half": list(HALVES[0]), "second half": list(HALVES[1]), "fifteen of both": list(EVERY)[:15]}
    for number, (title, names) in enumerate(mixtures.items()):
        rows, count, index = measure(["clean", *names], number, args.limit)
        print(f"| {title} | {' | '.join(f'{row:.2f}' for row in rows)} | {count} | {index:.2f} |", flush=True)
    for number, name in enumerate(["clean", *EVERY]):
        rows, count, _ = measure([name], 10 + number, min(500, args.limit))
        print(f"| {name} | {' | '.join(f'{row:.2f}' for row in rows)} | {count} | |", flush=True)


if __name__ == "__main__":
    main()
