"""The figure of a simulation: accuracy over time, served and source, overall and by camera."""

from pathlib import Path

from cafe_tta.simulate.summary import Summary, Tally

BLUE, RED = "#0072b2", "#d55e00"


def draw(summary: Summary, path: Path) -> None:
    """Writes the figure; the suffix of the name decides the format."""
    from matplotlib.figure import Figure  # here, not above: only this needs it

    panels = [("all cameras", summary.blocks)]
    for number, camera in enumerate(summary.cameras):
        panels.append((f"{camera.name}: {camera.text}", [row[number] for row in summary.by_block_and_camera]))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.3 * rows + 0.4), layout="constrained")
    middles = [sum(summary.span(block)) / 2 for block in range(len(summary.blocks))]
    for index, (title, tallies) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, index)
        axes.plot(middles, _values([t.source_accuracy for t in tallies]), color=RED, ls=":", marker="s", ms=3)
        axes.plot(middles, _values([t.served_accuracy for t in tallies]), color=BLUE, marker="o", ms=3)
        axes.set_title(_plain(title, tallies), fontsize=9)
        axes.set_ylim(0, 102)
        axes.set_xlim(0, summary.duration)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    figure.axes[0].legend(["source model", "served"], fontsize=8, loc="lower right")
    figure.supxlabel("seconds", fontsize=9)
    figure.supylabel("accuracy %", fontsize=9)
    figure.savefig(path, dpi=110)


def _values(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _plain(title: str, tallies: list[Tally]) -> str:
    images = sum(tally.images for tally in tallies)
    return f"{title} ({images} images)"
