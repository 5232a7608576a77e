"""The gate: does a batch look like the source? Then it need not be adapted to.

The alignment loss of a batch that really comes from the source is not 0: a mean and a covariance of few samples are not
exact, and features are not Gaussian. So, when the statistics are made, batches of several sizes are drawn from source
features and their losses noted. A batch whose loss is within that range, with a margin, looks like the source.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cafe_tta.gaussians import GroupedStatistics, SourceGaussians

SIZES = (16, 32, 64, 128, 256, 512)
DRAWS = 16  # batches of each size
SAMPLES_PER_DIM = 2.0  # batches are completed as CAFe's defaults do


def alignment_of_source(sample: Tensor, source: GroupedStatistics, eigenvalue_floor: float) -> dict[str, Any]:
    """Largest alignment loss among source batches, for several batch sizes. Metadata of the statistics."""
    gaussians = SourceGaussians(source, eigenvalue_floor)
    generator = torch.Generator().manual_seed(0)
    largest = {}
    for size in SIZES:
        if 2 * size > len(sample):
            break
        losses = []
        for _ in range(DRAWS):
            rows = torch.randperm(len(sample), generator=generator)[:size]
            losses.append(gaussians.divergence(gaussians.moments(sample[rows]), SAMPLES_PER_DIM).values.mean().item())
        largest[str(size)] = max(losses)
    return {"eigenvalue_floor": eigenvalue_floor, "largest": largest}


class Gate:
    """Open while the stream does not look like the source."""

    def __init__(self, source_alignment: Mapping[str, Any], margin: float) -> None:
        if not source_alignment.get("largest"):
            raise ValueError(
                "gate needs to know how source batches look, but these statistics were made without it; "
                "make them again from at least 32 source images with FeatureStats.fit(...).group()"
            )
        points = sorted((int(size), loss) for size, loss in source_alignment["largest"].items())
        self._sizes = [math.log(size) for size, _ in points]
        self._losses = [math.log(loss) for _, loss in points]
        self.margin = margin

    def threshold(self, batch: int) -> float:
        """The largest loss of a batch of this size that looks like the source: between the sizes that were drawn."""
        x = min(max(math.log(batch), self._sizes[0]), self._sizes[-1])
        for (x0, y0), (x1, y1) in zip(
            zip(self._sizes, self._losses, strict=True),
            zip(self._sizes[1:], self._losses[1:], strict=True),
            strict=False,
        ):
            if x <= x1:
                return self.margin * math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        return self.margin * math.exp(self._losses[-1])
