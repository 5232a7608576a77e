"""A run of an adapter over an image set, with its results in a folder."""

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cafe_tta import data, storage, stream
from cafe_tta.adapter import Adapter, AdapterConfig, StepRefused
from cafe_tta.data import Advance, ImageSet, Labels
from cafe_tta.models import Model
from cafe_tta.options import Options, option
from cafe_tta.runs import results
from cafe_tta.runs.measure import measure, notes, running_statistics_followed, tracked_batches
from cafe_tta.runs.progress import Position, ProgressFolder, describe_differences, write_answers
from cafe_tta.runs.sheet import Clusters
from cafe_tta.source import Reference


class Stopped(Exception):
    """A run was asked to stop, and has saved what it needs to be resumed."""


@dataclass(frozen=True)
class RunOptions(Options):
    """How a run over a set of images goes.

    >>> RunOptions(online=False).shuffled
    True
    """

    online: bool = option(
        True,
        "Answer each batch as it comes; or adapt to all images first, then answer them in evaluation mode.",
        flag="--online/--offline",
    )
    shuffle: bool | None = option(None, "Shuffle the images; by default only offline.")
    seed: int = option(0, "Seed of the shuffling, and of the images that are measured.", least=0)
    measure: int = option(
        1024, "Number of images on which the model before and after adapting are compared; 0 compares nothing.", least=0
    )
    sheet: bool = option(
        False,
        "For a method that unmixes: draw a contact sheet of its clusters, clusters.png, and list the cluster of each "
        "image in clusters.csv. Reads the images once more.",
        flag="--sheet",
    )
    save_every: int = option(50, "Number of batches after which the progress is saved.", least=1)
    limit: int | None = option(
        None, "Answer only this many images: the first, or with shuffling, which draws them at random.", least=1
    )
    resume: bool = option(False, "Continue a run that was stopped.", flag="--resume")
    overwrite: bool = option(False, "Replace the results of an earlier run.", flag="--overwrite")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.overwrite:
            raise ValueError("expected `resume` or `overwrite`, but got both")

    @property
    def shuffled(self) -> bool:
        return not self.online if self.shuffle is None else self.shuffle

    @property
    def phases(self) -> tuple[str, ...]:
        """One pass that adapts and answers; or one that adapts, and a second one that answers."""
        return ("adapt",) if self.online else ("adapt", "predict")


class FolderRun:
    """Adapts to the images of a set and answers them, into a folder. Labels are only used to tell the accuracy.

    `sources` are digests of the source values by kind: a run is not resumed with other ones. `reference` measures how
    far the features are from the source, before and after.
    """

    def __init__(
        self,
        model: Model,
        adapter: Adapter,
        imageset: ImageSet,
        output: str | os.PathLike[str],
        options: RunOptions | None = None,
        *,
        reference: Reference | None = None,
        sources: Mapping[str, str] | None = None,
        workers: int = 0,
    ) -> None:
        self.model, self.adapter, self.imageset, self.output = model, adapter, imageset, Path(output)
        self.options, self.reference, self.workers = options or RunOptions(), reference, workers
        check_sheet(self.options, adapter.name, adapter.config)
        self.settings = {
            "method": adapter.name,
            "options": asdict(adapter.config),
            "online": self.options.online,
            "shuffle": self.options.shuffled,
            "seed": self.options.seed,
            "images": len(imageset),
            "limit": self.options.limit,
            "files": digest(
                imageset.item_name(index).encode(errors="surrogateescape") for index in range(len(imageset))
            ),
            "preprocessing": str(model.preprocessing),
            "source": dict(sources or {}),
        }
        self.progress = ProgressFolder(self.output, self.settings)
        self.labels, self.why_no_labels = data.match_labels(imageset, model.classes, model.classifier.num_classes)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The model's, or else those of class folders, if there is one for each of its classes."""
        folders = self.imageset.classes if self.labels is not None else None
        same = folders is not None and len(folders) == self.model.classifier.num_classes
        return self.model.classes or (folders if same else None)

    @cached_property
    def order(self) -> Labels:
        """Which image comes when. (N,)"""
        order = np.arange(len(self.imageset))
        if self.options.shuffled:
            order = np.random.default_rng(self.options.seed).permutation(len(self.imageset))
        return order[: self.options.limit]

    @property
    def class_by_class(self) -> bool:
        """Whether the images come sorted by class, which misleads every method that adapts."""
        labels = self.imageset.labels if self.imageset.classes is not None else None
        return labels is not None and bool(labels.max() > 0) and bool((np.diff(labels[self.order]) >= 0).all())

    @property
    def total(self) -> int:
        """Images over all passes."""
        return (len(self.options.phases) + self.options.sheet) * len(self.order)

    def finished(self) -> bool:
        """Whether the folder holds the results of this very run; raises where it holds those of another."""
        if not (self.output / "summary.json").exists() or self.options.overwrite:
            return False
        try:
            theirs = json.loads((self.output / "summary.json").read_text())["settings"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.output} holds results that cannot be read; `overwrite` replaces them") from None
        if shown := describe_differences(theirs, self.settings):
            raise ValueError(
                f"{self.output} holds a finished run with other settings: {shown}; `overwrite` replaces it"
            )
        if (self.output / "state.safetensors").is_file():
            self.adapter.load(self.output / "state.safetensors")  # raises for another model
        return True

    def run(self, advance: Advance = lambda amount: None, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Adapts, answers and writes the results; returns the summary. `stop` is asked after every batch."""
        check_output(self.output, self.options)
        self.output.mkdir(parents=True, exist_ok=True)
        if self.options.overwrite:
            results.remove(self.output)
        tracked = tracked_batches(self.adapter)
        position = self._pass_over(advance, stop)
        answers = self.progress.read_answers()
        results.write_unreadable(self.output, [*position.unreadable, *data.left_out(self.imageset)])
        if not len(answers):
            self.progress.clear()
            count = len(self.order)
            none = "the only image could not" if count == 1 else f"none of the {count} images could"
            raise ValueError(f"{none} be read; {self.output / 'unreadable.csv'} says why")
        results.write_predictions(self.output / "predictions.csv", self.imageset, answers, self.class_names)
        self.adapter.save(self.output / "state.safetensors")
        clusters = self.draw_sheet(advance) if self.options.sheet else None
        summary = self._summary(answers, position, tracked, clusters)
        # Written last: a folder with a summary holds a finished run.
        storage.write_bytes(self.output / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        self.progress.clear()
        return summary

    def draw_sheet(self, advance: Advance = lambda amount: None) -> Clusters:
        """Assigns every image to the clusters as they are now, and writes clusters.png and clusters.csv."""
        batch_size, workers = self.adapter.config.batch_size, self.workers
        loader = data.Loader(self.imageset, self.model.preprocessing, batch_size, workers=workers, advance=advance)
        clusters = Clusters.of(self.adapter, loader)
        results.write_clusters(self.output, self.imageset, clusters, self.adapter.name, self.options.seed)
        return clusters

    def _pass_over(self, advance: Advance, stop: Callable[[], bool]) -> Position:
        phases = self.options.phases
        position = self.progress.load(self.adapter) if self.options.resume else self.progress.begin()
        advance(phases.index(position.phase) * len(self.order) + position.consumed)
        with self.progress.answers.open("ab") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", StepRefused)  # they are counted, and reported at the end
            for phase in phases[phases.index(position.phase) :]:
                if phase != position.phase:
                    position = Position(
                        phase, answers=position.answers, seconds=position.seconds, reasons=position.reasons
                    )
                self._phase(position, file, advance, stop)
        return position

    def _phase(self, position: Position, file: Any, advance: Advance, stop: Callable[[], bool]) -> None:
        adapting, answering = position.phase == "adapt", position.phase == self.options.phases[-1]
        batch_size = self.adapter.config.batch_size
        loader = data.Loader(
            self.imageset, self.model.preprocessing, batch_size, order=self.order, workers=self.workers
        )
        batches = loader.batches(position.consumed, position.unreadable)
        loop: Iterable[Any] = (stream.adapt if adapting else stream.evaluate)(self.adapter, batches)
        before = time.perf_counter()
        for number, answer in enumerate(loop, start=1):
            if adapting:
                position.reasons.add(answer.report)
            if answering:
                position.answers += write_answers(file, answer.batch.indices, answer.logits)
            advance(answer.batch.consumed - position.consumed)
            position.consumed = answer.batch.consumed
            now = time.perf_counter()
            position.seconds, before = position.seconds + now - before, now
            stopping = stop()
            if number % self.options.save_every == 0 or stopping:
                file.flush()
                os.fsync(file.fileno())
                self.progress.save(position, self.adapter)
            if stopping:
                batches.close()  # type: ignore[attr-defined] # ends the threads that read ahead
                done = self.options.phases.index(position.phase) * len(self.order) + position.consumed
                raise Stopped(f"{done / self.total:.0%} done and saved")
        advance(len(self.order) - position.consumed)

    def _summary(
        self, answers: npt.NDArray[np.void], position: Position, tracked: list[int], clusters: Clusters | None
    ) -> dict[str, Any]:
        options, adapter = self.options, self.adapter
        measurement = None
        if options.measure:
            measurement = measure(
                self.model,
                adapter,
                self.imageset,
                count=options.measure,
                seed=options.seed,
                reference=self.reference,
                labels=self.labels,
                workers=self.workers,
                among=None if options.limit is None else self.order,
            )
        followed = running_statistics_followed(adapter, tracked)
        remarks = _never_adapted(adapter, position) + notes(
            measurement, followed, online=options.online, adapter=adapter, images=len(answers)
        )
        accuracy, labelled = results.accuracy(answers, self.labels)
        return {
            "method": adapter.name,
            "options": asdict(adapter.config),
            "mode": "online" if options.online else "offline",
            "model": self.model.architecture,
            "images": len(answers),
            "unreadable": len(position.unreadable) + len(data.left_out(self.imageset)),
            "seconds": position.seconds,
            "images_per_second": len(answers) / position.seconds,
            "batches": adapter.counters.batches,
            "steps": adapter.counters.steps,
            "refused_steps": adapter.counters.refused,
            "batches_without_step": position.reasons.total(),
            "most_frequent_reason": position.reasons.most_frequent()[1] or None,
            "most_frequent_reason_batches": position.reasons.most_frequent()[0],
            "clusters": clusters.sizes if clusters else adapter.clusters.sizes if adapter.clusters else None,
            "accuracy": accuracy,
            "labelled_images": labelled,
            "measured": None if measurement is None else measurement.summary(),
            "notes": remarks,
            "settings": self.settings,
        }


def check_output(output: Path, options: RunOptions) -> None:
    """Raises where the folder holds results that the options do not ask to continue or to replace."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"expected `output` to be a folder, but {output} is a file")
    if options.overwrite:
        return
    if (output / "summary.json").exists():
        if not options.resume:
            raise ValueError(f"{output} holds the results of a finished run; `overwrite` replaces them")
    elif ProgressFolder(output, {}).exists():
        if not options.resume:
            raise ValueError(f"{output} holds a run that was stopped; `resume` continues it, `overwrite` starts anew")
    elif options.resume:
        raise ValueError(f"there is no stopped run in {output} to resume; start one without `resume`")


def check_sheet(options: RunOptions, method: str, config: AdapterConfig) -> None:
    """Raises where a sheet of clusters is asked of a method that makes none."""
    if options.sheet and not config.unmixes:
        raise ValueError(
            f"expected a method that unmixes with `sheet`, which shows its clusters, but {method} with these options "
            "makes none; choose unmix, or a method with gradient steps and normalisation=unmix"
        )


def digest(parts: Iterable[bytes]) -> str:
    """A short hash of a sequence of byte strings."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()[:16]


def _never_adapted(adapter: Adapter, position: Position) -> list[str]:
    if adapter.counters.steps or not adapter.adapts:
        return []
    count = adapter.counters.batches
    batches = f"{count} {'batch' if count == 1 else 'batches'}"
    return [f"nothing was adapted: {batches} answered without a step: {position.reasons.most_frequent()[1]}"]
