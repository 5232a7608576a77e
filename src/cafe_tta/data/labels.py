"""The labels of an image set as a model numbers its classes."""

import numpy as np

from cafe_tta.data.imageset import ImageSet, Labels


def match_labels(imageset: ImageSet, classes: tuple[str, ...] | None, num_classes: int) -> tuple[Labels | None, str]:
    """Labels of the images as the model numbers its classes, -1 where unknown; or None, and why there are none.

    Class folders are matched by name, not by order: a target set rarely has every class.
    """
    labels, names = imageset.labels, imageset.classes
    if labels is None:
        return None, "no class folders or labels"
    if names is None:
        numbers = np.arange(max(int(labels.max()) + 1, num_classes))
        numbers[num_classes:] = -1
    elif classes is not None:
        index = {name: number for number, name in enumerate(classes)}
        numbers = np.array([index.get(name, -1) for name in names])
    elif all(name.isdecimal() for name in names):
        numbers = np.array([int(name) if int(name) < num_classes else -1 for name in names])
    elif len(names) == num_classes:
        numbers = np.arange(num_classes)  # as many classes: their numbers are the model's
    else:
        there = "is 1 class" if len(names) == 1 else f"are {len(names)} classes"
        return None, f"there {there}, but the model has {num_classes}, without names"
    matched: Labels = numbers[labels].astype(np.int64)
    if (matched < 0).all():
        return None, "no class folder is called like a class of the model"
    return matched, ""
