"""The progress of a run, saved so that it can be stopped at any moment and resumed.

All that is needed to resume is in OUTPUT/progress: the adapter's state, the answers so far and, written last and
atomically, progress.json, which says how much of both is valid. A resumed run gives the same answers as one that was
never stopped.
"""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cafe_tta import data, storage
from cafe_tta.adapter import Adapter, Report
from cafe_tta.data import Labels

Answers = npt.NDArray[np.void]  # a record for each image: see `answer_type`


def answer_type(top_k: int = 1, both: bool = False) -> np.dtype[np.void]:
    """An answer: the most likely classes and their probabilities; with `both`, also those of the source model.

    It has a fixed width, so that a file of answers can be truncated after the last valid one.
    """
    source = [("source_label", "<i4", (top_k,)), ("source_confidence", "<f4", (top_k,))] if both else []
    return np.dtype([("index", "<i8"), ("label", "<i4", (top_k,)), ("confidence", "<f4", (top_k,)), *source])


class Reasons:
    """Why batches were answered without a step. Reasons that differ only in their numbers count as one."""

    def __init__(self, counts: dict[str, list[Any]] | None = None) -> None:
        self.counts = counts or {}  # by the reason without its numbers: number of batches, and the reason to show

    def add(self, report: Report | None) -> None:
        if report is None or report.stepped:
            return
        kind = re.sub(r"\d[\d.]*(e[+-]?\d+)?", "…", report.reason)
        count, shown = self.counts.get(kind, (0, report.reason))
        self.counts[kind] = [count + 1, shown if shown == report.reason else kind]

    def total(self) -> int:
        return sum(count for count, _ in self.counts.values())

    def most_frequent(self) -> tuple[int, str]:
        """Number of batches and the reason; 0 and an empty text where every batch led to a step."""
        count, shown = max(self.counts.values(), key=lambda entry: entry[0], default=(0, ""))
        return count, shown


@dataclass
class Position:
    """How far a run has come."""

    phase: str = "adapt"
    consumed: int = 0  # images of the order, in this phase
    answers: int = 0
    seconds: float = 0.0
    unreadable: list[data.Unreadable] = field(default_factory=list)  # in this phase
    reasons: Reasons = field(default_factory=Reasons)  # of batches without a step


@dataclass(frozen=True)
class ProgressFolder:
    """The folder of a run's progress, for settings that must stay the same when it is resumed."""

    output: Path
    settings: dict[str, Any]
    answer: np.dtype[np.void] = field(default_factory=answer_type)

    @property
    def path(self) -> Path:
        return self.output / "progress"

    @property
    def answers(self) -> Path:
        return self.path / "answers.bin"

    def exists(self) -> bool:
        """Whether a run was stopped here before its end."""
        return (self.path / "progress.json").is_file()

    def begin(self, phase: str = "adapt") -> Position:
        self.clear()
        self.path.mkdir(parents=True, exist_ok=True)
        return Position(phase)

    def save(self, position: Position, adapter: Adapter) -> None:
        state = f"state-{adapter.counters.batches}.safetensors"
        if not (self.path / state).exists():
            adapter.save(self.path / state, source=False)
        record = {
            "settings": self.settings,
            "state": state,
            "phase": position.phase,
            "consumed": position.consumed,
            "answers": position.answers,
            "seconds": position.seconds,
            "unreadable": [[item.index, item.name, item.why] for item in position.unreadable],
            "without_step": position.reasons.counts,
        }
        storage.write_bytes(self.path / "progress.json", json.dumps(record).encode())
        for old in self.path.glob("state-*.safetensors"):
            if old.name != state:
                old.unlink()

    def load(self, adapter: Adapter) -> Position:
        """Brings the adapter to where the run was stopped."""
        record = json.loads((self.path / "progress.json").read_text())
        if shown := describe_differences(record["settings"], self.settings):
            raise ValueError(f"{self.output} holds a run with other settings: {shown}; `overwrite` starts anew")
        adapter.load(self.path / record["state"])
        os.truncate(self.answers, record["answers"] * self.answer.itemsize)
        unreadable = [data.Unreadable(*item) for item in record["unreadable"]]
        reasons = Reasons(record.get("without_step"))
        return Position(record["phase"], record["consumed"], record["answers"], record["seconds"], unreadable, reasons)

    def clear(self) -> None:
        """Removes what was saved, and nothing else: a folder of this name may hold files of the user's."""
        for pattern in ("answers.bin", "progress.json", "state-*.safetensors", ".*.tmp"):
            for path in self.path.glob(pattern):
                path.unlink()
        with suppress(OSError):  # it does not exist, or is not empty
            self.path.rmdir()

    def read_answers(self) -> Answers:
        """The answers in the order of the image set."""
        answers = np.fromfile(self.answers, dtype=self.answer)
        return answers[np.argsort(answers["index"], kind="stable")]


def answers_of(indices: Labels, logits: Tensor, answer: np.dtype[np.void], source: Tensor | None = None) -> Answers:
    """The answers to a batch; `source` are the logits of the source model, where they are kept too."""
    answers = np.zeros(len(indices), dtype=answer)
    answers["index"] = indices
    for prefix, given in (("", logits), ("source_", source)):
        if given is not None:
            confidence, label = given.softmax(1).topk(answer["label"].shape[0], 1)
            answers[f"{prefix}label"] = label.cpu().numpy()
            answers[f"{prefix}confidence"] = confidence.float().cpu().numpy()
    return answers


def describe_differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """How the settings of two runs differ, in words; empty where they do not.

    >>> describe_differences({"seed": 0, "options": {"lr": 1}}, {"seed": 0, "options": {"lr": 3}})
    'options.lr=1 there, 3 here'
    """
    kinds = theirs.get("source", {}).keys() | ours.get("source", {}).keys()
    return storage.differences(theirs, ours, {"files": "other images"} | {f"source.{k}": f"other {k}" for k in kinds})
