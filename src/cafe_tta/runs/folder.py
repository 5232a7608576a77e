"""A run of an adapter over an image set, with its results in a folder."""

import copy
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
import torch
from torch import Tensor

from cafe_tta import data, storage, stream
from cafe_tta.adapter import Adapter, AdapterConfig, StepRefused
from cafe_tta.classifier import evaluating
from cafe_tta.data import Advance, ImageSet, Labels
from cafe_tta.judged import Judged
from cafe_tta.models import Model
from cafe_tta.options import Options, option
from cafe_tta.runs import results
from cafe_tta.runs.measure import Measurement, measure, notes, running_statistics_followed, tracked_batches
from cafe_tta.runs.progress import (
    Answers,
    Position,
    ProgressFolder,
    answer_type,
    answers_of,
    describe_differences,
)
from cafe_tta.runs.sheet import Clusters
from cafe_tta.runs.verdict import Verdict
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
    judge: bool = option(
        True,
        "Judge the steps on other images of the stream, without labels, take back those that do harm, and give the "
        "source model's answers where the adapted model is worse in the end.",
        flag="--judge/--no-judge",
    )
    both: bool = option(
        False, "Also write the answers of the adapted and of the source model, in columns of their own.", flag="--both"
    )
    top_k: int = option(1, "Number of most likely classes to write for each image.", least=1, metavar="K")
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


class FolderRun:
    """Adapts to the images of a set and answers them, into a folder. Labels are only used to tell the accuracy.

    `sources` are digests of the source values by kind: a run is not resumed with other ones. `reference` measures how
    far the features are from the source, before and after. The adapter goes on from the state that it has: `state` is
    a digest of it. With `apply`, it only answers.
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
        state: str | None = None,
        apply: bool = False,
    ) -> None:
        self.model, self.imageset, self.output = model, imageset, Path(output)
        self.options, self.reference, self.workers, self.apply = options or RunOptions(), reference, workers, apply
        check_sheet(self.options, adapter.name, adapter.config)
        check_top_k(self.options, model.classifier.num_classes)
        self.began = copy.copy(adapter.counters)
        judged = self.options.judge and adapter.adapts and not apply and adapter.ranks.size == 1
        self.adapter = Judged(adapter, reference) if judged else adapter
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
            "judge": self.options.judge,
            "both": self.options.both,
            "top_k": self.options.top_k,
            "state": state,
            "apply": apply,
        }
        self.answer = answer_type(self.options.top_k, self.options.both)
        self.progress = ProgressFolder(self.output, self.settings, self.answer)
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
    def phases(self) -> tuple[str, ...]:
        """One pass that adapts and answers; or one that adapts, and a second one that answers; or only that."""
        return ("predict",) if self.apply else ("adapt",) if self.options.online else ("adapt", "predict")

    @property
    def total(self) -> int:
        """Images over all passes."""
        return (len(self.phases) + self.options.sheet) * len(self.order)

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
        self._plain.save(self.output / "state.safetensors")
        clusters = self.draw_sheet(advance) if self.options.sheet else None
        measurement = self._measure(answers)
        verdict = self._verdict(answers, position, measurement)
        given = self._given(answers, verdict)
        both = answers if self.options.both else None
        results.write_predictions(self.output / "predictions.csv", self.imageset, given, self.class_names, both)
        summary = self._summary(given, position, clusters)
        summary |= {"measured": None if measurement is None else measurement.summary(), **verdict.summary()}
        summary |= {"notes": self._notes(given, measurement, tracked), "settings": self.settings}
        # Written last: a folder with a summary holds a finished run.
        storage.write_bytes(self.output / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        self.progress.clear()
        return summary

    @property
    def _plain(self) -> Adapter:
        """The adapter without its judge, who keeps images of the stream: they do not belong in the user's file."""
        return self.adapter.adapter if isinstance(self.adapter, Judged) else self.adapter

    def draw_sheet(self, advance: Advance = lambda amount: None) -> Clusters:
        """Assigns every image to the clusters as they are now, and writes clusters.png and clusters.csv."""
        batch_size, workers = self.adapter.config.batch_size, self.workers
        loader = data.Loader(self.imageset, self.model.preprocessing, batch_size, workers=workers, advance=advance)
        clusters = Clusters.of(self.adapter, loader)
        results.write_clusters(self.output, self.imageset, clusters, self.adapter.name, self.options.seed)
        return clusters

    def _pass_over(self, advance: Advance, stop: Callable[[], bool]) -> Position:
        phases = self.phases
        position = self.progress.load(self.adapter) if self.options.resume else self.progress.begin(self.phases[0])
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
        adapting, answering = position.phase == "adapt", position.phase == self.phases[-1]
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
                source = self._source_logits(answer.batch.images) if self.options.both else None
                answers = answers_of(answer.batch.indices, answer.logits, self.answer, source)
                file.write(answers.tobytes())
                position.answers += len(answers)
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
                done = self.phases.index(position.phase) * len(self.order) + position.consumed
                raise Stopped(f"{done / self.total:.0%} done and saved")
        advance(len(self.order) - position.consumed)

    def _source_logits(self, images: Tensor) -> Tensor:
        classifier = self.model.classifier
        with torch.no_grad(), evaluating(classifier):
            return classifier(images.to(classifier.head.weight))

    def _given(self, answers: Answers, verdict: Verdict) -> Answers:
        """The answers of the model that the verdict chose."""
        if verdict.answers == "adapted" or not self.adapter.adapts:
            return answers
        given = answers.copy()
        if self.options.both:
            given["label"], given["confidence"] = answers["source_label"], answers["source_confidence"]
            return given
        order, batch_size = answers["index"], self.adapter.config.batch_size
        loader = data.Loader(self.imageset, self.model.preprocessing, batch_size, order=order, workers=self.workers)
        parts = [
            answers_of(answer.batch.indices, answer.logits, self.answer)
            for answer in stream.evaluate(self.model.classifier, loader.batches())
        ]
        return np.concatenate(parts)

    def _measure(self, answers: Answers) -> Measurement | None:
        if not self.options.measure:
            return None
        return measure(
            self.model,
            self.adapter,
            self.imageset,
            count=self.options.measure,
            seed=self.options.seed,
            reference=self.reference,
            labels=self.labels,
            workers=self.workers,
            among=answers["index"],
            as_answered=self.phases[-1] == "adapt",
        )

    def _verdict(self, answers: Answers, position: Position, measurement: Measurement | None) -> Verdict:
        changed = None
        if self.options.both:
            changed = (int((answers["label"][:, 0] != answers["source_label"][:, 0]).sum()), len(answers))
        elif measurement is not None and measurement.source_answers is not None:
            theirs = measurement.source_answers
            ours = answers[np.searchsorted(answers["index"], theirs["index"])]
            changed = (int((ours["label"][:, 0] != theirs["label"][:, 0]).sum()), len(theirs))
        return Verdict(
            self.adapter.name,
            len(answers),
            measurement,
            changed,
            clusters=self.adapter.clusters.sizes if self.adapter.clusters else (),
            steps=self.steps,
            why_no_step=position.reasons.most_frequent()[1],
            judged=self.options.judge,
            adapts=self.adapter.adapts,
            applied=self.apply,
        )

    @property
    def steps(self) -> int:
        """Steps of this run that were not taken back."""
        now, began = self.adapter.counters, self.began
        return now.steps - began.steps - (now.rolled_back - began.rolled_back)

    def _notes(self, answers: Answers, measurement: Measurement | None, tracked: list[int]) -> list[str]:
        if self.phases[-1] != "predict":
            return []
        followed = running_statistics_followed(self.adapter, tracked)
        return notes(measurement, followed, adapter=self.adapter, images=len(answers))

    def _summary(self, answers: Answers, position: Position, clusters: Clusters | None) -> dict[str, Any]:
        options, adapter, began = self.options, self.adapter, self.began
        accuracy, labelled = results.accuracy(answers, self.labels)
        return {
            "method": adapter.name,
            "options": asdict(adapter.config),
            "mode": "saved state" if self.apply else "online" if options.online else "offline",
            "model": self.model.architecture,
            "images": len(answers),
            "unreadable": len(position.unreadable) + len(data.left_out(self.imageset)),
            "seconds": position.seconds,
            "images_per_second": len(answers) / position.seconds,
            "batches": adapter.counters.batches - began.batches,
            "steps": adapter.counters.steps - began.steps,
            "refused_steps": adapter.counters.refused - began.refused,
            "rolled_back_steps": adapter.counters.rolled_back - began.rolled_back,
            "batches_without_step": position.reasons.total(),
            "most_frequent_reason": position.reasons.most_frequent()[1] or None,
            "most_frequent_reason_batches": position.reasons.most_frequent()[0],
            "clusters": clusters.sizes if clusters else adapter.clusters.sizes if adapter.clusters else None,
            "accuracy": accuracy,
            "labelled_images": labelled,
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


def check_top_k(options: RunOptions, num_classes: int) -> None:
    """Raises where more classes are asked for than there are."""
    if options.top_k > num_classes:
        raise ValueError(f"expected `top_k` to be at most {num_classes}, the model's classes, but got {options.top_k}")


def digest(parts: Iterable[bytes]) -> str:
    """A short hash of a sequence of byte strings."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()[:16]
