"""A run of an adapter over an image set that may be stopped at any moment and taken up again.

What is needed to go on lies in OUTPUT/progress: the adapter's state, the answers so far and, written last and all at
once, progress.json, which says how much of both is valid. A run that was taken up again gives the same answers as one
that was never stopped.
"""

import json
import os
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
from cafe_tta.adapter import Adapter, StepRefused
from cafe_tta.cli.console import Advance, Interrupted, StopRequest
from cafe_tta.data.imageset import Labels

# An answer: fixed width, so that a file of them is cut off after the last valid one by its length alone.
ANSWER = np.dtype([("index", "<i8"), ("label", "<i4"), ("confidence", "<f4")])


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


@dataclass
class Position:
    """How far a run has come."""

    phase: str = "adapt"
    consumed: int = 0  # images of the order, in this phase
    answers: int = 0
    seconds: float = 0.0
    unreadable: list[data.Unreadable] = field(default_factory=list)  # of this phase


def interrupted_run(output: Path) -> bool:
    """Whether a run was stopped here before its end."""
    return (output / "progress" / "progress.json").is_file()


def run(job: Job, resume: bool, stop: StopRequest, advance: Advance) -> tuple[npt.NDArray[np.void], Position]:
    """Goes through the images, from where an earlier run stopped if `resume`. Gives the answers in the set's order."""
    position = _load(job) if resume else _begin(job)
    done = job.passes.index(position.phase) * len(job.order) + position.consumed
    advance(done)
    with (job.folder / "answers.bin").open("ab") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", StepRefused)  # counted, and told at the end
        for phase in job.passes[job.passes.index(position.phase) :]:
            if phase != position.phase:
                position = Position(phase, answers=position.answers, seconds=position.seconds)
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
    batches = data.batches(
        job.imageset,
        job.batch_size,
        job.preprocessing,
        order=job.order,
        start=position.consumed,
        unreadable=position.unreadable,
        workers=job.workers,
    )
    for number, batch in enumerate(batches, start=1):
        images = batch.images.to(place)
        logits = job.adapter(images) if position.phase == "adapt" else job.adapter.predict(images)
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
    }
    storage.write_bytes(job.folder / "progress.json", json.dumps(record).encode())
    for old in job.folder.glob("state-*.safetensors"):
        if old.name != state:
            old.unlink()


def _load(job: Job) -> Position:
    record = json.loads((job.folder / "progress.json").read_text())
    theirs, ours = record["settings"], job.settings
    if names := sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)):
        shown = ", ".join(f"{name}={theirs.get(name)!r} there, {ours.get(name)!r} now" for name in names)
        raise ValueError(f"{job.output} holds a run that was begun differently: {shown}; --overwrite starts anew")
    job.adapter.load(job.folder / record["state"])
    os.truncate(job.folder / "answers.bin", record["answers"] * ANSWER.itemsize)
    unreadable = [data.Unreadable(*item) for item in record["unreadable"]]
    return Position(record["phase"], record["consumed"], record["answers"], record["seconds"], unreadable)
