"""CAFe: the features of the batch are moved back to the source's mean and covariance, group by group.

Adachi, Yamaguchi, Kumagai, Covariance-aware feature alignment with pre-computed source statistics for test-time
adaptation to multiple image corruptions, ICIP 2023. https://arxiv.org/abs/2204.13263
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cafe_tta import losses
from cafe_tta.adapter import Report
from cafe_tta.gaussians import EIGENVALUE_FLOOR, Moments, merge
from cafe_tta.gradient import GradientAdapter, NothingToLearn, StepConfig
from cafe_tta.options import option
from cafe_tta.source.images import few_images
from cafe_tta.source.reference import MARGIN, Reference
from cafe_tta.source.stats import SourceStats
from cafe_tta.traits import Traits

FEW_SHIFTED = 0.05  # of the images: with no more of another style than this, the gate is closed


@dataclass(frozen=True)
class CAFeConfig(StepConfig):
    """Options of CAFe.

    >>> CAFeConfig(lr=1e-4).eigenvalue_floor
    0.001
    """

    eigenvalue_floor: float = option(EIGENVALUE_FLOOR, "ε: smaller source eigenvalues count as ε (Sec. 4.2).", above=0)
    samples_per_dim: float = option(
        2.0, "Samples that a group needs for each of its dimensions; a smaller batch is padded.", least=0
    )
    min_samples: int = option(
        128, "Samples that every group needs, however narrow it is; a smaller batch is padded.", least=0
    )
    memory: bool = option(True, "Whether batches are padded with earlier batches first, then with source moments.")
    gate: bool = option(
        False,
        "No step while the batches look like the source, which the source classifier answers; nor, with "
        "normalisation=unmix, while they are of few classes, or if the statistics are of few source images.",
    )
    gate_margin: float = option(
        MARGIN,
        "How far above the largest loss of source batches a batch may be and still look like the source.",
        above=0,
    )
    gate_patience: int = option(8, "Batches that are adapted to before the gate checks again.", least=1)


class CAFe(GradientAdapter):
    """Moves the features back to the source's mean and covariance, group by group; keeps predictions diverse.

    >>> from cafe_tta import FeatureStats, split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> source = FeatureStats.fit(classifier, [torch.rand(64, 3, 2, 2)]).group()
    >>> adapter = CAFe(classifier, source)
    >>> adapter(torch.rand(32, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([32, 3]), True)
    """

    name = "cafe"
    traits = Traits("the backbone", keeps="moments of earlier batches")
    distributed = True
    needs = "stats"
    Config = CAFeConfig
    config: CAFeConfig
    presets: ClassVar = {
        "cifar": CAFeConfig(samples_per_dim=1.25, min_samples=0),
        "cifar-online": CAFeConfig(samples_per_dim=1.25, min_samples=0, answer="after-eval"),
        "imagenet": CAFeConfig(samples_per_dim=1.25, min_samples=0),
        "imagenet-online": CAFeConfig(samples_per_dim=1.25, min_samples=0, answer="after-eval"),
    }

    def prepare(self, source: Any) -> None:
        super().prepare(source)
        source = self.regrouped(source)
        self.reference = Reference(source, self.config.eigenvalue_floor, self.config.gate_margin)
        self.few_source_images = few_images(source.meta.get("count", math.inf), source.widest_group)
        if self.config.gate and self.normaliser.unmixer is None:
            self.reference.require_calibration()

    def regrouped(self, source: SourceStats) -> SourceStats:
        """The statistics in the groups that the method aligns: those of the file, unless a subclass groups anew."""
        return source

    def reset(self) -> None:
        super().reset()
        self.largest_batch = nn.Buffer(torch.tensor(0))  # the largest batch of the stream so far
        self.gate_open = nn.Buffer(torch.tensor(0))  # batches to adapt to before the gate checks again
        self._set_memory([])

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        if not self.config.gate or self.normaliser.unmixer is not None:  # which knows the styles: see `check_gate`
            return super().answer(images)
        if self.gate_open > 0:
            self.gate_open = nn.Buffer(self.gate_open - 1)
            return super().answer(images)
        # The source classifier decides: to an adapted one, images that it has adapted to look like the source.
        with self.source_weights():
            features, logits = self.features_and_logits(images)
        alignment, drift = self.reference.alignment(features, self.ranks), self.reference.drift(features, self.ranks)
        size = self.ranks.count(images)
        threshold = self.reference.threshold(size)
        if not self.ranks.any(not alignment <= threshold):  # NaN counts as far from the source
            reason = f"the batch looks like the source (alignment {alignment:.3g}, at most {threshold:.3g})"
            return logits, Report(size, stepped=False, reason=reason, notes={"alignment": alignment}, drift=drift)
        self.gate_open = nn.Buffer(self.gate_open + self.config.gate_patience - 1)
        logits, report = super().answer(images)
        return logits, replace(report, drift=drift)

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        self.check_gate()
        return self.alignment(features) + self.infomax(logits)

    def check_gate(self) -> None:
        """Raises `NothingToLearn` where the gate is closed by what unmixing knows of the images, or by the source."""
        unmixer = self.normaliser.unmixer
        if self.config.gate and unmixer is not None:
            if self.few_source_images:
                raise NothingToLearn(self.few_source_images)
            if unmixer.shifted <= FEW_SHIFTED:
                raise NothingToLearn("the images look like the source's")
            if not unmixer.diversity.trusted:
                raise NothingToLearn(f"the last images are of few classes (about {unmixer.diversity.classes:.1f})")

    def infomax(self, logits: Tensor) -> Tensor:
        """The information-maximisation loss of a batch, which the report notes."""
        infomax = losses.infomax(logits, self.ranks.mean)
        self.notes["infomax"] = infomax.item()
        return infomax

    def alignment(self, features: Tensor) -> Tensor:
        """L_a of the batch, padded where it is too small for a group, or smaller than the batches before it.

        A step on the short last batch of a stream is as large as one on a full batch, and many times as noisy. In a few
        images, a feature that is mostly 0 hardly varies, and the gradient of C⁻¹ explodes.
        """
        self.largest_batch = nn.Buffer(self.largest_batch.clamp(min=self.ranks.count(features)))
        moments = self.ranks.moments(self.reference, features)
        memory = self._memory(features)
        needed = max(self.largest_batch.item(), self.config.min_samples)
        divergence = self.reference.divergence(moments, self.config.samples_per_dim, memory, needed)
        self._remember(moments, memory)
        alignment = divergence.values.mean().to(features.dtype)
        self.notes["alignment"] = alignment.item()
        self.notes["padded_groups"] = float(divergence.padded.sum())
        return alignment

    @property
    def window(self) -> int:
        """The largest number of images that the memory represents."""
        widest = math.ceil(self.config.samples_per_dim * self.reference.widest)
        return max(widest, int(self.largest_batch), self.config.min_samples)

    # The memory is two buffers: they move, are saved and are restored with the adapter.

    def _memory(self, features: Tensor) -> list[Moments] | None:
        if self.memory_count == 0:
            return None
        return self.reference.unpack(self.memory_count, self.memory_moments.to(features.device))

    def _remember(self, moments: list[Moments], memory: list[Moments] | None) -> None:
        if not self.config.memory:
            return
        moments = [part.detach() for part in moments]
        room = self.window - moments[0].count[0]
        if memory is not None and room > 0:
            kept = [part.with_count(part.count.clamp(max=room)) for part in memory]
            moments = [merge(a, b) for a, b in zip(moments, kept, strict=True)]
        self._set_memory(moments)

    def _set_memory(self, moments: list[Moments]) -> None:
        count, values = self.reference.pack(moments)
        self.memory_count = nn.Buffer(count.clamp(max=float(self.window)))
        self.memory_moments = nn.Buffer(values)
