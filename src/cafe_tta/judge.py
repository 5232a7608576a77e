"""The judge: compares two models without labels, on the same validation images.

Validation images are dealt into panels by camera. A figure is compared panel by panel, and the median over the panels
decides: what one camera sends, good or bad, cannot outvote the others.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cafe_tta import losses
from cafe_tta.source import Reference

FEWEST = 16  # validation images to judge on, at least
PANEL = 8  # images of a panel at least; cameras that share one are judged together, the bad with the good
WORSE_ALIGNMENT = math.log(1.1)  # a tenth above the other's is worse
WORSE_FRECHET = math.log(1.25)  # noisier: it looks at each group's covariance without flooring it
COLLAPSE = 0.6  # share of the other's predicted classes below which a snapshot has collapsed
UNSURE = 0.35  # rise of the entropy, as a share of the largest possible one, from which answers are guesses


@dataclass(frozen=True)
class Figures:
    """Measurements of a model on validation images: one number for each panel."""

    alignment: tuple[float, ...]  # empty where there are no source statistics
    frechet: tuple[float, ...]
    entropy: tuple[float, ...]
    classes: float  # effective number of predicted classes, over all panels
    finite: bool

    def summary(self) -> dict[str, float | None]:
        """The median over the panels of each figure."""
        if not self.finite:
            return {}
        parts = {"alignment": self.alignment, "frechet": self.frechet, "entropy": self.entropy}
        return {name: statistics.median(values) if values else None for name, values in parts.items()}


class Judge:
    """Measures models, and says in words why one is worse than another.

    A model is worse where its alignment loss or its Fréchet distance is; with `agree`, where both are. One alone may
    err: the alignment loss of few images is noisy where the feature groups are wide.
    """

    def __init__(self, reference: Reference | None, num_classes: int, agree: bool = False) -> None:
        self.reference, self.agree = reference, agree
        self._largest_entropy = math.log(max(2, num_classes))

    def measure(self, features: Tensor, logits: Tensor, panels: Sequence[Sequence[int]] | None = None) -> Figures:
        """The figures of a model from its features and logits on validation images; one panel, if not given."""
        panels = [range(len(features))] if panels is None else panels
        if not (torch.isfinite(features).all() and torch.isfinite(logits).all()):
            return Figures((), (), (), 0.0, finite=False)
        alignment, frechet = [], []
        entropies = losses.entropy(logits)
        if self.reference is not None:
            for panel in panels:
                part = features[list(panel)]
                alignment.append(self.reference.alignment(part))
                frechet.append(self.reference.frechet(part))
        entropy = tuple(float(entropies[list(panel)].mean()) for panel in panels)
        shares = torch.bincount(logits.argmax(1), minlength=logits.shape[1]).double() / len(logits)
        classes = float(torch.exp(-(shares * shares.clamp(min=1e-12).log()).sum()))
        finite = all(map(math.isfinite, (*alignment, *frechet, *entropy)))
        return Figures(tuple(alignment), tuple(frechet), entropy, classes, finite)

    def worse(self, ours: Figures, theirs: Figures, than: str) -> str:
        """Why a model is worse than another one on the same panels, in words; empty if it is not."""
        if not ours.finite:
            return "its answers are NaN or infinite"
        if not theirs.finite:
            return ""
        distances = (
            ("alignment loss", ours.alignment, theirs.alignment, WORSE_ALIGNMENT),
            ("Fréchet distance to the source", ours.frechet, theirs.frechet, WORSE_FRECHET),
        )
        larger = [(name, a, log_ratio(a, b)) for name, a, b, limit in distances if a and log_ratio(a, b) > limit]
        if larger and not (self.agree and len(larger) < len(distances)):
            name, a, ratio = larger[0]
            return f"its {name} is {math.exp(ratio):.2f} times that of {than} ({statistics.median(a):.3g})"
        if ours.classes < COLLAPSE * theirs.classes:
            return f"it predicts {ours.classes:.1f} classes where {than} predicts {theirs.classes:.1f}: a collapse"
        rise = statistics.median(a - b for a, b in zip(ours.entropy, theirs.entropy, strict=True))
        if rise > UNSURE * self._largest_entropy:
            return f"its answers have become guesses: entropy {rise:.2f} above that of {than}"
        return ""

    def objection(self, ours: Figures, others: Iterable[tuple[str, Callable[[], Figures]]]) -> str:
        """Why a model is worse than one of the others, which are measured only as far as they are asked; or empty."""
        return next(filter(None, (self.worse(ours, theirs(), than) for than, theirs in others)), "")

    def better(self, ours: Figures, theirs: Figures) -> bool:
        """Whether a model that is not worse is nearer to the source; without statistics it always counts as better."""
        return not ours.alignment or not theirs.alignment or log_ratio(ours.alignment, theirs.alignment) < 0


def log_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the panels of log(ours / theirs)."""
    return statistics.median(math.log((a + 1e-9) / (b + 1e-9)) for a, b in zip(ours, theirs, strict=True))
