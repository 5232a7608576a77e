"""How fast the corruptions are, against `imagecorruptions-imaug`, the one PyPI package that makes all 15.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/corruptions.py

That package is needed for the comparison only and pulls in scikit-image and numba: install it, with cafe-tta,
into an environment of its own. Without it only our own times are printed. It knows the ImageNet parameters
alone, so ours are timed with these at 224 x 224 and, at 32 x 32, with these and with the CIFAR parameters. It
takes one image at a time; ours are timed on a batch and, in a further column, one at a time.

Times are CPU milliseconds per image on one thread at severity 5: the median over rounds in which both sides
take turns, so that a busy machine slows both alike.
"""

import argparse
import importlib
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from cafe_tta.corruptions import NAMES, corrupt

HOW_TO_COMPARE = """imagecorruptions-imaug is not installed, so only our own times follow; to compare:
  python -m venv /tmp/imaug && /tmp/imaug/bin/pip install . imagecorruptions-imaug
  /tmp/imaug/bin/python benchmarks/corruptions.py"""

their_corrupt: Any = None
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own dependencies
        their_corrupt = importlib.import_module("imagecorruptions").corrupt
except ImportError:
    print(HOW_TO_COMPARE)


def photographs(count: int, side: int) -> npt.NDArray[np.uint8]:
    """Smooth pictures with some texture, about as compressible as photographs."""
    rng = np.random.default_rng(0)
    coarse = [cv2.resize(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8), (side, side)) for _ in range(count)]
    texture = rng.normal(0, 8, (count, side, side, 3))
    return np.clip(np.stack(coarse) + texture, 0, 255).astype(np.uint8)


def seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def compare(side: int, preset: str, batch_size: int, rounds: int) -> None:
    images = photographs(batch_size, side)
    singles = min(batch_size, 8)
    print(f"\n{side} x {side}, preset {preset}, severity 5, batches of {batch_size}; ms of CPU per image")
    print(f"{'corruption':20}{'batch':>9}{'single':>9}{'imaug':>9}{'ratio':>8}")
    total = np.zeros(3)
    for name in NAMES:

        def batch(name: str = name) -> None:
            corrupt(images, name, 5, preset=preset)

        def single(name: str = name) -> None:
            for i in range(singles):
                corrupt(images[i : i + 1], name, 5, preset=preset, indices=[i])

        def theirs(name: str = name) -> None:
            for i in range(singles):
                their_corrupt(images[i], corruption_name=name, severity=5)

        sides: list[tuple[Callable[[], None], int]] = [(batch, batch_size), (single, singles)]
        if their_corrupt is not None:
            sides.append((theirs, singles))
        for function, _ in sides:
            function()  # fills caches, compiles
        times: list[list[float]] = [[] for _ in sides]
        for _ in range(rounds):
            for taken, (function, count) in zip(times, sides, strict=True):
                taken.append(1e3 * seconds(function) / count)
        row = [median(taken) for taken in times]
        total[: len(row)] += row
        print_row(name, row)
    print_row("sum", total[: len(sides)].tolist())
    if their_corrupt is not None:
        ours, imaug = total[0], total[2]
        slower = "imaug" if imaug > ours else "cafe-tta"
        print(f"{slower} is slower, by a factor of {max(imaug / ours, ours / imaug):.1f} in sum")


def print_row(name: str, row: list[float]) -> None:
    ratio = f"{row[2] / row[0]:8.1f}" if len(row) == 3 else ""
    print(f"{name:20}" + "".join(f"{value:9.3f}" for value in row) + ratio)


def whole_test_set(count: int) -> None:
    images = photographs(500, 32)
    images = np.concatenate([images] * -(-count // len(images)))[:count]
    taken = sum(seconds(lambda name=name: corrupt(images, name, 5)) for name in NAMES)  # type: ignore[misc]
    print(f"\n{count:,} CIFAR images, all 15 corruptions, severity 5: {taken:.1f} s of CPU on one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9, help="repetitions, of which the median counts")
    parser.add_argument("--images", type=int, default=10_000, help="size of the whole CIFAR test set to time")
    options = parser.parse_args()
    cv2.setNumThreads(1)
    compare(32, "cifar", 256, options.rounds)
    compare(32, "imagenet", 256, options.rounds)
    compare(224, "imagenet", 16, options.rounds)
    whole_test_set(options.images)


if __name__ == "__main__":
    main()
