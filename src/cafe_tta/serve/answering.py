"""Answers of a batch: from the published snapshot, and from the source model where that serves a camera better."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cafe_tta.serve.cameras import LONGEST_NAME
from cafe_tta.serve.replica import Replica


@dataclass(frozen=True)
class Answers:
    """What a batch of images gets."""

    logits: Tensor  # (B, C) float32, on the CPU
    version: int  # of the snapshot that was published; 0 is the source model
    drift: list[float | None]  # of each image's camera: at most 1 looks like the source; None while nobody knows
    adapted: list[bool]  # whether the image was taken for adapting
    versions: list[int]  # which snapshot answered each image: the published one, or 0, the source model


@dataclass(frozen=True)
class Passed:
    """A batch after its passes."""

    features: Tensor  # (B, D) float32, on the CPU
    logits: Tensor  # (B, C) float32, on the CPU
    versions: list[int]
    published: int


def run(images: Tensor, of_source: Sequence[bool], published: Replica, source: Replica) -> Passed:
    """One pass, or two where some of the images are answered by the source model."""
    if not any(of_source) or all(of_source):
        version, features, logits = (source if any(of_source) else published)(images)
        return Passed(_plain(features), _plain(logits), [version] * len(images), published.version)
    chosen = torch.tensor(of_source)
    version, features, logits = published(images[~chosen])
    source_version, source_features, source_logits = source(images[chosen])
    every_feature = torch.empty(len(images), features.shape[1])
    every_logit = torch.empty(len(images), logits.shape[1])
    every_feature[~chosen], every_feature[chosen] = _plain(features), _plain(source_features)
    every_logit[~chosen], every_logit[chosen] = _plain(logits), _plain(source_logits)
    versions = [source_version if of else version for of in of_source]
    return Passed(every_feature, every_logit, versions, version)


def check_request(images: object, cameras: Sequence[str], adapt: Sequence[bool]) -> None:
    """Refuses what is not one camera and one `adapt` for each image."""
    if not isinstance(images, Tensor):
        raise TypeError(f"expected a tensor of images, but got {type(images).__name__}")
    if images.dim() < 2 or not len(images):
        raise ValueError(f"expected a batch of at least one image, but got shape {tuple(images.shape)}")
    if not len(images) == len(cameras) == len(adapt):
        raise ValueError(
            "expected one camera and one `adapt` for each image, "
            f"but got {len(images)} images, {len(cameras)} cameras, {len(adapt)} of `adapt`"
        )
    for name in set(cameras):
        check_camera(name)


def check_camera(name: object) -> None:
    if not isinstance(name, str) or not name or len(name) > LONGEST_NAME:
        raise ValueError(f"expected a camera's name of 1 to {LONGEST_NAME} characters, but got {str(name)[:50]!r}")


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu()
