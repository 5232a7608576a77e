"""A run of an adapter over an image set that may be stopped at any moment and taken up again.

What is needed to go on lies in OUTPUT/progress: the adapter's state, the answers so far and, written last and all at
once, progress.json, which says how much of both is valid. A run that was taken up again gives the same answers as one
that was never stopped.
"""

import json
import os
import re
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cafe_tta import data, storage
from cafe_tta.adapter import Adapter, Report, StepRefused
from cafe_tta.cli.console import Advance, Interrupted, StopRequest
from cafe_tta.data.imageset import Labels

# An answer: fixed width, so that a file of them is cut off after the last valid one by its length alone.
ANSWER = np.dtype([("index", "<i8"), ("label", "<i4"), ("confidence", "<f4")])
_SOURCES = ("stats", "histograms", "posterior")  # files whose digests are settings


@dataclass(frozen=True)
class Job:
    """What is run. `settings` are what must not change when a run is taken up again."""

    adapter: Adapter
    imageset: data.ImageSet
    preprocessing: Any
    order: Labels  # (N,) which image comes when
    batch_size: int
    online: bool  # one pass; else one pass that adapts, and a second one that answers
    output: Path
    save_every: int  # batches
    settings: dict[str, Any]
    workers: int = 0

    @property
    def folder(self) -> Path:
        return self.output / "progress"

    @property
    def passes(self) -> tuple[str, ...]:
        return ("adapt",) if self.online else ("adapt", "predict")


class Reasons:
    """Why batches were answered without a step. Reasons that differ only in their numbers are one reason."""

    def __init__(self, counts: dict[str, list[Any]] | None = None) -> None:
        self.counts = counts or {}  # by the reason without its numbers: how many batches, and the reason to tell

    def add(self, report: Report | None) -> None:
        if report is None or report.stepped:
            return
        kind = re.sub(r"\d[\d.]*(e[+-]?\d+)?", "…", report.reason)
        count, told = self.counts.get(kind, (0, report.reason))
        self.counts[kind] = [count + 1, told if told == report.reason else kind]

    def total(self) -> int:
        return sum(count for count, _ in self.counts.values())

    def most_frequent(self) -> tuple[int, str]:
        """How many batches, and why; 0 and nothing where every batch led to a step."""
        count, told = max(self.counts.values(), key=lambda entry: entry[0], default=(0, ""))
        return count, told


@dataclass
class Position:
    """How far a run has come."""

    phase: str = "adapt"
    consumed: int = 0  # images of the order, in this phase
    answers: int = 0
    seconds: float = 0.0
    unreadable: list[data.Unreadable] = field(default_factory=list)  # of this phase
    reasons: Reasons = field(default_factory=Reasons)  # of batches that led to no step


def interrupted_run(output: Path) -> bool:
    """Whether a run was stopped here before its end."""
    return (output / "progress" / "progress.json").is_file()


def describe_differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Where the settings of two runs differ, and only that; empty where they do not.

    >>> describe_differences({"seed": 0, "options": {"lr": 1}}, {"seed": 0, "options": {"lr": 3}})
    'lr=1 there, 3 now'
    """
    words = {"files": "other images", **{f"source {name}": f"another --{name}" for name in _SOURCES}}
    there, here = _flat(theirs), _flat(json.loads(json.dumps(ours)))  # as they look when they come from a file
    names = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    return ", ".join(
        words[name] if name in words else f"{name}={there.get(name)!r} there, {here.get(name)!r} now" for name in names
    )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    options = settings.get("options", {})
    sources = {f"source {name}": digest for name, digest in settings.get("source", {}).items()}
    return {name: value for name, value in settings.items() if name not in ("options", "source")} | options | sources


def run(job: Job, resume: bool, stop: StopRequest, advance: Advance) -> tuple[npt.NDArray[np.void], Position]:
    """Goes through the images, from where an earlier run stopped if `resume`. Gives the answers in the set's order."""
    position = _load(job) if resume else _begin(job)
    done = job.passes.index(position.phase) * len(job.order) + position.consumed
    advance(done)
    with (job.folder / "answers.bin").open("ab") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", StepRefused)  # counted, and told at the end
        for phase in job.passes[job.passes.index(position.phase) :]:
            if phase != position.phase:
                position = Position(phase, answers=position.answers, seconds=position.seconds, reasons=position.reasons)
            _go_through(job, position, file, stop, advance)
    answers = np.fromfile(job.folder / "answers.bin", dtype=ANSWER)
    return answers[np.argsort(answers["index"], kind="stable")], position


def clear(job: Job) -> None:
    """Removes what was saved. Only that: a folder of this name may hold things of the user's."""
    for pattern in ("answers.bin", "progress.json", "state-*.safetensors", ".*.tmp"):
        for path in job.folder.glob(pattern):
            path.unlink()
    with suppress(OSError):  # not there, or not empty
        job.folder.rmdir()


def _go_through(job: Job, position: Position, file: Any, stop: StopRequest, advance: Advance) -> None:
    answering = position.phase == job.passes[-1]
    place = job.adapter.classifier.head.weight
    before = time.perf_counter()
    loader = data.Loader(job.imageset, job.preprocessing, job.batch_size, order=job.order, workers=job.workers)
    batches = loader.batches(position.consumed, position.unreadable)
    for number, batch in enumerate(batches, start=1):
        images = batch.images.to(place)
        logits = job.adapter(images) if position.phase == "adapt" else job.adapter.predict(images)
        if position.phase == "adapt":
            position.reasons.add(job.adapter.report)
        if answering:
            position.answers += _write(file, batch.indices, logits)
        advance(batch.consumed - position.consumed)
        position.consumed = batch.consumed
        now = time.perf_counter()
        position.seconds, before = position.seconds + now - before, now
        if number % job.save_every == 0 or stop.signal_number:
            file.flush()
            os.fsync(file.fileno())
            _save(job, position)
        if stop.signal_number:
            batches.close()  # type: ignore[attr-defined] # ends the threads that read ahead
            part = (job.passes.index(position.phase) * len(job.order) + position.consumed) / (
                len(job.passes) * len(job.order)
            )
            raise Interrupted(f"{part:.0%} done and saved; the same command with --resume goes on", stop.signal_number)
    advance(len(job.order) - position.consumed)


def _write(file: Any, indices: Labels, logits: torch.Tensor) -> int:
    confidence, label = logits.softmax(1).max(1)
    answers = np.zeros(len(indices), dtype=ANSWER)
    answers["index"], answers["label"] = indices, label.cpu().numpy()
    answers["confidence"] = confidence.float().cpu().numpy()
    file.write(answers.tobytes())
    return len(answers)


def _begin(job: Job) -> Position:
    clear(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    return Position()


def _save(job: Job, position: Position) -> None:
    state = f"state-{job.adapter.counters.batches}.safetensors"
    if not (job.folder / state).exists():
        job.adapter.save(job.folder / state)
    record = {
        "settings": job.settings,
        "state": state,
        "phase": position.phase,
        "consumed": position.consumed,
        "answers": position.answers,
        "seconds": position.seconds,
        "unreadable": [[item.index, item.name, item.why] for item in position.unreadable],
        "without_step": position.reasons.counts,
    }
    storage.write_bytes(job.folder / "progress.json", json.dumps(record).encode())
    for old in job.folder.glob("state-*.safetensors"):
        if old.name != state:
            old.unlink()


def _load(job: Job) -> Position:
    record = json.loads((job.folder / "progress.json").read_text())
    if shown := describe_differences(record["settings"], job.settings):
        raise ValueError(f"{job.output} holds a run that was begun differently: {shown}; --overwrite starts anew")
    job.adapter.load(job.folder / record["state"])
    os.truncate(job.folder / "answers.bin", record["answers"] * ANSWER.itemsize)
    unreadable = [data.Unreadable(*item) for item in record["unreadable"]]
    reasons = Reasons(record.get("without_step"))
    return Position(record["phase"], record["consumed"], record["answers"], record["seconds"], unreadable, reasons)
