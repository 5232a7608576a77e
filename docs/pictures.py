"""Draws the pictures of the docs: python docs/pictures.py [digits] [results] (both by default; one minute on one core).

`digits`: the pictures of the start pages. Every point and every number is measured: 896 test digits, each with one of
the 15 corruptions at severity 5. `results`: those at the head of docs/results.md, from the records under docs/results/.
"""

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Ellipse
from torch import Tensor

import cafe_tta as cafe
from cafe_tta import corruptions, data
from cafe_tta.bench.embedded import Embedded, embedded_digits
from cafe_tta.bench.report.columns import Column, accuracy, by_corruption, corruptions_of, estimates, rows

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
from tables import RIVALS, column  # noqa: E402 - beside this script

GREY, RED, BLUE = "#7a8288", "#d1495b", "#00798c"
BATCH, PASSES = 128, 4
SHOWN = ("contrast", "fog", "gaussian_noise", "glass_blur", "brightness")  # rows of the picture of unmixing
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}


@dataclass(frozen=True)
class Stream:
    """Test digits with mixed corruptions, in a random order, and what is known of the model that sees them."""

    embedded: Embedded
    clean: np.ndarray  # uint8 (N, H, W, 3)
    pixels: np.ndarray  # the same, corrupted
    kinds: np.ndarray  # index of the corruption
    labels: np.ndarray

    @classmethod
    def make(cls, seed: int = 0) -> "Stream":
        digits = data.load("digits:test")
        random = np.random.default_rng(seed)
        order = random.permutation(len(digits))
        clean = digits.images(order)
        kinds = random.integers(0, len(corruptions.NAMES), len(digits))
        pixels = np.empty_like(clean)
        for kind, name in enumerate(corruptions.NAMES):
            pixels[kinds == kind] = corruptions.corrupt(clean[kinds == kind], name, severity=5, seed=seed)
        return cls(embedded_digits(), clean, pixels, kinds, digits.labels[order])

    @cached_property
    def images(self) -> Tensor:
        return self.embedded.model.preprocessing(self.pixels)

    @cached_property
    def source_images(self) -> Tensor:
        digits = data.load("digits:train")
        return self.embedded.model.preprocessing(digits.images(np.arange(len(digits))))

    def answers(self, method: str) -> np.ndarray:
        """The classes that a method answers, batch by batch, as the images come."""
        adapter = cafe.create(method, self.embedded.classifier, self.embedded.stats)
        return torch.cat([adapter(batch).argmax(1) for batch in self.images.split(BATCH)]).numpy()

    def accuracy(self, answers: np.ndarray) -> float:
        return 100 * float((answers == self.labels).mean())

    @torch.no_grad()
    def features(self, classifier: cafe.SplitClassifier, images: Tensor) -> np.ndarray:
        return classifier.backbone(images).double().numpy()

    def adapted(self, method: str) -> cafe.SplitClassifier:
        """The model after a few passes over the stream, as an ordinary classifier."""
        adapter = cafe.create(method, self.embedded.classifier, self.embedded.stats)
        for _ in range(PASSES):
            for batch in self.images.split(BATCH):
                adapter(batch)
        return cafe.split_classifier(adapter.export().eval())


@dataclass(frozen=True)
class Plane:
    """Two directions in one whitened group of features: those in which the corrupted images differ most."""

    mean: np.ndarray
    directions: np.ndarray  # (d, 2), of features minus the source's mean
    dims: np.ndarray

    @classmethod
    def of_group(cls, stats: cafe.SourceStats, group: int, shifted: np.ndarray) -> "Plane":
        dims = stats.groups[group].numpy()
        mean, cov = stats.mean.double().numpy()[dims], stats.covs[group].double().numpy()
        values, vectors = np.linalg.eigh(cov)
        whiten = vectors / np.sqrt(np.maximum(values, 1e-3))
        white = (shifted[:, dims] - mean) @ whiten
        _, _, axes = np.linalg.svd(white, full_matrices=False)
        return cls(mean, whiten @ axes[:2].T, dims)

    def project(self, features: np.ndarray) -> np.ndarray:
        return (features[:, self.dims] - self.mean) @ self.directions


def draw_cloud(axes: Axes, points: np.ndarray, colour: str, alpha: float) -> None:
    """Points, and the ellipse of two standard deviations around their mean."""
    axes.scatter(*points.T, s=5, color=colour, alpha=alpha, linewidths=0, rasterized=True)
    values, vectors = np.linalg.eigh(np.cov(points.T))
    angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
    width, height = 4 * np.sqrt(values[::-1])
    axes.add_patch(Ellipse(points.mean(0), width, height, angle=angle, fill=False, color=colour, lw=1.8))
    axes.plot(*points.mean(0), "+", color=colour, ms=9, mew=1.8)


def draw_features(axes: list[Axes], stream: Stream) -> None:
    """What CAFe does: one group of features before and after adapting, beside the source's."""
    classifier, stats = stream.embedded.classifier, stream.embedded.stats
    before = stream.features(classifier, stream.images)
    reference = cafe.Reference(stats)
    group = int(torch.as_tensor(reference.divergences(torch.as_tensor(before))).argmax())
    plane = Plane.of_group(stats, group, before)
    source = plane.project(stream.features(classifier, stream.source_images))
    after = plane.project(stream.features(stream.adapted("cafe"), stream.images))
    shown = np.concatenate([source, plane.project(before), after])
    low, high = np.quantile(shown, 0.005, axis=0), np.quantile(shown, 0.995, axis=0)
    margin = np.array([0.2, 0.12]) * (high - low)
    for panel, points, colour, words in (
        (axes[0], plane.project(before), RED, "corrupted images (red), the model as trained"),
        (axes[1], after, BLUE, "the same images (blue), after CAFe"),
    ):
        draw_cloud(panel, source, GREY, 0.35)
        draw_cloud(panel, points, colour, 0.5)
        panel.set(xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
        panel.set(xticks=[], yticks=[], xlabel="one group of features; training images in grey")
        panel.set_title(words, loc="left", fontsize=9)


def draw_answers(axes: Axes, stream: Stream, columns: int = 10) -> None:
    """Images that the model gets wrong and the adapted one right, one for each of as many corruptions."""
    before, after = stream.answers("source"), stream.answers("cafe-plus")
    mended = np.flatnonzero((before != stream.labels) & (after == stream.labels))
    _, first = np.unique(stream.kinds[mended], return_index=True)
    chosen = mended[np.sort(first)][:columns]
    tiles = [np.pad(stream.pixels[index], ((0, 0), (2, 2), (0, 0)), constant_values=255) for index in chosen]
    axes.imshow(np.concatenate(tiles, axis=1))
    axes.axis("off")
    for place, index in enumerate(chosen):
        middle, name = 36 * place + 17.5, corruptions.NAMES[stream.kinds[index]].replace("_", "\n")
        axes.text(middle, -3, name, ha="center", va="bottom", fontsize=7)
        axes.text(middle - 7, 39, f"{before[index]} ✗", ha="center", va="center", color=RED, fontsize=10)
        axes.text(middle + 8, 39, f"{after[index]} ✓", ha="center", va="center", color=BLUE, fontsize=10)
    rates = f"{stream.accuracy(before):.1f} % without and {stream.accuracy(after):.1f} % with adapting"
    words = f"✗ the model as trained   ✓ cafe-plus      right answers, all 896 images: {rates}"
    axes.text(36 * len(chosen) / 2, 50, words, fontsize=9, ha="center", va="center")


@torch.no_grad()
def channel_means(stream: Stream, images: Tensor, channel: int | None = None) -> tuple[np.ndarray, int]:
    """The mean input of one channel of the first BatchNorm layer, for each image; by default the most shifted one."""
    backbone = stream.embedded.classifier.backbone
    layer = next(module for module in backbone.modules() if isinstance(module, torch.nn.BatchNorm2d))
    caught: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    backbone(images)
    hook.remove()
    means = caught[0].mean((2, 3))
    if channel is None:
        kinds = torch.as_tensor(stream.kinds)
        by_kind = torch.stack([means[kinds == kind].mean(0) for kind in range(len(corruptions.NAMES))])
        channel = int((by_kind.var(0) / means.var(0)).argmax())
    return means[:, channel].numpy(), channel


def found_clusters(stream: Stream) -> np.ndarray:
    """The cluster that unmixing has put each image into, once it has seen all of them."""
    adapter = cafe.create("unmix", stream.embedded.classifier, stream.embedded.stats)
    for batch in stream.images.split(BATCH):
        adapter(batch)
    assert adapter.clusters is not None
    adapter.clusters.look(stream.images, update=False)
    return adapter.clusters.numbers.numpy()


def draw_unmixing(axes: list[Axes], stream: Stream) -> None:
    """What unmixing does: one channel's mean, image by image, with the mean that each image is normalised with."""
    means, channel = channel_means(stream, stream.images)
    source, _ = channel_means(stream, stream.source_images, channel)
    clusters = found_clusters(stream)
    rows = [np.flatnonzero(stream.kinds == corruptions.NAMES.index(name)) for name in SHOWN]
    random = np.random.default_rng(0)
    titles = ("BatchNorm with the batch: one mean for all", "unmixing: a mean for each cluster")
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, loc="left", fontsize=9)
        panel.set(yticks=range(len(rows) + 1), yticklabels=["training images", *(n.replace("_", " ") for n in SHOWN)])
        panel.set(xticks=[], ylim=(len(rows) + 0.6, -0.6), xlabel=f"mean of channel {channel}, one point an image")
        panel.plot([source.mean()] * 2, [-0.4, 0.4], color="black", lw=2)
        for row, values in enumerate([source, *(means[images] for images in rows)]):
            height = row + random.uniform(-0.25, 0.25, len(values))
            panel.scatter(values, height, s=4, color=RED if row else GREY, alpha=0.5, linewidths=0, rasterized=True)
    axes[0].plot([means.mean()] * 2, [0.6, len(rows) + 0.4], color=BLUE, lw=2)
    for row, images in enumerate(rows, start=1):
        for cluster in np.unique(clusters[images]):
            share = float((clusters[images] == cluster).mean())
            mean = means[clusters == cluster].mean() if cluster >= 0 else source.mean()
            axes[1].plot([mean] * 2, [row - 0.4, row + 0.4], color=BLUE, lw=2.2, alpha=share)


PAPER = ("cafe", "cafe-dimwise", "cafe-no-infomax")
OURS = ("unmix", "cafe-plus", "tent(normalisation=unmix)", "roid(normalisation=unmix)")
LEFT = 58.0  # where the axis of accuracies begins


def draw_methods(axes: Axes, made: Column) -> None:
    """Every method on one stream, the best at the top; rows that are far below are named at the left edge."""
    found, _ = estimates(made, rows(made.records), accuracy)
    order = sorted(found, key=lambda label: found[label].mean)
    for height, label in enumerate(order):
        value = found[label]
        colour = RED if label in OURS else BLUE if label in PAPER else GREY
        if value.mean < LEFT:
            axes.annotate(f"◂ {value.mean:.1f} %", (LEFT, height), (2, 0), textcoords="offset points", va="center")
            continue
        axes.errorbar(value.mean, height, xerr=value.std, fmt="o", ms=5, capsize=2.5, lw=1, color=colour)
    axes.axvline(found["source"].mean, color="black", lw=0.8, ls=":")
    axes.set_yticks(range(len(order)), order)
    for tick, label in zip(axes.get_yticklabels(), order, strict=True):
        tick.set_color(RED if label in OURS else BLUE if label in PAPER else "black")
    axes.set(xlim=(LEFT, None), ylim=(-0.7, len(order) - 0.3))
    axes.set_xlabel("accuracy %, mean ± standard deviation of three seeds; dotted: the model as trained")
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    for height, (words, colour) in enumerate((("unmixing (ours)", RED), ("CAFe (the paper)", BLUE), ("others", GREY))):
        place = {"xycoords": "axes fraction", "ha": "right", "color": colour, "fontweight": "bold"}
        axes.annotate(words, (0.98, 0.3 - 0.045 * height), **place)


def draw_corruptions(axes: Axes, made: Column) -> None:
    """The model, CAFe and `cafe-plus` on each corruption of the same stream, from hard to easy."""
    shown = (("source", "s", GREY, "the model"), ("cafe", "o", BLUE, "cafe"), ("cafe-plus", "D", RED, "cafe-plus"))
    values = {label: by_corruption(made.of(label)) for label, *_ in shown}
    names = sorted(corruptions_of(made), key=lambda name: values["source"][name].mean)
    for place, name in enumerate(names):
        means = [values[label][name].mean for label, *_ in shown]
        axes.plot([place, place], [min(means), max(means)], color="0.75", lw=1.5, zorder=1)
    for label, marker, colour, words in shown:
        means = [values[label][name].mean for name in names]
        axes.plot(range(len(names)), means, marker, ms=7, color=colour, label=words)
    axes.set_xticks(range(len(names)), [name.replace("_", " ") for name in names], rotation=35, ha="right")
    axes.set_ylabel("accuracy %, mean of three seeds")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower right")


def draw_results() -> None:
    made = column(*RIVALS)
    figure, axes = plt.subplots(figsize=(8, 6.2), layout="constrained")
    draw_methods(axes, made)
    figure.savefig(FOLDER / "results-methods.png", dpi=140)
    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    draw_corruptions(axes, made)
    figure.savefig(FOLDER / "results-corruptions.png", dpi=140)


def draw_digits() -> None:
    stream = Stream.make()
    figure = plt.figure(figsize=(9, 5.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 2])
    draw_answers(top.subplots(), stream)
    draw_features(list(bottom.subplots(1, 2)), stream)
    figure.savefig(FOLDER / "cafe.png", dpi=140)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    draw_unmixing(list(axes), stream)
    figure.savefig(FOLDER / "unmixing.png", dpi=140)


def main() -> None:
    chosen = sys.argv[1:] or ["digits", "results"]
    with plt.rc_context(STYLE):
        if "digits" in chosen:
            draw_digits()
        if "results" in chosen:
            draw_results()


if __name__ == "__main__":
    main()
