"""Mean and covariance of the source's features, of all and of each predicted class (TTAC)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from cafe_tta.classifier import SplitClassifier, evaluating, require_classifier, require_match
from cafe_tta.source.value import Content, SourceValue, images_of

LARGEST = 2**24  # values in all classes' whole covariances: beyond, only their diagonals are kept


@dataclass(frozen=True, eq=False, repr=False)
class ClassMoments(SourceValue):
    """Mean and covariance of all features, and of those of each class that the classifier predicts.

    Classes have whole covariances where those of all classes together have at most 16 million values, else variances.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)))
    >>> source = ClassMoments.fit(classifier, [torch.rand(64, 3, 2, 2)])
    >>> source.cov.shape, source.class_mean.shape, source.class_cov.shape
    (torch.Size([12, 12]), torch.Size([3, 12]), torch.Size([3, 12, 12]))
    """

    kind = "class-moments"
    file_kind = "class-moments"
    how_to_make = "make them with ClassMoments.fit(classifier, source_loader) or `cafe-tta stats --kind class-moments`"

    mean: Tensor  # (D,)
    cov: Tensor  # (D, D)
    class_counts: Tensor  # (C,): source images of each predicted class
    class_mean: Tensor  # (C, D)
    class_cov: Tensor  # (C, D, D), or (C, D): the variances
    meta: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(cls, classifier: SplitClassifier, loader: Iterable[Any], full: bool | None = None) -> Self:
        """One pass over the source images, in evaluation mode. `full`: whether classes have whole covariances."""
        require_classifier(classifier)
        dims, classes = classifier.num_features, classifier.num_classes
        full = classes * dims**2 <= LARGEST if full is None else full
        counts = torch.zeros(classes, dtype=torch.float64)
        sums = torch.zeros(classes, dims, dtype=torch.float64)
        products = torch.zeros(classes, dims, dims if full else 1, dtype=torch.float64)
        second = torch.zeros(dims, dims, dtype=torch.float64)
        with torch.no_grad(), evaluating(classifier):
            for batch in loader:
                features, logits = classifier.features_and_logits(images_of(batch).to(classifier.head.weight))
                features, labels = features.cpu().double(), logits.argmax(1).cpu()
                second += features.T @ features
                for label in labels.unique().tolist():
                    own = features[labels == label]
                    counts[label] += len(own)
                    sums[label] += own.sum(0)
                    products[label] += own.T @ own if full else own.square().sum(0)[:, None]
        total = counts.sum()
        if total < 2:
            raise ValueError(f"expected at least 2 source images, but the loader has {int(total)}")
        mean, by = sums.sum(0) / total, counts.clamp(min=1)
        class_mean = sums / by[:, None]
        cov = second / total - torch.outer(mean, mean)
        if full:
            class_cov = products / by[:, None, None] - class_mean[:, :, None] * class_mean[:, None]
        else:
            class_cov = (products.squeeze(2) / by[:, None] - class_mean.square()).clamp(min=0)
        mean, cov, counts, class_mean, class_cov = (t.float() for t in (mean, cov, counts, class_mean, class_cov))
        return cls(mean, cov, counts, class_mean, class_cov, classifier.identity())

    def check_belongs_to(self, classifier: SplitClassifier) -> None:
        """Raises where the features are another classifier's, and says what differs."""
        require_match("class moments", len(self.mean), self.meta, classifier)

    def facts(self) -> Mapping[str, Any]:
        return {"features": len(self.mean), "classes": len(self.class_mean), "read at": super().facts()["read at"]}

    def content(self) -> Content:
        tensors = {name: getattr(self, name) for name in ("mean", "cov", "class_counts", "class_mean", "class_cov")}
        return tensors, {"classifier": dict(self.meta)}

    @classmethod
    def from_content(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        return cls(**tensors, meta=meta["classifier"])
