"""Puts a model that `cafe-tta train` made among those that come with this project: cafe:NAME.

    python docs/ship.py models/cifar10/model.safetensors cifar10 --test arrays:data/cifar10_test

Weights are rounded to float16, and the accuracy that the file states is that of the rounded weights.
"""

import argparse
from pathlib import Path

from cafe_tta import data, models
from cafe_tta.classifier import split_classifier
from cafe_tta.source.train_folder import accuracy

TRAINED = Path(models.__file__).parent / "trained"


def ship(model: Path, name: str, test: str) -> float:
    """Writes the file, and returns the accuracy of the rounded weights on the test images."""
    loaded = models.load(model)
    if loaded.training is None:
        raise ValueError(f"expected a model that `cafe-tta train` made, but {model} does not say how it was trained")
    target = TRAINED / f"{name}.safetensors"
    about = (loaded.architecture, loaded.preprocessing, loaded.classes)
    models.save(target, loaded.model, *about, loaded.training, half=True)
    rounded = models.load(target)
    images = data.load(test)
    labels, reason = data.match_labels(images, rounded.classes, rounded.num_classes)
    if labels is None:
        raise ValueError(f"expected labelled images to test on, but {test}: {reason}")
    loader = data.Loader(images, rounded.preprocessing, labels=labels)
    found = accuracy(split_classifier(models.channels_last(rounded.model)), loader)
    training = {**loaded.training, "test_accuracy": found}
    models.save(target, rounded.model, *about, training, half=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="file that `cafe-tta train` made")
    parser.add_argument("name", help="its name, after cafe:")
    parser.add_argument("--test", required=True, help="labelled images to measure the accuracy on")
    arguments = parser.parse_args()
    print(f"cafe:{arguments.name}: {ship(arguments.model, arguments.name, arguments.test):.2%} on {arguments.test}")
