"""The images of a simulation: every condition of every camera, with the unadapted model's answers.

Made before the play, in files that all processes read: no camera has to wait for its images to be made.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cafe_tta import corruptions
from cafe_tta.data import ImageSet
from cafe_tta.simulate.stories import CLEAN, Condition

MEMORY = 400_000_000  # bytes of images at most; a smaller pool is drawn from large image sets
BATCH = 256


class Album:
    """Images (n, H, W, 3), labels and the source model's answers, by condition."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.labels: np.ndarray = np.load(folder / "labels.npy")
        self.source: dict[Condition, np.ndarray] = {}
        self._images: dict[Condition, np.ndarray] = {}
        for name, severity in json.loads((folder / "conditions.json").read_text()):
            self.source[name, severity] = np.load(folder / f"{name}-{severity}-source.npy")
            self._images[name, severity] = np.load(folder / f"{name}-{severity}.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, condition: Condition, numbers: np.ndarray) -> np.ndarray:
        return self._images[condition][numbers]


def make(
    folder: Path,
    imageset: ImageSet,
    labels: np.ndarray,
    classify: Callable[[np.ndarray], torch.Tensor],
    conditions: Sequence[Condition],
    *,
    preset: str,
    seed: int,
    most: int = 1024,
    advance: Callable[[int], None] = lambda _: None,
) -> Album:
    """Makes an album of at most `most` images in `folder`.

    `classify` gives the source model's logits of uint8 images. A label of -1 is unknown: such images are left out.
    """
    usable = np.flatnonzero(np.asarray(labels) >= 0)
    if not len(usable):
        raise ValueError(f"{imageset.name} has no labels of the model's classes; accuracy cannot be told without them")
    size = imageset.images([int(usable[0])]).nbytes
    most = min(most, max(16, MEMORY // (size * len(conditions))))
    pool = np.sort(np.random.default_rng(seed).permutation(usable)[:most])
    clean = np.concatenate([imageset.images([int(i)]) for i in pool])
    np.save(folder / "labels.npy", np.asarray(labels)[pool])
    for name, severity in conditions:
        made: list[np.ndarray] = []
        answers: list[np.ndarray] = []
        for start in range(0, len(pool), BATCH):
            images: Any = clean[start : start + BATCH]
            if (name, severity) != CLEAN:
                images = corruptions.corrupt(
                    images, name, severity, seed=seed, preset=preset, indices=pool[start : start + BATCH]
                )
            made.append(images)
            answers.append(classify(images).argmax(dim=1).cpu().numpy())
            advance(len(images))
        np.save(folder / f"{name}-{severity}.npy", np.concatenate(made))
        np.save(folder / f"{name}-{severity}-source.npy", np.concatenate(answers))
    (folder / "conditions.json").write_text(json.dumps([list(condition) for condition in conditions]))
    return Album(folder)
