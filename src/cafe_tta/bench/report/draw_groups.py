"""Figures of feature grouping: accuracy against k, and the sizes of the groups beside the size of a batch."""

import math
from collections.abc import Sequence
from typing import Any

from cafe_tta.bench import paper
from cafe_tta.bench.report.columns import natural
from cafe_tta.bench.report.drawing import BLUE, VERMILION, Drawing, draw, grid, layout
from cafe_tta.bench.report.records import Record
from cafe_tta.bench.report.sweep import sweeps


def draw_sweep(records: Sequence[Record], with_paper: bool) -> list[Drawing]:
    """Accuracy against the number of groups."""
    made = sweeps(records)
    if not made:
        return []

    def paint(figure: Any) -> None:
        for axes, (column, points) in zip(grid(figure, len(made), 3), made, strict=True):
            ks = sorted({point.num_groups for point in points})
            for number, method in enumerate(dict.fromkeys(point.row.method for point in points)):
                own = [point for point in points if point.row.method == method]
                means = [point.accuracy.mean for point in own]
                spreads = [point.accuracy.std or 0 for point in own]
                colour = (VERMILION, BLUE)[number % 2]
                numbers = [point.num_groups for point in own]
                axes.errorbar(numbers, means, spreads, fmt="o-", color=colour, capsize=3, ms=5, label=f"{method}, ours")
                if with_paper:
                    _paint_published(axes, [(p.num_groups, p.published) for p in own])
            axes.set_xscale("log", base=2)
            axes.set_xticks(ks, [str(k) for k in ks])
            axes.set_xticks([], minor=True)
            axes.set_title(f"{column.name}, {column.mode}")
            axes.set_xlabel("number of groups k")
            axes.set_ylabel("accuracy [%]")
            axes.margins(y=0.15)
            bottom, top = axes.get_ylim()
            axes.set_ylim(bottom=max(-0.04 * top, bottom))  # little below 0, where no accuracy is
            axes.legend(loc="best")

    across, down = layout(len(made), 3)
    caption = "Mean and standard deviation over seeds."
    if with_paper and any(point.published for _, points in made for point in points):
        caption += " N/A: the paper's CAFe did not work."
    return [draw("groups", "Accuracy against the number of groups", caption, (0.4 + 3.4 * across, 2.9 * down), paint)]


def _paint_published(axes: Any, values: list[tuple[int, paper.Published]]) -> None:
    known = [(k, value) for k, value in values if isinstance(value, paper.Accuracy)]
    if known:
        ks, means, spreads = [k for k, _ in known], [v.mean for _, v in known], [v.std or 0 for _, v in known]
        look = {"color": "0.45", "mfc": "white", "capsize": 3, "ms": 5}
        axes.errorbar(ks, means, spreads, fmt="D--", label="the paper's", zorder=1, **look)
    failed = [k for k, value in values if value == paper.NOT_AVAILABLE]
    if failed:
        place = axes.get_xaxis_transform()  # k along the axis, height in shares of the panel
        axes.plot(
            failed,
            [0.03] * len(failed),
            "x",
            color="0.45",
            ms=6,
            transform=place,
            clip_on=False,
            label="the paper's N/A",
        )


def draw_group_sizes(records: Sequence[Record]) -> list[Drawing]:
    """For each data set: the sizes of the groups, sorted, for each k; a dashed line at the size of a batch."""
    found: dict[str, dict[tuple[int, int | None], list[int]]] = {}
    batches: dict[str, set[int]] = {}
    swept = {record.dataset for record in records if record.scope in ("groups", "group-sizes")}
    for record in records:
        sizes, k = record.source.get("group_sizes"), record.num_groups
        wanted = record.scope in ("groups", "group-sizes") or record.dataset not in swept
        if sizes and k is not None and wanted:
            key = (k, record.source.get("max_group_size"))
            found.setdefault(record.dataset, {})[key] = sorted(sizes, reverse=True)
            if record.needs == "stats" and isinstance(record.config.get("batch_size"), int):
                batches.setdefault(record.dataset, set()).add(record.config["batch_size"])
    return [_sizes(dataset, found[dataset], sorted(batches.get(dataset, ()))) for dataset in sorted(found, key=natural)]


def _sizes(dataset: str, by_k: dict[tuple[int, int | None], list[int]], batches: list[int]) -> Drawing:
    keys = sorted(by_k, key=lambda key: (key[0], key[1] or 0))
    across, down = layout(len(keys), 4)
    tallest = max(max(sizes) for sizes in by_k.values())

    def paint(figure: Any) -> None:
        for number, (axes, key) in enumerate(zip(grid(figure, len(keys), 4, sharey=True), keys, strict=True)):
            sizes = by_k[key]
            wide = sum(size >= min(batches, default=math.inf) for size in sizes)
            for part, start, colour in ((sizes[:wide], 0, VERMILION), (sizes[wide:], wide, BLUE)):
                edges = [start + place + 0.5 for place in range(len(part) + 1)]
                if part:
                    axes.stairs(part, edges, baseline=None, color=colour, lw=2)
            for batch in batches:
                axes.axhline(batch, color="black", ls="--", lw=1)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_ylim(0.8, 1.6 * max([tallest, *batches]))
            axes.set_xlim(0.5, len(sizes) + 0.5)
            limit = "" if key[1] is None else f" (limit {key[1]})"
            axes.set_title(f"k = {key[0]}: largest {sizes[0]}{limit}")
            axes.grid(axis="x", visible=False)
            axes.xaxis.get_major_locator().set_params(integer=True)
            if number % across == 0:
                axes.set_ylabel("dimensions")
            if number + across >= len(keys):
                axes.set_xlabel("group, largest first")

    batch = f" Dashed: the batch, {' or '.join(map(str, batches))} images." if batches else ""
    caption = f"Groups as wide as the batch or wider, whose covariance in a batch is singular, are orange.{batch}"
    size = (0.6 + 2.2 * across + (1.2 if across == 1 else 0), 1.75 * down + 0.5)
    return draw(f"group-sizes-{dataset}", f"Sizes of the feature groups: {dataset}", caption, size, paint)
