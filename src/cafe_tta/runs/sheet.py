"""The clusters at the end of a run that unmixed: which images belong to each, as a table and as a contact sheet."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cafe_tta import data
from cafe_tta.adapter import Adapter
from cafe_tta.data import ImageSet, Labels
from cafe_tta.data.imageset import Images
from cafe_tta.data.tiles import EMPTY, FAINT, GAP, INK, MARGIN, PAPER, font, png, tile, tile_side

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

COLUMNS, ROWS = 12, 16  # images of a cluster, and clusters, that are drawn
HEADING, LABEL, BAR = 56, 190, 6  # pixels: height of the heading, width of the labels, height of their bars
SHADE = (0, 114, 178)
NONE = 0  # the number of images that are far from every cluster


@dataclass(frozen=True)
class Clusters:
    """The cluster of every image: 1 is the largest, 0 is none."""

    indices: Labels  # (N,) of the images, in ascending order; those that cannot be read are left out
    numbers: Labels  # (N,)

    @staticmethod
    def of(adapter: Adapter, loader: data.Loader) -> "Clusters":
        """Assigns the images of a loader to the clusters as they are now. Nothing adapts."""
        assert adapter.clusters is not None
        weight = adapter.classifier.head.weight
        indices, members = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for batch in loader.batches():
            adapter.clusters.look(batch.images.to(weight), update=False)
            indices.append(batch.indices)
            members.append(adapter.clusters.numbers.numpy())
        order = np.argsort(np.concatenate(indices))
        return Clusters(np.concatenate(indices)[order], _by_size(np.concatenate(members)[order]))

    @property
    def sizes(self) -> list[int]:
        """Images of every cluster, the largest first."""
        return np.bincount(self.numbers)[NONE + 1 :].tolist()

    def sheet(self, imageset: ImageSet, title: str, seed: int = 0) -> bytes:
        """A PNG file with one row a cluster: some of its images, drawn at random, beside its size."""
        from PIL import Image, ImageDraw

        numbers = [*range(1, len(self.sizes) + 1)][:ROWS] + ([NONE] if (self.numbers == NONE).any() else [])
        rows = {number: _some(self.indices[self.numbers == number], seed) for number in numbers}
        side = tile_side(_read(imageset, int(self.indices[0])))
        rest = len(self.sizes) - ROWS
        width = 2 * MARGIN + LABEL + COLUMNS * (side + GAP) - GAP
        height = 2 * MARGIN + HEADING + len(rows) * (side + 4 * GAP) + (HEADING // 2 if rest > 0 else 0)
        sheet = Image.new("RGB", (width, height), PAPER)
        draw = ImageDraw.Draw(sheet)
        draw.text((MARGIN, MARGIN), title, INK, font(20), "lt")
        subtitle = "clusters of images that are corrupted alike, found without labels; a few images of each, at random"
        draw.text((MARGIN, MARGIN + 26), subtitle, FAINT, font(13), "lt")
        for line, (number, indices) in enumerate(rows.items()):
            top = MARGIN + HEADING + line * (side + 4 * GAP)
            self._label(draw, number, top + side // 2)
            for column, index in enumerate(indices):
                left = MARGIN + LABEL + column * (side + GAP)
                draw.rectangle((left - 1, top - 1, left + side, top + side), EMPTY)  # an edge for white images
                sheet.paste(tile(_read(imageset, index), side), (left, top))
        if rest > 0:
            share = _percent(sum(self.sizes[ROWS:]) / len(self.numbers))
            text = f"and {rest} smaller {'cluster' if rest == 1 else 'clusters'} with {share} of the images"
            draw.text((MARGIN, height - MARGIN), text, FAINT, font(13), "lb")
        return png(sheet)

    def _label(self, draw: "ImageDraw", number: int, middle: int) -> None:
        """Number, size and share of a cluster, and a bar as long as the share."""
        count = int((self.numbers == number).sum())
        share, room = count / len(self.numbers), LABEL - 24
        draw.text((MARGIN, middle - 8), f"cluster {number}" if number else "in no cluster", INK, font(17), "ls")
        images = f"{count:,} {'image' if count == 1 else 'images'}, {_percent(share)}"
        draw.text((MARGIN, middle - 2), images, FAINT, font(13), "lt")
        for length, shade in ((room, EMPTY), (max(1, round(share * room)), SHADE)):
            draw.rectangle((MARGIN, middle + 18, MARGIN + length, middle + 18 + BAR), shade)


def _by_size(members: Labels) -> Labels:
    """Numbers from 1 for clusters in the order of their sizes; equally large ones keep their order. 0 for none."""
    slots, counts = np.unique(members[members >= 0], return_counts=True)
    ranked = {int(slot): rank for rank, slot in enumerate(slots[np.argsort(-counts, kind="stable")], start=1)}
    return np.array([ranked.get(int(member), NONE) for member in members], dtype=np.int64)


def _some(indices: Labels, seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(indices)[:COLUMNS].tolist()


def _percent(share: float) -> str:
    """A share in words.

    >>> _percent(0.274), _percent(0.0002)
    ('27.4%', 'under 0.1%')
    """
    return f"{share:.1%}" if share >= 0.001 else "under 0.1%"


def _read(imageset: ImageSet, index: int) -> Images:
    image: Images = imageset.images([index])[0]
    return image
