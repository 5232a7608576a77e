"""Can one bad camera drag the others down? The same server with and without its judge. Prints a table, draws a figure.

    python benchmarks/guard.py                                # some minutes on one core
    python benchmarks/guard.py --rounds 40 --kinds black      # a quick look
    python benchmarks/guard.py --dataset cifar10 --weights W.safetensors --model FOLDER    # another model, other images

The embedded digits model (or another) serves good cameras, each with weather of its own, and one bad camera, which
sends eight times as many images as a good one. It begins after a quarter of the rounds; in the third quarter the good
cameras are silent (a night, much longer than the days), and only the bad one's images come in; in the last quarter they
are back. The service never sees a label; labels score its answers here, and where a camera is silent, the answers it
would get.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import cafe_tta as cafe
from cafe_tta import corruptions, data
from cafe_tta.bench.experiments import DATASETS, Dataset
from cafe_tta.bench.source_side import SourceSide, SourceSideOptions
from cafe_tta.serve import Service, Settings

GOOD = ("clean", "motion_blur", "snow", "frost", "brightness", "fog")
EACH, FLOOD, NIGHT = (
    16,
    8,
    32,
)  # images a round of a good camera; how many times as many the bad one sends, and at night
BAD = "bad"


class World:
    """The cameras' images, preprocessed, and their labels."""

    def __init__(self, base: Dataset, folder: Path, options: SourceSideOptions, limit: int) -> None:
        self.side = SourceSide(base, folder, options, say=print)
        self.stats = self.side.grouped()
        images = data.load(base.data)
        chosen = list(range(min(limit, len(images))))
        self.preset = base.corruption_preset
        self.clean = images.images(chosen)  # (N, H, W, 3)
        self.labels = torch.from_numpy(np.asarray(images.labels)[chosen])
        self.images = {name: self.prepare(self.weather(name)) for name in GOOD}

    def weather(self, name: str) -> np.ndarray:
        if name == "clean":
            return self.clean
        return corruptions.corrupt(self.clean, name, severity=5, seed=0, preset=self.preset)

    def prepare(self, pixels: np.ndarray) -> Tensor:
        return self.side.preprocessing(pixels)


def bad_images(world: World, random: np.random.Generator) -> dict[str, Callable[[int], Tensor]]:
    """What the bad camera sends: `count` images of a kind."""
    shape = world.clean.shape[1:]
    ones = world.prepare(world.clean[world.labels.numpy() == 3])
    few = world.images["snow"][:3]

    def one_class(count: int) -> Tensor:
        """Images of class 3, moved and lit a little differently each time."""
        chosen = ones[torch.from_numpy(random.integers(0, len(ones), count))]
        moved = [image.roll(tuple(random.integers(-2, 3, 2)), (1, 2)) for image in chosen]
        return torch.stack(moved) * torch.from_numpy(random.uniform(0.8, 1.2, (count, 1, 1, 1))).float()

    def mosaic(count: int) -> Tensor:
        """Random colours in blocks of random size: no two images are alike."""
        side = random.choice([1, 2, 4, 8, 16], count)
        pixels = [random.integers(0, 256, (shape[0] // s, shape[1] // s, 3)) for s in side]
        large = [np.kron(p, np.ones((s, s, 1))) for p, s in zip(pixels, side, strict=True)]
        return world.prepare(np.stack(large).astype(np.uint8))

    def repeated(count: int) -> Tensor:
        """Three images again and again, each time with a little noise, so that no two are the same."""
        chosen = few[torch.from_numpy(random.integers(0, len(few), count))]
        return chosen + 0.05 * torch.from_numpy(random.standard_normal(tuple(chosen.shape))).float()

    return {
        "none": lambda count: torch.empty(0, 3, *shape[:2]),
        "noise": lambda count: world.prepare(random.integers(0, 256, (count, *shape), dtype=np.uint8)),
        "mosaics": mosaic,
        "black": lambda count: world.prepare(np.zeros((count, *shape), dtype=np.uint8)),
        "one class": one_class,
        "repeated": repeated,
    }


def play(world: World, kind: str, judge: bool, rounds: int, seed: int) -> tuple[np.ndarray, dict[str, object]]:
    """Accuracy of the answers that each good camera got in each round, and what the service did."""
    random = np.random.default_rng(seed)
    make_bad = bad_images(world, random)[kind]
    adapter = cafe.create("cafe", world.side.classifier, world.stats)
    service = Service(adapter, Settings(judge=judge, adapt_share=1.0, seed=seed), world.stats)
    service.start()
    accuracy = np.zeros((rounds, len(GOOD)))
    try:
        for number in range(rounds):
            quarter = 4 * number // rounds
            for column, camera in enumerate(GOOD):
                chosen = random.integers(0, len(world.labels), EACH)
                images, night = world.images[camera][chosen], quarter == 2
                # At night the camera is silent: only its answers are looked at, as if somebody asked without adapting.
                answers = service.answer(images, [camera] * EACH, [not night] * EACH)
                accuracy[number, column] = cafe.metrics.accuracy(answers.logits, world.labels[chosen])
            if kind != "none" and quarter > 0:
                count = EACH * (NIGHT if quarter == 2 else FLOOD)
                service.answer(make_bad(count), [BAD] * count, [True] * count)
            service.settle()
        status = service.status()
    finally:
        service.close()
    return accuracy, status


def source_accuracy(world: World) -> np.ndarray:
    adapter = cafe.create("source", world.side.classifier)
    return np.array([cafe.metrics.accuracy(adapter.predict(world.images[c]), world.labels) for c in GOOD])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", help="of the bad camera; all of them by default")
    parser.add_argument("--model", type=Path, default=Path("demo/source"), help="folder of the model's source side")
    parser.add_argument("--dataset", default="digits", choices=list(DATASETS))
    parser.add_argument("--data", help="test images, where they are not the data set's own")
    parser.add_argument("--source-data", help="training images, where they are not the data set's own")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--limit", type=int, default=2000, help="test images that the cameras show")
    parser.add_argument("--figure", type=Path, help="PNG to draw to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = DATASETS[args.dataset]
    base = replace(base, data=args.data or base.data, source_data=args.source_data or base.source_data)
    # The library's own groups, none wider than 128; those of the embedded model are as `make demo` left them.
    options = SourceSideOptions(args.weights, max_group_size=128 if args.weights else 0)
    world = World(base, args.model, options, args.limit)
    kinds = args.kinds or list(bad_images(world, np.random.default_rng(0)))
    source = source_accuracy(world)
    half = args.rounds // 2
    print(f"\nAnswers to the good cameras in the last {args.rounds - half} of {args.rounds} rounds, accuracy in %\n")
    print("| bad camera | judge | mean | worst round | " + " | ".join(GOOD) + " | accepted | refused | rolled back |")
    print("|---|---|" + "---:|" * (len(GOOD) + 5))
    shown = " | ".join(f"{100 * a:.1f}" for a in source)
    print(f"| | source model | {100 * source.mean():.1f} | | {shown} | | | |")
    curves: dict[str, dict[bool, np.ndarray]] = {}
    for kind in kinds:
        for judge in (True, False):
            began = time.perf_counter()
            accuracy, status = play(world, kind, judge, args.rounds, args.seed)
            curves.setdefault(kind, {})[judge] = accuracy
            found, worst = 100 * accuracy[half:].mean(0), 100 * accuracy[half:].mean(1).min()
            steps = status["steps"]
            print(f"| {kind} | {'on' if judge else 'off'} | {found.mean():.1f} | {worst:.1f} | "
                  + " | ".join(f"{a:.1f}" for a in found)
                  + f" | {steps['accepted']} | {steps['refused']} | {steps['rolled_back']} |", flush=True)  # fmt: skip
            quarantined = [c["quarantined"] for c in status["cameras"] if c["camera"] == BAD]
            print(f"<!-- {time.perf_counter() - began:.0f} s; bad camera: {quarantined} -->", flush=True)
    if args.figure:
        draw(curves, source, args.figure)


def draw(curves: dict[str, dict[bool, np.ndarray]], source: np.ndarray, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, every = pyplot.subplots(
        2, 3, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for axes, (kind, found) in zip(every.flat, curves.items(), strict=False):
        for judge, colour in ((False, "#D55E00"), (True, "#0072B2")):
            mean = 100 * found[judge].mean(1)
            smooth = np.convolve(mean, np.ones(5) / 5, mode="valid")
            axes.plot(np.arange(len(smooth)) + 5, smooth, color=colour, label="with judge" if judge else "without")
        axes.axhline(100 * source.mean(), color="0.5", linestyle=":", label="source model")
        quarter = len(mean) / 4
        axes.axvspan(2 * quarter, 3 * quarter, color="0.94", zorder=0)  # the night
        if kind != "none":
            axes.axvline(quarter, color="0.8", zorder=0)
        axes.set_title("no bad camera" if kind == "none" else kind, fontsize=10)
        axes.grid(color="0.93")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in every[:, 0]:
        axes.set_ylabel("accuracy of good cameras, %", fontsize=8)
    for axes in every[-1]:
        axes.set_xlabel("round", fontsize=8)
    every.flat[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
