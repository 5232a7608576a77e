"""How far a batch is from the source: one object that CAFe, its gate, the server, `bench` and `adapt` share.

The alignment loss of a batch that really comes from the source is not 0: the mean and covariance of a few samples are
noisy, and features are not Gaussian. So, when the statistics are made, batches of several sizes are drawn from source
features, and the largest alignment loss at each size is kept (`calibrate`). That loss times a margin is the threshold
above which a batch no longer looks like the source.

Drift is a figure for people: it is 1 for source images, whatever their number, and grows with the shift of the mean.
The alignment loss would not do: it depends on the size of the batch, and C⁻¹ makes it explode (docs/drift.md).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from cafe_tta.distributed import ALONE, Ranks
from cafe_tta.gaussians import EIGENVALUE_FLOOR, GroupedStatistics, SourceGaussians
from cafe_tta.metrics import FrechetReference

SIZES = (16, 32, 64, 128, 256, 512)  # of the batches that thresholds are measured on
DRAWS = 16  # batches of each size
SAMPLES_PER_DIM = 2.0  # small batches are padded as by CAFe's defaults
MIN_IMAGES = 16  # covariance and threshold are meaningless for fewer
DRIFT_IMAGES = 8  # whose mean drift is told of, however many there are; fewer have none
MARGIN = 1.5
# Times the loss that Gaussian features would have, before a combination of features counts as degenerate.
TOLERATED = 50
ENOUGH = 512  # images: in smaller batches, a feature that is mostly 0 may not vary by chance


class _Statistics(GroupedStatistics, Protocol):
    """What is needed of the source: `SourceStats` has it."""

    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def full_cov(self) -> Tensor | None: ...


class Reference(SourceGaussians):
    """The source's features, to compare batches with: alignment, Fréchet distances and drift.

    `margin`: how far above the largest alignment loss of source batches a batch may be and still look like the source.

    >>> from cafe_tta import FeatureStats
    >>> features = torch.randn(4096, 4, generator=torch.Generator().manual_seed(0))
    >>> reference = Reference(FeatureStats.from_features(features).group())
    >>> round(reference.drift(features[:256]), 1), round(reference.drift(features[:256] + 1), 1)
    (1.0, 3.1)
    """

    def __init__(self, source: _Statistics, eigenvalue_floor: float = EIGENVALUE_FLOOR, margin: float = MARGIN) -> None:
        super().__init__(source, eigenvalue_floor)
        self.margin = margin
        self.sizes = [len(dims) for dims in source.groups]
        self._total_variance = float(sum(cov.trace() for cov in source.covs))
        self._full = None if source.full_cov is None else FrechetReference(source.mean, source.full_cov)
        known = (source.meta.get("alignment") or {}).get("largest") or {}
        points = sorted((int(size), loss) for size, loss in known.items())
        self._log_sizes = [math.log(size) for size, _ in points]
        self._log_losses = [math.log(loss) for _, loss in points]

    # Distances of features (B, D)

    def divergences(self, features: Tensor, ranks: Ranks = ALONE) -> Tensor:
        """The symmetrised KL divergence of each group from the source. (K,)"""
        with torch.no_grad():
            return self.divergence(ranks.moments(self, features), SAMPLES_PER_DIM).values

    def alignment(self, features: Tensor, ranks: Ranks = ALONE) -> float:
        """The alignment loss L_a: the mean divergence of the groups, without gradient (`losses.alignment` has one)."""
        return float(self.divergences(features, ranks).mean())

    def frechet(self, features: Tensor) -> float:
        """The Fréchet distance summed over the groups: what it would be without correlations across groups."""
        with torch.no_grad():
            return self.group_frechet(self.moments(features))

    def full_frechet(self, features: Tensor) -> float | None:
        """The Fréchet distance with the whole covariance; None where the statistics were made without it."""
        if self._full is None:
            return None
        features = features.detach().cpu().double()
        return self._full.distance(features.mean(0), torch.cov(features.T, correction=0).reshape(self._full.cov.shape))

    def dispersion(self, features: Tensor) -> float:
        """The total variance of the features, as a multiple of the source's."""
        return float(features.var(0, correction=0).sum()) / max(self._total_variance, 1e-12)

    # Does a batch look like the source?

    @property
    def calibrated(self) -> bool:
        """Whether the statistics hold thresholds from source batches: see `calibrate`."""
        return bool(self._log_sizes)

    def require_calibration(self) -> None:
        """Raises where the statistics do not say how far source batches are from the source."""
        if not self.calibrated:
            raise ValueError(
                "gate needs to know how source batches look, but these statistics were made without it; "
                "make them again from at least 32 source images with FeatureStats.fit(...).group()"
            )

    def threshold(self, batch: int) -> float:
        """The largest alignment loss at which a batch of this size looks like the source, log-log interpolated."""
        self.require_calibration()
        x = min(max(math.log(batch), self._log_sizes[0]), self._log_sizes[-1])
        points = list(zip(self._log_sizes, self._log_losses, strict=True))
        for (x0, y0), (x1, y1) in pairwise(points):
            if x <= x1:
                return self.margin * math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        return self.margin * math.exp(self._log_losses[-1])

    def looks_like_source(self, features: Tensor) -> bool | None:
        """Whether the alignment loss is below its threshold. None for few images, or uncalibrated."""
        if not self.calibrated or len(features) < MIN_IMAGES:
            return None
        return self.alignment(features) <= self.threshold(len(features))

    def drift(self, features: Tensor, ranks: Ranks = ALONE) -> float | None:
        """How many times as far from the source's mean the mean of 8 such images lies, as that of 8 source images.

        √(1 + 8 s²), s² the squared shift of the mean in standard deviations: 1 is like the source, for any number of
        images. None for fewer than 8.
        """
        with torch.no_grad():
            moments = ranks.moments(self, features)
        if not moments or float(moments[0].count[0]) < DRIFT_IMAGES:
            return None
        return math.sqrt(max(0.0, 1 + DRIFT_IMAGES * self.squared_shift(moments)))


def calibrate(sample: Tensor, source: _Statistics, eigenvalue_floor: float = EIGENVALUE_FLOOR) -> dict[str, Any]:
    """The largest alignment loss among batches of source features, for several batch sizes: metadata of statistics."""
    reference = Reference(source, eigenvalue_floor)
    generator = torch.Generator().manual_seed(0)
    largest = {}
    for size in (size for size in SIZES if 2 * size <= len(sample)):
        draws = (torch.randperm(len(sample), generator=generator)[:size] for _ in range(DRAWS))
        largest[str(size)] = max(reference.alignment(sample[rows]) for rows in draws)
    return {"eigenvalue_floor": eigenvalue_floor, "largest": largest}


def describe_degenerate(alignment: Mapping[str, Any], widths: Sequence[int]) -> str:
    """What is wrong where batches of the source itself are far from the source; empty where they are not.

    A batch of n Gaussian features in a group of d has an expected loss of d (d + 3) / 4n. Far more than that means that
    some combination of features hardly varies: C⁻¹ is huge in that direction.

    >>> describe_degenerate({"largest": {"256": 0.4, "512": 0.2}}, [16, 16])
    ''
    """
    size, found = max(((int(size), loss) for size, loss in alignment["largest"].items()), default=(0, 0.0))
    expected = sum(width * (width + 3) for width in widths) / (4 * max(size, 1) * len(widths))
    if size < ENOUGH or found <= TOLERATED * expected:
        return ""
    return (
        f"source batches of {size} images themselves have an alignment loss of {found:.2g}, where about "
        f"{expected:.2g} is expected: some combination of features hardly varies, and `cafe` would move the model far "
        "to make it vary; use cafe-plus, whose steps are clipped, or give `cafe` a `max_change`"
    )
