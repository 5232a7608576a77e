"""How benchmarks measure: both sides in one run, in turns, the median of the repeats, and their ratio."""

import statistics
import time
from collections.abc import Callable


def in_turns(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each side; every side is run once before, and then all in turns."""
    for side in sides.values():
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def line(what: str, seconds: float, against: str, limit: float, goal: str) -> str:
    """One row of a table: a ratio, and which side was slower."""
    slower = "slower" if seconds > limit else "not slower"
    times = f"{1000 * seconds:.1f} ms | {against} | {1000 * limit:.1f} ms"
    return f"| {what} | {times} | {seconds / limit:.3f} ({slower}) | {goal} |"
