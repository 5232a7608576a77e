"""RoTTA: normalisation statistics that move slowly, a class-balanced memory of images, and a teacher.

Yuan, Xie, Li, Robust test-time adaptation in dynamic scenarios, CVPR 2023. https://arxiv.org/abs/2303.13899
Original: https://github.com/BIT-DA/RoTTA (MIT). Written from the formulas.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from cafe_tta.adapter import Report
from cafe_tta.augmentation import Augmentation
from cafe_tta.methods.balanced import BalancedMemory
from cafe_tta.methods.roid import AugmentConfig
from cafe_tta.methods.second import Taught
from cafe_tta.normalisation import Normalisation
from cafe_tta.options import option
from cafe_tta.traits import NORM, Traits


@dataclass(frozen=True)
class RoTTAConfig(AugmentConfig):
    """Options of RoTTA.

    >>> RoTTAConfig().capacity
    64
    """

    lr: float = 1e-3
    optimizer: Literal["sgd", "adam"] = "adam"
    normalisation: Normalisation = "slow"
    keep: float = option(0.999, "Share of the teacher that a step leaves; the rest is the student's.", least=0, most=1)
    capacity: int = option(64, "N: images in the memory, and between two steps.", least=2)
    age_weight: float = option(1.0, "λ_t: weight of an image's age when one is removed.", least=0)
    entropy_weight: float = option(1.0, "λ_u: weight of an image's entropy when one is removed.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = {"normalisation": "slow", "answer": "before", "every": 1, "max_entropy": None}
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"rotta answers with its teacher's slow statistics and learns from its memory: expected {name}="
                    f"{value!r}, but got {getattr(self, name)!r}"
                )


class RoTTA(Taught):
    """Answers with a teacher in evaluation mode; after every 64 images, the student learns from a memory of 64.

    The memory keeps classes balanced and prefers young, certain images (`BalancedMemory`). A step makes the student's
    predictions of augmented images agree with the teacher's: mean w CE(p_teacher, p_student), w = e⁻ᵃ / (1 + e⁻ᵃ) for
    an age of a·64 images. BatchNorm normalises with statistics that follow the memory slowly (normalisation="slow"),
    the student's and the teacher's apart; then teacher ← 0.999 teacher + 0.001 student.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = RoTTA(classifier, config=RoTTAConfig(capacity=8))
    >>> adapter(torch.rand(5, 3, 2, 2)).shape, adapter.report.reason
    (torch.Size([5, 3]), 'a step is taken after each 8 images')
    >>> adapter(torch.rand(5, 3, 2, 2)).shape, adapter.report.stepped
    (torch.Size([5, 3]), True)
    """

    name = "rotta"
    traits = Traits(
        f"{NORM}, and statistics",
        (1, 3),
        (0, 1),
        (1, 1, 1),
        "N images, a teacher's copy of what moves",
        "MIT",
    )
    in_tables = False
    Config = RoTTAConfig
    config: RoTTAConfig
    presets: ClassVar = {"cifar": RoTTAConfig(batch_size=200), "imagenet": RoTTAConfig()}

    def second_names(self) -> list[str]:
        """The teacher has normalisation statistics of its own."""
        return [name for name, tensor in self.changing().items() if tensor.is_floating_point()]

    def reset(self) -> None:
        super().reset()
        self.seen = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.images = nn.Buffer(torch.zeros(0, dtype=self.classifier.head.weight.dtype))  # (n, ...): the memory
        self.remembered = nn.Buffer(torch.zeros(0, 3, dtype=torch.float64))  # class, entropy and age of each

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        features, logits = self.features_and_logits(images)
        if reason := self.why_unusable(features):
            return logits, Report(len(images), stepped=False, refused=True, reason=reason)
        if len(self.remembered) and images.shape[1:] != self.images.shape[1:]:
            raise ValueError(
                f"rotta remembers images of shape {tuple(self.images.shape[1:])}, but got {tuple(images.shape[1:])}; "
                "resize them, or call reset()"
            )
        # Buffers are replaced, never changed: only what the steps change in place is copied.
        before = {n: t if n.startswith("adapter.") else t.detach().clone() for n, t in self.state().items()}
        losses, refusal = self._remember(images, logits)
        if refusal:
            self.set_state(before)
            return logits, Report(len(images), stepped=False, refused=True, reason=refusal)
        waiting = "" if losses else f"a step is taken after each {self.config.capacity} images"
        loss = sum(losses) / len(losses) if losses else None
        return logits, Report(
            len(images), bool(losses), False, waiting, loss, {"remembered": float(len(self.remembered))}
        )

    def _remember(self, images: Tensor, logits: Tensor) -> tuple[list[float], str]:
        """Adds image after image to the memory, with a step where one is due. Losses, and why a step was refused."""
        config, probs = self.config, logits.softmax(1)
        memory = BalancedMemory(config.capacity, probs.shape[1], config.age_weight, config.entropy_weight)
        kept = zip(self.images, self.remembered.tolist(), strict=True)
        memory.items = [(image, int(label), entropy, age) for image, (label, entropy, age) in kept]
        entropies = -(probs * (probs + 1e-6).log()).sum(1)
        losses: list[float] = []
        for image, predicted, entropy in zip(images, probs.argmax(1).tolist(), entropies.tolist(), strict=True):
            memory.add(image, predicted, entropy)
            self.seen = nn.Buffer(self.seen + 1)
            if self.seen % config.capacity == 0:
                loss, refusal = self._step(memory, len(losses))
                if refusal:
                    return losses, refusal
                losses.append(loss)
        self.images = nn.Buffer(torch.stack([item[0] for item in memory.items]).detach().clone())
        self.remembered = nn.Buffer(torch.tensor([item[1:] for item in memory.items], dtype=torch.float64))
        return losses, ""

    def _step(self, memory: BalancedMemory, number: int) -> tuple[float, str]:
        images = torch.stack([item[0] for item in memory.items])
        ages = torch.tensor([item[3] for item in memory.items]).to(images) / self.config.capacity
        self.normaliser.adapting()
        ours = self.changing()
        with torch.no_grad(), self.with_weights({name: tensor.clone() for name, tensor in self.second().items()}):
            taught = self.run(images)[1].softmax(1)
            moved = {name: ours[name].detach().clone() for name in self.second_names()}
        self.set_second(moved)
        augment = Augmentation(self.config.pixel_mean, self.config.pixel_std)
        features, logits = self.run(augment(images, self.generator(number)))
        loss = (torch.sigmoid(-ages) * -(taught * logits.log_softmax(1)).sum(1)).mean()
        refusal = self._backward(features, loss)
        if not refusal:
            self.optimizer.step()
            self.average_into_second(self.config.keep)
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), refusal
