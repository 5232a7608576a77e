"""BACS: entropy minimisation with a Bayesian prior on the weights, and an ensemble.

Zhou and Levine, Bayesian adaptation for covariate shift, NeurIPS 2021. https://arxiv.org/abs/2109.12746
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cafe_tta import losses
from cafe_tta.adapter import Adapter, Report
from cafe_tta.classifier import SplitClassifier
from cafe_tta.gradient import GradientAdapter, StepConfig
from cafe_tta.options import option
from cafe_tta.source.swag import Posterior, PosteriorMember
from cafe_tta.traits import Traits
from cafe_tta.unmixing import Unmixer


@dataclass(frozen=True)
class BACSConfig(StepConfig):
    """Options of BACS.

    >>> BACSConfig(ensemble_size=2).prior_weight
    0.0001
    """

    batch_size: int = 128  # Appendix A.2
    prior_weight: float = option(1e-4, "Weight of the posterior term.", least=0)
    variance_floor: float = option(1e-6, "Added to SWAG's variances, some of which are 0.", above=0)
    ensemble_size: int | None = option(
        None, "Ensemble members used; none uses all members of the posterior. The paper gives no number.", least=1
    )


class _Member(GradientAdapter):
    """One member: mean entropy + w · ½ Σ (θ - μ)² / (σ² + floor). All weights move, and start from μ."""

    name = "bacs-member"
    distributed = True
    Config = BACSConfig
    config: BACSConfig

    def prepare(self, source: PosteriorMember) -> None:
        source.put_into(self.classifier)
        super().prepare(source)
        moving = {id(parameter) for parameter in self.moving()}
        self._names = [name for name, p in self.classifier.named_parameters() if id(p) in moving]
        for number, name in enumerate(self._names):
            self.register_buffer(f"mean_{number}", source.mean[name].clone(), persistent=False)
            precision = 1 / (source.variance[name] + self.config.variance_floor)
            self.register_buffer(f"precision_{number}", precision, persistent=False)

    def moving(self) -> list[nn.Parameter]:
        """All weights and biases, the head's too."""
        return list(self.classifier.parameters()) if self.config.parameters == "all" else super().moving()

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        parameters = dict(self.classifier.named_parameters())
        means = [self.get_buffer(f"mean_{i}") for i in range(len(self._names))]
        precisions = [self.get_buffer(f"precision_{i}") for i in range(len(self._names))]
        prior = losses.squared_distance([parameters[name] for name in self._names], means, precisions)
        (entropy,) = self.ranks.mean(losses.entropy(logits))
        self.notes |= {"entropy": entropy.item(), "prior": prior.item()}
        return entropy + self.config.prior_weight * self.ranks.share(prior)


class BACS(Adapter):
    """An ensemble of posterior means, each adapted by itself; probabilities are averaged. Needs a SWAG posterior.

    Logits are the logarithms of the averaged probabilities; features are those of the first member.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3)))
    >>> loader = [(torch.rand(8, 3, 2, 2), torch.zeros(8, dtype=torch.long))]
    >>> adapter = BACS(classifier, Posterior.fit(classifier, loader, epochs=1, batch_size=2))
    >>> adapter(torch.rand(8, 3, 2, 2)).exp().sum(1).round().tolist()  # probabilities
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """

    name = "bacs"
    traits = Traits("all weights, of each member", keeps="an ensemble of classifiers")
    distributed = True
    needs = "posterior"
    Config = BACSConfig
    config: BACSConfig
    presets: ClassVar = {
        "cifar": BACSConfig(),
        "cifar-online": BACSConfig(answer="after-eval"),
        "imagenet": BACSConfig(batch_size=64, lr=1e-4, momentum=0.9, prior_weight=3e-4),
        "imagenet-online": BACSConfig(batch_size=64, lr=1e-4, momentum=0.9, prior_weight=3e-4, answer="after-eval"),
    }

    def prepare(self, source: Any) -> None:
        super().prepare(source)
        assert isinstance(source, Posterior)
        size = self.config.ensemble_size or len(source.members)
        if size > len(source.members):
            raise ValueError(
                f"expected `ensemble_size` to be at most {len(source.members)}, the posterior's, but got {size}"
            )
        self.members = nn.ModuleList(
            _Member(self.classifier, m, self.config, styles=self.styles) for m in source.members[:size]
        )

    @property
    def clusters(self) -> Unmixer | None:
        """Those of the first member: all of them see the same images."""
        return self._members()[0].clusters

    def answer(self, images: Tensor) -> tuple[Tensor, Report]:
        for member in self._members():
            member.counters.batches = self.counters.batches  # what `every` counts by
        results = [member.answer_or_roll_back(images) for member in self._members()]
        reports = [report for _, report in results]
        reasons = "; ".join(dict.fromkeys(report.reason for report in reports if report.reason))
        known = [report.loss for report in reports if report.loss is not None]
        loss = sum(known) / len(known) if known else None
        stepped, refused = any(report.stepped for report in reports), any(report.refused for report in reports)
        report = Report(self.ranks.count(images), stepped, refused, reasons, loss, reports[0].notes)
        return self._average([logits for logits, _ in results]), report

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        results = [member.features_and_logits(images) for member in self._members()]
        return results[0][0], self._average([logits for _, logits in results])

    def exported(self) -> SplitClassifier:
        if len(self.members) > 1:
            raise ValueError(
                f"bacs answers with the mean probabilities of {len(self.members)} models, which no single model has; "
                "export one of them, adapter.members[0].export(), or set `ensemble_size` to 1"
            )
        return self._members()[0].exported()

    def reset(self) -> None:
        super().reset()
        for member in self._members():
            member.reset()

    def state(self) -> dict[str, Tensor]:
        return {f"{i}.{k}": t for i, member in enumerate(self._members()) for k, t in member.state().items()}

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        for member, part in zip(self._members(), self._parts(tensors), strict=True):
            member.check_state(part)

    def set_state(self, tensors: Mapping[str, Tensor]) -> None:
        for member, part in zip(self._members(), self._parts(tensors), strict=True):
            member.set_state(part)

    def _members(self) -> list[_Member]:
        return [member for member in self.members if isinstance(member, _Member)]

    def _parts(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        starts = [f"{i}." for i in range(len(self.members))]
        return [{k.removeprefix(s): t for k, t in tensors.items() if k.startswith(s)} for s in starts]

    @staticmethod
    def _average(logits: list[Tensor]) -> Tensor:
        if len(logits) == 1:
            return logits[0].log_softmax(1)
        return torch.stack([one.softmax(1) for one in logits]).mean(0).clamp_min(1e-38).log()
