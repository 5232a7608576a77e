"""A method, a corruption, a protocol and a data set of one's own, benchmarked without a change to cafe-tta.

    cd examples
    cafe-tta bench mixed --methods source,cafe,own_method.py:Sharpen --seeds 1
    cafe-tta bench separated --methods source,own_method.py:Sharpen --corruptions fog,own_method.py:sand --seeds 1
    cafe-tta bench mixed --methods source,own_method.py:Sharpen --protocols own_method.py:class_by_class --seeds 1

docs/own-method.md explains each part.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

import cafe_tta as cafe
from cafe_tta import data
from cafe_tta.bench.protocols import Domain, Episode
from cafe_tta.options import option


# A method: a loss. Everything else (the copy of the model, the step, BatchNorm, reset, save, bad batches) is inherited.
@dataclass(frozen=True)
class SharpenConfig(cafe.StepConfig):
    """Options of Sharpen."""

    margin: float = option(0.4, "Predictions whose entropy is above this share of the largest are left out.", above=0)


class Sharpen(cafe.GradientAdapter):
    """Makes confident predictions more confident, and leaves the others alone (the idea of EATA)."""

    name = "sharpen"
    Config = SharpenConfig
    config: SharpenConfig
    presets: ClassVar = {"cifar": SharpenConfig(lr=1e-3), "imagenet": SharpenConfig(lr=2.5e-4, batch_size=64)}

    def loss(self, features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        entropy = cafe.losses.entropy(logits)  # of each image, (B,)
        reliable = (entropy < self.largest_entropy(self.config.margin)).to(entropy)
        return (reliable * entropy).sum() / reliable.sum().clamp(min=1)


# A corruption: a function of one image. `random` depends on the seed, the severity and the image's index alone.
def sand(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Grains of sand on the lens."""
    grains = random.random(image.shape[:2]) < 0.03 * severity
    return np.where(grains[..., None], np.array([194, 178, 128], np.uint8), image)


# A protocol: a function that deals images into episodes. It names those arguments that it wants.
def class_by_class(num_images, corruptions, severities, seed, limit, labels):
    """One episode; the images come sorted by class, each with a corruption drawn at random."""
    random = np.random.default_rng(seed)
    images = random.permutation(num_images)[:limit]
    images = images[np.argsort(labels[images], kind="stable")]
    domains = tuple(Domain(corruption, severity) for corruption in corruptions for severity in severities)
    return [Episode("sorted", images, domains, random.integers(0, len(domains), len(images)))]


# A data set: a function that returns images, labels and names of classes.
def odd_digits() -> data.ImageSet:
    """The embedded digits, without the even ones."""
    digits = data.load("digits:test")
    odd = np.flatnonzero(digits.labels % 2)
    return data.ArraySet("odd digits", digits.images(odd), digits.labels[odd], digits.classes)
