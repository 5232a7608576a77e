"""Scores of a scenario: right answers to honest cameras, beside the source model's to the same images, by round."""

from typing import Any

import numpy as np

WINDOW = 8  # rounds
FAR_BELOW = 2.0  # points below the source model


class Scores:
    """Right answers by round and camera.

    >>> scores = Scores(rounds=9, cameras=1)
    >>> for number in range(9):
    ...     scores.add(number, 0, images=10, source=5, served=4 if number == 0 else 6)
    >>> round(scores.accuracy, 1), round(scores.source_accuracy, 1), round(scores.worst, 2), scores.far_below
    (57.8, 50.0, 7.5, 0)
    """

    def __init__(self, rounds: int, cameras: int) -> None:
        self.counts = np.zeros((3, rounds, cameras), dtype=np.int64)  # images, right of the source model, right served

    def add(self, number: int, camera: int, images: int, source: int, served: int) -> None:
        """Adds the answers to some images of a camera in a round."""
        self.counts[:, number, camera] += images, source, served

    @property
    def source_accuracy(self) -> float:
        return self._percent(1)

    @property
    def accuracy(self) -> float:
        """Of the answers that were given, in %."""
        return self._percent(2)

    def _percent(self, row: int) -> float:
        return float(100 * self.counts[row].sum() / max(1, self.counts[0].sum()))

    @property
    def windows(self) -> np.ndarray:
        """Points above the source model in every window of 8 rounds, over all cameras."""
        return _gains(_windows(self.counts.sum(2)))

    @property
    def worst(self) -> float:
        """Points above the source model in the worst window."""
        return float(self.windows.min(initial=np.inf))

    @property
    def far_below(self) -> int:
        """Windows that are more than 2 points below the source model."""
        return int((self.windows < -FAR_BELOW).sum())

    @property
    def by_camera(self) -> np.ndarray:
        """Points above the source model, of each camera over all rounds."""
        return _gains(self.counts.sum(1))

    def numbers(self) -> dict[str, Any]:
        """All of it, for a JSON file."""
        return {
            "accuracy": self.accuracy,
            "source_accuracy": self.source_accuracy,
            "worst_window": self.worst,
            "windows": len(self.windows),
            "windows_far_below": self.far_below,
            "cameras": self.by_camera.tolist(),
        }


def _windows(counts: np.ndarray) -> np.ndarray:
    """Sums over every 8 rounds of counts (3, rounds); all rounds where there are fewer."""
    length = min(WINDOW, counts.shape[1])
    return np.lib.stride_tricks.sliding_window_view(counts, length, axis=1).sum(-1)


def _gains(counts: np.ndarray) -> np.ndarray:
    images, source, served = counts
    return 100 * (served - source) / np.maximum(images, 1)
