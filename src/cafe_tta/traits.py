"""What a method is like beyond its options, declared once; tests/test_traits.py measures what can be measured."""

from dataclasses import dataclass

LAYERS = ("BatchNorm", "LayerNorm", "GroupNorm")
NORM = "weight and bias of the normalisation layers"


@dataclass(frozen=True)
class Traits:
    """What a method moves, costs, remembers and needs to learn from.

    >>> Traits("BatchNorm weight and bias").passes
    '1 / 1'
    """

    moves: str
    forward: tuple[int, int] = (1, 1)  # least and most passes over the images of a batch, its answers included
    backward: tuple[int, int] = (1, 1)
    # The fewest images that it learns from, in classifiers with each of LAYERS: fewer are answered without a step.
    # None: such classifiers are refused.
    smallest: tuple[int | None, int | None, int | None] = (2, 1, 1)
    keeps: str = "nothing"  # of the stream, beside what moves, its optimiser and BatchNorm's running statistics
    licence: str = ""  # of the authors' code, where it was looked up; ours is written from the formulas

    @property
    def passes(self) -> str:
        """Forward and backward passes a batch, in words: `1-2 / 1`."""
        return f"{_span(self.forward)} / {_span(self.backward)}"

    @property
    def batches(self) -> tuple[str, ...]:
        """The fewest images to learn from, for each of LAYERS."""
        return tuple("–" if images is None else str(images) for images in self.smallest)


def _span(bounds: tuple[int, int]) -> str:
    least, most = bounds
    return str(least) if least == most else f"{least}-{most}"
