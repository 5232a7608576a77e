"""CoTTA: a slowly averaged teacher answers and teaches; some weights go back to the source at random.

Wang et al., Continual test-time domain adaptation, CVPR 2022. https://arxiv.org/abs/2203.13591
Original: https://github.com/qinenergy/cotta (MIT). Written from the formulas.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from cafe_tta import losses
from cafe_tta.adapter import Report
from cafe_tta.augmentation import Augmentation
from cafe_tta.classifier import SplitClassifier
from cafe_tta.methods.roid import AugmentConfig
from cafe_tta.methods.second import Taught
from cafe_tta.normalisation import batchnorm_layers
from cafe_tta.options import option
from cafe_tta.traits import Traits


@dataclass(frozen=True)
class CoTTAConfig(AugmentConfig):
    """Options of CoTTA.

    >>> CoTTAConfig().augmentations
    32
    """

    batch_size: int = 200
    lr: float = 1e-3
    parameters: Literal["all", "norm"] = "all"
    keep: float = option(0.999, "Share of the teacher that a step leaves; the rest is the student's.", least=0, most=1)
    restore: float = option(0.01, "Probability that a weight goes back to the source in a step.", least=0, most=1)
    min_confidence: float = option(
        0.92,
        "Where the source classifier's mean confidence in a batch is lower, the teacher averages over augmentations.",
        least=0,
    )
    augmentations: int = option(32, "Augmented copies that the teacher then averages over.", least=1)
    symmetric: bool = option(False, "Whether the cross-entropy is taken both ways, as for ImageNet.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answer != "before" or self.every != 1:
            raise ValueError(
                "cotta answers with its teacher as it is before a step, and steps on each batch: expected "
                f"answer='before' and every=1, but got {self.answer!r} and {self.every}"
            )


class CoTTA(Taught):
    """Answers with a teacher; the student learns its answers by cross-entropy, and the teacher follows the student.

    The teacher's logits are averaged over 32 augmentations where the source classifier is unsure of the batch. After a
    step: teacher ← 0.999 teacher + 0.001 student, then every weight of the student is the source's again with
    probability 0.01. All weights and biases move, the head's too. Random draws follow the number of the batch.

    With normalisation="batch", BatchNorm normalises with the batch in every mode, as the original does. Only batches
    smaller than `min_batch` are answered with the source's statistics.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = CoTTA(classifier, config=CoTTAConfig(augmentations=2))
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.report.notes["augmented"]
    (torch.Size([8, 3]), 1.0)
    """

    name = "cotta"
    traits = Traits("everything called weight or bias", (3, 34), keeps="a teacher's copy of what moves", licence="MIT")
    remark = "CoTTA normalises with the batch that it answers."
    in_tables = False
    Config = CoTTAConfig
    config: CoTTAConfig
    presets: ClassVar = {
        "cifar": CoTTAConfig(optimizer="adam"),
        "cifar100": CoTTAConfig(optimizer="adam", min_confidence=0.72),
        "imagenet": CoTTAConfig(
            batch_size=64, lr=0.01, nesterov=True, restore=0.001, min_confidence=0.1, symmetric=True
        ),
    }
    _taught: Tensor | None = None  # the teacher's answers to the batch at hand

    def prepare(self, source: Any) -> None:
        super().prepare(source)
        if (
            self.config.normalisation == "batch"
        ):  # running statistics of the student would not fit the teacher's weights
            for layer in self.normaliser.layers:
                layer.momentum = 0.0

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        large = self.normaliser.kind == "batch" and self.normaliser.batch_size(images) >= self.config.min_batch
        before, self.normaliser.as_adapting = self.normaliser.as_adapting, self.normaliser.as_adapting or large
        try:
            return super().features_and_logits(images)
        finally:
            self.normaliser.as_adapting = before

    def exported(self) -> SplitClassifier:
        model = super().exported()
        for layer in batchnorm_layers(model) if self.config.normalisation == "batch" else ():
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        return model

    def moving(self) -> list[nn.Parameter]:
        """Everything called weight or bias, as published: no class tokens or position embeddings."""
        if self.config.parameters == "norm":
            return super().moving()
        head = list(self.classifier.head.parameters())
        every = self.classifier.named_parameters()
        named = {id(p) for name, p in every if name.rpartition(".")[2] in ("weight", "bias")}
        return [parameter for parameter in [*super().moving(), *head] if id(parameter) in named]

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        self._taught = None
        logits, report = super().answer(images)
        taught, self._taught = self._taught, None
        return (logits if taught is None or report.refused else taught), report

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        self._taught = self._teach()
        taught = self._taught[self.kept]
        if self.config.symmetric:
            return losses.symmetric_cross_entropy(logits, taught).mean()
        return -(taught.softmax(1) * logits.log_softmax(1)).sum(1).mean()

    def _teach(self) -> Tensor:
        self.normaliser.adapting(update=False)
        with torch.no_grad():
            with self.with_weights({name: self._source_state[name] for name in self.second_names()}):
                confidence = self.run(self.batch)[1].softmax(1).amax(1).mean().item()
            unsure = confidence < self.config.min_confidence
            self.notes |= {"confidence": confidence, "augmented": float(unsure)}
            with self.with_weights(self.second()):
                if not unsure:
                    return self.run(self.batch)[1]
                augment = Augmentation(self.config.pixel_mean, self.config.pixel_std)
                count = self.config.augmentations
                passes = (self.run(augment(self.batch, self.generator(i)))[1] for i in range(count))
                return torch.stack(list(passes)).mean(0)

    def after_step(self) -> None:
        self.average_into_second(self.config.keep)
        generator = self.generator(self.config.augmentations)
        ours = self.changing()
        with torch.no_grad():
            for name in self.second_names():
                tensor = ours[name]
                back = torch.rand(tensor.shape, generator=generator).to(tensor.device) < self.config.restore
                tensor.copy_(torch.where(back, self._source_state[name].to(tensor), tensor))
