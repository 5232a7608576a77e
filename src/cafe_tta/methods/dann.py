"""DANN: a discriminator tells source from target features, and the backbone learns to deceive it.

Ganin et al., Domain-adversarial training of neural networks, JMLR 2016. https://arxiv.org/abs/1505.07818
Not test-time adaptation: it needs labelled source images all along. An upper reference (Appendix D.6).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cafe_tta.gradient import GradientAdapter, StepConfig
from cafe_tta.options import option
from cafe_tta.source.value import images_of
from cafe_tta.traits import Traits


@dataclass(frozen=True)
class DANNConfig(StepConfig):
    """Options of DANN.

    >>> DANNConfig(iterations=100).hidden
    1024
    """

    batch_size: int = 128  # Appendix D.6
    iterations: int = option(400, "Iterations of a whole run, as in the paper for CIFAR.", least=1)
    hidden: int = option(1024, "Width of the discriminator.", least=1)
    reversal: float = option(1.0, "Weight of the reversed gradient.")
    seed: int = option(0, "Seed of the discriminator's initial weights.")


class DANN(GradientAdapter):
    """Source cross-entropy + domain cross-entropy with its gradient reversed. Each batch is one iteration.

    Its second argument is a loader of labelled source images, which is read repeatedly. Everything moves, the head
    too. BatchNorm normalises source and target batches separately; the running statistics are the target's.

    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3)))
    >>> labelled = [(torch.rand(8, 3, 2, 2), torch.zeros(8, dtype=torch.long))]
    >>> adapter = DANN(classifier, labelled, DANNConfig(hidden=16))
    >>> adapter(torch.rand(8, 3, 2, 2)).shape, adapter.wants_more()
    (torch.Size([8, 3]), True)
    """

    name = "dann"
    traits = Traits("everything", (2, 2), (2, 2), keeps="a discriminator")
    needs = "data"
    Config = DANNConfig
    config: DANNConfig
    _taken: int  # source batches used so far
    presets: ClassVar = {
        "cifar": DANNConfig(),
        "imagenet": DANNConfig(batch_size=64, iterations=20_000),
    }

    def prepare(self, source: Any) -> None:
        self._loader = source
        self.discriminator = _discriminator(self.classifier.num_features, self.config.hidden).to(
            self.classifier.head.weight
        )
        super().prepare(source)

    def moving(self) -> list[nn.Parameter]:
        classifier = super().moving() if self.config.parameters == "norm" else list(self.classifier.parameters())
        return classifier + list(self.discriminator.parameters())

    def reset(self) -> None:
        super().reset()
        generator = torch.Generator().manual_seed(self.config.seed)
        with torch.no_grad():
            for layer in self.discriminator:
                if isinstance(layer, nn.Linear):  # PyTorch's own initialisation, but by seed
                    bound = layer.in_features**-0.5
                    layer.weight.copy_(torch.rand(layer.weight.shape, generator=generator) * 2 * bound - bound)
                    layer.bias.copy_(torch.rand(layer.bias.shape, generator=generator) * 2 * bound - bound)
                elif isinstance(layer, nn.BatchNorm1d):
                    layer.reset_parameters()
        self._start_source(0)

    def loss(self, features: Tensor, logits: Tensor) -> Tensor:
        images, labels = self._next_source()
        self.normaliser.adapting(update=False)
        source_features, source_logits = self.run(images)
        label_loss = nn.functional.cross_entropy(source_logits, labels)
        both = _ReverseGradient.apply(torch.cat([source_features, features]), self.config.reversal)
        domains = torch.cat([torch.ones(len(source_features)), torch.zeros(len(features))]).to(features)
        domain_loss = nn.functional.binary_cross_entropy_with_logits(self.discriminator(both).squeeze(1), domains)
        self.notes |= {"label": label_loss.item(), "domain": domain_loss.item()}
        return label_loss + domain_loss

    def wants_more(self) -> bool:
        return self.counters.batches < self.config.iterations

    def fit(self, batches: Iterable[Any]) -> None:
        """A whole fine-tuning run: `config.iterations` steps over the target images, again and again."""
        while self.wants_more():
            before = self.counters.batches
            for batch in batches:
                self(images_of(batch))
                if not self.wants_more():
                    return
            if self.counters.batches == before:
                raise ValueError("expected at least one batch of target images, but the loader was empty")

    def state(self) -> dict[str, Tensor]:
        discriminator = {f"discriminator.{name}": tensor for name, tensor in self.discriminator.state_dict().items()}
        return super().state() | discriminator | {"source_batches": torch.tensor(self._taken)}

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        super().check_state(tensors)
        for name, tensor in self.discriminator.state_dict().items():
            if (found := tensors.get(f"discriminator.{name}")) is None or found.shape != tensor.shape:
                raise ValueError(f"the state has no `discriminator.{name}` of shape {tuple(tensor.shape)}")

    def set_state(self, tensors: Mapping[str, Tensor]) -> None:
        super().set_state(tensors)
        start = "discriminator."
        self.discriminator.load_state_dict(
            {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}
        )
        self._start_source(int(tensors["source_batches"]))

    def _backup(self) -> Any:
        return super()._backup(), self._taken

    def _restore(self, kept: Any) -> None:
        super()._restore(kept[0])
        if self._taken > kept[1]:  # the source batch of a step that was not taken serves the next one
            self._taken, self._again = kept[1], True

    def _start_source(self, taken: int) -> None:
        """Begins the source loader anew and passes over the batches already taken: exact if its order is fixed."""
        self._batches: Iterator[Any] = iter(())
        self._taken = 0
        self._last: Any = None
        self._again = False
        for _ in range(taken):
            self._next_source()

    def _next_source(self) -> tuple[Tensor, Tensor]:
        batch = self._last if self._again else next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches, None)
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise TypeError(f"dann needs a loader of (images, labels), but it gave {type(batch).__name__}")
        self._taken += 1
        self._last, self._again = batch, False
        weight = self.classifier.head.weight
        return images_of(batch).to(weight), batch[1].to(weight.device)


def _discriminator(num_features: int, hidden: int) -> nn.Sequential:
    """Three blocks of BatchNorm, linear layer and ReLU, then one logit: source or target."""
    layers: list[nn.Module] = []
    for width in (num_features, hidden, hidden):
        layers += [nn.BatchNorm1d(width, track_running_stats=False), nn.Linear(width, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, 1))


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return features.view_as(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * grad, None
