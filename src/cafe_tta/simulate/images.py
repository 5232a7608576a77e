"""The images of a simulation in every domain, with their labels and the unadapted model's answers.

They are made before the simulation starts, in files that all processes read: no camera waits for its images.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cafe_tta import corruptions
from cafe_tta.data import ImageSet
from cafe_tta.simulate.weather import CLEAN, Domain

MEMORY = 400_000_000  # bytes of images at most; a smaller pool is drawn from large image sets
BATCH = 256


class Images:
    """Images (n, H, W, 3), labels and the source model's answers, by domain."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.labels: np.ndarray = np.load(folder / "labels.npy")
        self.source: dict[Domain, np.ndarray] = {}
        self._images: dict[Domain, np.ndarray] = {}
        for name, severity in json.loads((folder / "domains.json").read_text()):
            self.source[name, severity] = np.load(folder / f"{name}-{severity}-source.npy")
            self._images[name, severity] = np.load(folder / f"{name}-{severity}.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and 3, of one image."""
        height, width, channels = next(iter(self._images.values())).shape[1:]
        return height, width, channels

    def take(self, domain: Domain, indices: np.ndarray) -> np.ndarray:
        return self._images[domain][indices]


def make(
    folder: Path,
    imageset: ImageSet,
    labels: np.ndarray,
    classify: Callable[[np.ndarray], torch.Tensor],
    domains: Sequence[Domain],
    *,
    preset: str,
    seed: int,
    most: int = 1024,
    advance: Callable[[int], None] = lambda _: None,
) -> Images:
    """Makes at most `most` images in every domain, in `folder`.

    `classify` computes the source model's logits of uint8 images. Images with the label -1, unknown, are left out.
    """
    usable = np.flatnonzero(np.asarray(labels) >= 0)
    if not len(usable):
        raise ValueError(f"{imageset.name} has no labels of the model's classes, so accuracy cannot be computed")
    size = imageset.images([int(usable[0])]).nbytes
    most = min(most, max(16, MEMORY // (size * len(domains))))
    pool = np.sort(np.random.default_rng(seed).permutation(usable)[:most])
    clean = np.concatenate([imageset.images([int(i)]) for i in pool])
    np.save(folder / "labels.npy", np.asarray(labels)[pool])
    for name, severity in domains:
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
    (folder / "domains.json").write_text(json.dumps([list(domain) for domain in domains]))
    return Images(folder)
