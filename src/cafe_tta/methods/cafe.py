"""CAFe: the features of the batch are moved back to the source's mean and covariance, group by group.

Adachi, Yamaguchi, Kumagai, Covariance-aware feature alignment with pre-computed source statistics for test-time
adaptation to multiple image corruptions, ICIP 2023. https://arxiv.org/abs/2204.13263
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cafe_tta import losses
from cafe_tta.adapter import Report
from cafe_tta.config import StepConfig
from cafe_tta.gate import SAMPLES_PER_DIM, Gate
from cafe_tta.gaussians import Moments, SourceGaussians, merge
from cafe_tta.gradient import GradientAdapter
from cafe_tta.stats import SourceStats


@dataclass(frozen=True)
class CAFeConfig(StepConfig):
    eigenvalue_floor: float = losses.EIGENVALUE_FLOOR  # ε, Sec. 4.2
    samples_per_dim: float = 2.0  # samples that a group wants for each of its dimensions; see docs/choices.md
    min_samples: int = 128  # samples that every group wants, however narrow it is
    memory: bool = True  # what a batch lacks is taken from earlier batches first, then from the source
    gate: bool = False  # no step while the stream looks like the source: the source classifier answers it
    gate_margin: float = 1.5  # how far above the largest loss of source batches a batch still looks like the source
    gate_patience: int = 8  # batches that are adapted to before the gate looks again

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eigenvalue_floor > 0:
            raise ValueError(f"expected `eigenvalue_floor` to be above 0, but got {self.eigenvalue_floor}")
        if not self.samples_per_dim >= 0:
            raise ValueError(f"expected `samples_per_dim` to be at least 0, but got {self.samples_per_dim}")
        if self.min_samples < 0:
            raise ValueError(f"expected `min_samples` to be at least 0, but got {self.min_samples}")
        if not self.gate_margin > 0:
            raise ValueError(f"expected `gate_margin` to be above 0, but got {self.gate_margin}")
        if self.gate_patience < 1:
            raise ValueError(f"expected `gate_patience` to be at least 1, but got {self.gate_patience}")


class CAFe(GradientAdapter):
    """Moves the features back to the source's mean and covariance, group by group; keeps predictions diverse."""

    name = "cafe"
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
        if not isinstance(source, SourceStats):
            raise TypeError(
                f"{self.name} needs SourceStats, but got {type(source).__name__}; make them with stats.group()"
            )
        source.check_belongs_to(self.classifier)
        super().prepare(source)
        source = self.grouping(source)
        self.gaussians = SourceGaussians(source, self.config.eigenvalue_floor)
        self.gate = Gate(source.meta.get("alignment", {}), self.config.gate_margin) if self.config.gate else None

    def grouping(self, source: SourceStats) -> SourceStats:
        return source

    def reset(self) -> None:
        super().reset()
        self.largest_batch = nn.Buffer(torch.tensor(0))  # of the stream so far
        self.gate_open = nn.Buffer(torch.tensor(0))  # batches to adapt to before the gate looks again
        self._set_memory([])

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        if self.gate is None:
            return super().answer(images)
        if self.gate_open > 0:
            self.gate_open = nn.Buffer(self.gate_open - 1)
            return super().answer(images)
        # The source classifier looks: to an adapted one, the images that it has adapted to look like the source.
        with self.as_source():
            features, logits = self.features_and_logits(images)
        moments = self.ranks.moments(self.gaussians, features)
        alignment = self.gaussians.divergence(moments, SAMPLES_PER_DIM).values.mean().item()
        size = self.ranks.count(images)
        threshold = self.gate.threshold(size)
        if not self.ranks.any(not alignment <= threshold):
            reason = f"the batch looks like the source (alignment {alignment:.3g}, at most {threshold:.3g})"
            return logits, Report(size, stepped=False, reason=reason, notes={"alignment": alignment})
        self.gate_open = nn.Buffer(self.gate_open + self.config.gate_patience - 1)
        return super().answer(images)

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        return self.alignment(features) + self.infomax(logits)

    def infomax(self, logits: Tensor) -> Tensor:
        infomax = losses.infomax(logits, self.ranks.mean)
        self.notes["infomax"] = infomax.item()
        return infomax

    def alignment(self, features: Tensor) -> Tensor:
        """L_a of the batch, completed where it is too small for a group, or a ragged rest of a stream of larger ones.

        A step on the last few images of a stream is as large as one on a whole batch, and many times as noisy. On few
        images, a feature that is mostly 0 hardly varies, and the gradient of C⁻¹ is beyond measure.
        """
        self.largest_batch = nn.Buffer(self.largest_batch.clamp(min=self.ranks.count(features)))
        moments = self.ranks.moments(self.gaussians, features)
        memory = self._memory(features)
        wanted = max(self.largest_batch.item(), self.config.min_samples)
        divergence = self.gaussians.divergence(moments, self.config.samples_per_dim, memory, wanted)
        self._remember(moments, memory)
        alignment = divergence.values.mean().to(features.dtype)
        self.notes["alignment"] = alignment.item()
        self.notes["completed_groups"] = float(divergence.completed.sum())
        return alignment

    @property
    def window(self) -> int:
        """Images that the memory stands for at most."""
        widest = math.ceil(self.config.samples_per_dim * self.gaussians.widest)
        return max(widest, int(self.largest_batch), self.config.min_samples)

    # The memory is a few buffers: it moves, is saved and is put back with the adapter.

    def _memory(self, features: Tensor) -> list[Moments] | None:
        if self.memory_count == 0:
            return None
        return self.gaussians.unpack(self.memory_count, self.memory_moments.to(features.device))

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
        count, values = self.gaussians.pack(moments)
        self.memory_count = nn.Buffer(count.clamp(max=float(self.window)))
        self.memory_moments = nn.Buffer(values)
