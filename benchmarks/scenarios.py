"""The server under ordinary cameras and hostile ones: with its judge, without it, and the source model. Prints a table.

    python benchmarks/scenarios.py                                    # some minutes for each seed, on two cores
    python benchmarks/scenarios.py --scenarios one-class --seeds 0    # a quick look
    python benchmarks/scenarios.py --development --seeds 100 101      # what the server's rules were chosen on
    python benchmarks/scenarios.py --dataset cifar10 --weights W.safetensors --model FOLDER   # another model and images

The scenarios are those of `cafe-tta simulate --scenario NAME`, played without HTTP. The service adapts with its default
settings and waits for each step, so that figures hardly depend on the clock. It never sees a label. Of plays with a
window more than 2 points below the source model, the worst window is shown camera by camera.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cafe_tta import data, methods
from cafe_tta.bench.experiments import DATASETS
from cafe_tta.bench.source_side import SourceSide, SourceSideOptions
from cafe_tta.serve import Service, load_settings
from cafe_tta.simulate import SCENARIOS, images, scenarios
from cafe_tta.simulate.scores import WINDOW, Scores

CHUNK = 128  # images that are answered together


@dataclass(frozen=True)
class World:
    """The model, and where its images are prepared."""

    dataset: str
    model: Path
    weights: Path | None
    images: Path
    development: bool
    rounds: int
    settings: tuple[str, ...]  # name=value

    @property
    def weather(self) -> tuple[images.Domain, ...]:
        return scenarios.DEVELOPMENT if self.development else scenarios.WEATHER


@cache  # one for each process
def source_side(world: World) -> SourceSide:
    # The library's own groups, none wider than 128; those of the embedded model are as `make demo` left them.
    options = SourceSideOptions(world.weights, max_group_size=128 if world.weights else 0)
    return SourceSide(DATASETS[world.dataset], world.model, options, say=print)


@dataclass(frozen=True)
class Played:
    """A scenario that was played."""

    name: str
    judge: bool
    seed: int
    weather: tuple[images.Domain, ...]
    scores: Scores
    steps: Counter[str]
    quarantined: list[str]
    seconds: float
    source_answers: np.ndarray  # (rounds, cameras, images): of the source model

    def worst_window(self) -> str:
        """What honest cameras got in the worst window, and how many classes the source model told apart there."""
        first = int(self.scores.windows.argmin())
        window = slice(first, first + WINDOW)
        images, source, served = self.scores.counts[:, window].sum(1).tolist()
        lines = [f"{self.name}, seed {self.seed}, rounds {first} to {first + WINDOW - 1}:"]
        for camera in scenarios.honest_cameras(self.weather):
            answers = self.source_answers[window, camera.number].ravel()
            most = Counter(answers.tolist()).most_common(1)[0][1]
            i = camera.number
            lines.append(
                f"  {camera.name}: {served[i]} of {images[i]} right, of the source model {source[i]}, "
                f"which answers {most} of them alike"
            )
        return "\n".join(lines)


def play(world: World, name: str, judge: bool, seed: int) -> Played:
    began = time.perf_counter()
    side = source_side(world)
    given = dict(setting.split("=", 1) for setting in world.settings)
    settings = load_settings({"judge": judge, "adapt_share": 1.0, "seed": seed, **given})
    adapter = methods.method(settings.method)(side.classifier, side.grouped(), settings.config())
    service = Service(adapter, settings, side.grouped())
    pool = images.Images(world.images)
    scores = Scores(world.rounds, len(world.weather))
    source_answers: list[list[np.ndarray]] = []
    service.start()
    try:
        for number, sent in enumerate(SCENARIOS[name].rounds(pool, world.weather, world.rounds, seed)):
            labels = answers(service, side, sent)
            source_answers.append([sending.source for sending in sent if sending.honest is not None])
            for sending, given_labels in zip(sent, labels, strict=True):
                if sending.honest is not None:
                    source = int((sending.source == sending.labels).sum())
                    served = int((given_labels == sending.labels).sum())
                    scores.add(number, sending.honest, len(given_labels), source, served)
            service.settle()
        status = service.status()
    finally:
        service.close()
    quarantined = [c["camera"] for c in status["cameras"] if c["quarantined"]]
    seconds = time.perf_counter() - began
    own = (name, judge, seed, world.weather, scores, Counter(status["steps"]), quarantined, seconds)
    return Played(*own, np.array(source_answers))


def answers(service: Service, side: SourceSide, sent: list[scenarios.Sending]) -> list[np.ndarray]:
    """The labels that each camera got."""
    tensors = [_tensor(side, sending.images) for sending in sent]
    names = [sending.camera for sending in sent for _ in sending.images]
    adapt = [sending.adapt for sending in sent for _ in sending.images]
    found = [
        service.answer(part, names[start : start + CHUNK], adapt[start : start + CHUNK]).labels
        for start, part in zip(range(0, len(names), CHUNK), torch.cat(tensors).split(CHUNK), strict=True)
    ]
    return [part.numpy() for part in torch.cat(found).split([len(tensor) for tensor in tensors])]


def _tensor(side: SourceSide, made: np.ndarray) -> Tensor:
    return side.preprocessing(made) if made.dtype == np.uint8 else torch.from_numpy(made)


def prepare(world: World, spec: str) -> None:
    side = source_side(world)
    side.grouped()  # made once, before other processes want it
    imageset = data.load(spec)

    def classify(pixels: np.ndarray) -> Tensor:
        with torch.no_grad():
            return side.classifier.eval()(side.preprocessing(pixels))

    images.make(
        world.images,
        imageset,
        np.asarray(imageset.labels),
        classify,
        scenarios.domains(world.weather),
        preset=DATASETS[world.dataset].corruption_preset,
        seed=0,
        most=2000,
    )


def row(name: str, judge: bool, played: list[Played]) -> str:
    """A line of the table: means over the seeds, and the worst of them."""
    gains = np.mean([p.scores.by_camera for p in played], 0)
    steps = sum((p.steps for p in played), Counter())
    windows = sum(len(p.scores.windows) for p in played)
    count = len(played)
    cells = [
        name,
        "on" if judge else "off",
        f"{np.mean([p.scores.source_accuracy for p in played]):.1f}",
        f"{np.mean([p.scores.accuracy for p in played]):.1f}",
        f"{min(p.scores.worst for p in played):+.1f}",
        f"{sum(p.scores.far_below for p in played)} / {windows}",
        f"{gains.min():+.1f}",
        f"{steps['accepted'] / count:.0f}",
        f"{steps['refused'] / count:.0f}",
        f"{steps['rolled_back'] / count:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| scenario | judge | source % | served % | worst window | windows > 2 below | worst camera | accepted | refused | "
    "rolled back |\n|---|---|" + "---:|" * 8
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=scenarios.ROUNDS)
    parser.add_argument("--development", action="store_true", help="the cameras that rules are chosen on")
    parser.add_argument("--judge", choices=("on", "off", "both"), default="both")
    parser.add_argument("--settings", nargs="*", default=[], metavar="NAME=VALUE", help="of the server")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model", type=Path, default=Path("demo/source"), help="folder of the model's source side")
    parser.add_argument("--dataset", default="digits", choices=list(DATASETS))
    parser.add_argument("--data", help="test images, where they are not the data set's own")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--output", type=Path, help="JSON file for all numbers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        world = World(
            args.dataset, args.model, args.weights, Path(folder), args.development, args.rounds, tuple(args.settings)
        )
        prepare(world, args.data or DATASETS[args.dataset].data)
        judges = {"on": (True,), "off": (False,), "both": (True, False)}[args.judge]
        jobs = [(world, name, judge, seed) for name in args.scenarios for judge in judges for seed in args.seeds]
        print(HEAD, flush=True)
        found: list[Played] = []
        with multiprocessing.get_context("spawn").Pool(args.processes, torch.set_num_threads, (1,)) as pool:
            for played in pool.imap(_job, jobs):
                found.append(played)
                same = [p for p in found if (p.name, p.judge) == (played.name, played.judge)]
                if len(same) == len(args.seeds):
                    print(row(played.name, played.judge, same), flush=True)
        for played in found:
            if played.judge and played.scores.far_below:
                print(played.worst_window())
    if args.output:
        args.output.write_text(json.dumps([_numbers(played) for played in found], indent=1) + "\n")


def _job(job: tuple[World, str, bool, int]) -> Played:
    return play(*job)


def _numbers(played: Played) -> dict[str, object]:
    plain = {name: getattr(played, name) for name in ("name", "judge", "seed", "quarantined", "seconds")}
    return {**plain, "steps": dict(played.steps), "scores": played.scores.numbers()}


if __name__ == "__main__":
    main()
