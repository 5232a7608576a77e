"""How every figure looks: colours, markers, sizes, files. Readable in print and by colour-blind readers."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cafe_tta.bench.report.columns import Row
from cafe_tta.methods import METHODS

BLUE, VERMILION, GREY, BLACK = "#0072B2", "#D55E00", "#8A8A8A", "#000000"
# Okabe and Ito's palette; its yellow is darker, for white paper.
COLOURS = ("#56B4E9", "#009E73", "#CC79A7", BLUE, "#C9B400", "#E69F00", VERMILION)
_FAMILY_MARKERS = "osD^vh*"  # of the first member of each family, so that colour is never the only difference
_MEMBER_MARKERS = "PXpdhH8*"
_RC: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "path",
    "svg.hashsalt": "cafe-tta",  # the same records give the same file
}


@dataclass(frozen=True)
class Drawing:
    """A finished figure in three formats."""

    name: str
    title: str
    caption: str
    width: float  # inches
    png: bytes
    pdf: bytes
    svg: bytes


@dataclass(frozen=True)
class Style:
    """How a method looks, in every figure of a report."""

    colour: str
    marker: str
    size: float
    line: Any
    filled: bool

    def point(self) -> dict[str, Any]:
        """Options for a marker."""
        face = self.colour if self.filled else "white"
        edge = "0.15" if self.filled else self.colour
        width = 0.5 if self.filled else 1.3
        return {
            "marker": self.marker,
            "markersize": self.size,
            "markerfacecolor": face,
            "markeredgecolor": edge,
            "markeredgewidth": width,
            "color": self.colour,
        }


def styles(rows: Sequence[Row]) -> dict[str, Style]:
    """A style for each label. Variants of a method (`name`, `name-variant`) share its colour.

    The method that does not adapt, the first of `METHODS`, is grey; methods that need source data are black and hollow.
    """
    baseline = next(iter(METHODS))
    ranked = [row for row in rows if row.method != baseline and not row.is_reference]
    families: dict[str, list[Row]] = {}
    for row in ranked:
        families.setdefault(row.method.partition("-")[0], []).append(row)
    found = {}
    for number, (family, members) in enumerate(families.items()):
        colour = COLOURS[number % len(COLOURS)]
        variants = [row for row in members if row.label != family]
        for row in members:
            if row.label == family:
                marker = _FAMILY_MARKERS[number % len(_FAMILY_MARKERS)]
                found[row.label] = Style(colour, marker, 10.0 if marker == "*" else 6.0, "-", True)
            else:
                place = variants.index(row)
                marker = _MEMBER_MARKERS[place % len(_MEMBER_MARKERS)]
                found[row.label] = Style(colour, marker, 6.5, ("--", ":", "-.")[place % 3], False)
    for row in rows:
        if row.method == baseline:
            found[row.label] = Style(GREY, "o", 6.0, "-", True)
        elif row.is_reference:
            found[row.label] = Style(BLACK, "s", 5.5, "--", False)
    return {row.label: found[row.label] for row in rows}


def draw(
    name: str, title: str, caption: str, size: tuple[float, float], paint: Callable[[Any], None], dpi: int = 180
) -> Drawing:
    """Lets `paint` fill a figure of `size` inches, and keeps it as PNG, PDF and SVG."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window, no state that outlives the figure

    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the layout is found: not again for every format
        return Drawing(
            name,
            title,
            caption,
            size[0],
            _saved(figure, "png", dpi, {"Software": None}),
            _saved(figure, "pdf", dpi, {"CreationDate": None, "Creator": None, "Producer": None}),
            _saved(figure, "svg", dpi, {"Date": None, "Creator": None}),
        )


def add_legend(
    figure: Any, rows: Sequence[Row], styled: dict[str, Style], lines: bool = False, extra: Any = ()
) -> None:
    """One legend for all the panels, beside them."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [], [], linestyle=styled[row.label].line if lines else "none", label=row.label, **styled[row.label].point()
        )
        for row in rows
    ]
    figure.legend(handles=[*handles, *extra], loc="outside right upper", handlelength=2.6 if lines else 1.2)


def layout(panels: int, most: int) -> tuple[int, int]:
    """Panels in a row, at most so many, and rows: as few empty places as can be.

    >>> layout(9, 4), layout(4, 3), layout(7, 4), layout(2, 4)
    ((3, 3), (2, 2), (4, 2), (2, 1))
    """
    across = min(range(1, most + 1), key=lambda width: (-panels % width + (width == 1) * (panels > 1), -width))
    across = min(across, panels)
    return across, -(-panels // across)


def grid(figure: Any, panels: int, most: int, *, sharey: bool = False) -> list[Any]:
    """Axes for the panels, at most so many in a row."""
    across, down = layout(panels, most)
    axes = figure.subplots(down, across, squeeze=False, sharey=sharey).flatten()
    for spare in axes[panels:]:
        spare.set_visible(False)
    return list(axes[:panels])


def _saved(figure: Any, kind: str, dpi: int, metadata: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()
