"""T3A: the head's class weights become the mean directions of confident test features.

Iwasawa and Matsuo, Test-time classifier adjustment module for model-agnostic domain generalization, NeurIPS 2021.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from cafe_tta import losses
from cafe_tta.adapter import Adapter, AdapterConfig, Report
from cafe_tta.classifier import SplitClassifier
from cafe_tta.options import option
from cafe_tta.traits import Traits


@dataclass(frozen=True)
class T3AConfig(AdapterConfig):
    """Options of T3A.

    >>> T3AConfig(support_size=None).batch_size
    32
    """

    batch_size: int = 32  # Appendix A.2
    support_size: int | None = option(
        20, "M: features kept for each class; none keeps all, and grows with the stream.", least=1
    )


class T3A(Adapter):
    """Classifies by the summed directions of each class's M most confident features. The network never changes.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter = T3A(classifier, config=T3AConfig(support_size=2))
    >>> logits = adapter(torch.rand(8, 3, 2, 2))
    >>> len(adapter.supports) <= 2 * 3
    True
    """

    name = "t3a"
    traits = Traits("class prototypes", backward=(0, 0), smallest=(1, 1, 1), keeps="M features a class")
    remark = "T3A answers each image once, as it comes, offline too: the paper's rows are equal."
    one_pass = True
    distributed = True
    Config = T3AConfig
    config: T3AConfig
    presets: ClassVar = {"cifar": T3AConfig(), "imagenet": T3AConfig()}

    def reset(self) -> None:
        super().reset()
        with torch.no_grad():
            self._set_supports(*self._judged(self.classifier.head.weight))  # one support a class to begin with

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        with torch.no_grad():
            self.normaliser.evaluating()
            features, logits = self.run(images)
            size = self.ranks.count(images)
            if reason := self.why_unusable(features):
                return logits, Report(size, stepped=False, refused=True, reason=reason)
            new = self._judged(self.ranks.gather(features))
            joined = [torch.cat(pair) for pair in zip((self.supports, self.labels, self.entropies), new, strict=True)]
            self._set_supports(*joined)
            return features @ self._class_weights().T, Report(size, stepped=True)

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features, _ = super().features_and_logits(images)
        return features, features @ self._class_weights().T

    def exported(self) -> SplitClassifier:
        """The class weights become those of the head, without a bias."""
        old = self.classifier.head
        head = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None).to(old.weight)
        head.weight.copy_(self._class_weights())
        if head.bias is not None:
            head.bias.zero_()
        return SplitClassifier(self.classifier.backbone, head, self.classifier.feature_layer)

    def _judged(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features with the label and entropy that the original head, bias included, gives them."""
        logits = self.classifier.head(features)
        return features.detach().clone(), logits.argmax(1), losses.entropy(logits)

    def _set_supports(self, supports: Tensor, labels: Tensor, entropies: Tensor) -> None:
        if self.config.support_size is not None:
            order = entropies.argsort(stable=True)
            kept = [order[labels[order] == c][: self.config.support_size] for c in range(self.classifier.num_classes)]
            chosen = torch.cat(kept).sort().values  # in the order they came, which a tie respects
            supports, labels, entropies = supports[chosen], labels[chosen], entropies[chosen]
        self.supports = nn.Buffer(supports)  # (S, D)
        self.labels = nn.Buffer(labels)  # (S,)
        self.entropies = nn.Buffer(entropies)  # (S,)

    def _class_weights(self) -> Tensor:
        directions = nn.functional.normalize(self.supports, dim=1)
        weights = torch.zeros_like(self.classifier.head.weight)  # (C, D); a class without supports keeps 0
        return nn.functional.normalize(weights.index_add(0, self.labels, directions), dim=1)
