"""What `cafe-tta adapt` leaves in its folder, and what it tells."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cafe_tta import data, storage
from cafe_tta.cli.console import counted, show_facts
from cafe_tta.cli.measure import Measurement
from cafe_tta.data.imageset import Labels
from cafe_tta.source.stats import SourceStats

FILES = ("predictions.csv", "unreadable.csv", "state.safetensors", "summary.json")


def remove_results(output: Path) -> None:
    """Only what a run wrote: the folder may hold other things."""
    for name in FILES:
        (output / name).unlink(missing_ok=True)


def write_predictions(
    path: Path, imageset: data.ImageSet, answers: npt.NDArray[np.void], classes: Sequence[str] | None
) -> None:
    rows = (
        (
            imageset.item_name(int(answer["index"])),
            classes[answer["label"]] if classes else int(answer["label"]),
            f"{answer['confidence']:.6f}",
        )
        for answer in answers
    )
    _write_csv(path, ("file", "class", "confidence"), rows)


def write_unreadable(output: Path, unreadable: list[data.Unreadable]) -> None:
    if unreadable:
        _write_csv(
            output / "unreadable.csv",
            ("file", "why"),
            ((item.name, item.why) for item in sorted(unreadable, key=lambda item: item.index)),
        )


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    storage.write_bytes(path, text.getvalue().encode(errors="surrogateescape"))  # file names need not be valid Unicode


def accuracy(answers: npt.NDArray[np.void], labels: Labels | None) -> tuple[float | None, int]:
    if labels is None:
        return None, 0
    truth = labels[answers["index"]]
    known = truth >= 0
    if not known.any():
        return None, 0
    return float((answers["label"][known] == truth[known]).mean()), int(known.sum())


def measured(measurement: Measurement) -> dict[str, Any]:
    pairs = {
        "alignment": measurement.alignment,
        "frechet_distance": measurement.frechet,
        "accuracy": measurement.accuracy,
    }
    named = {name: None if pair is None else {"before": pair[0], "after": pair[1]} for name, pair in pairs.items()}
    return {"images": measurement.images, **named}


def show(summary: dict[str, Any], output: Path, no_labels: str, stats: SourceStats | None) -> None:
    left_out = summary["unreadable"]
    refused = summary["refused_steps"]
    accuracy = summary["accuracy"]
    facts = [
        ("method", f"{summary['method']}, {summary['mode']}, batches of {summary['options']['batch_size']}"),
        (
            "images",
            f"{summary['images']}{f', {left_out} unreadable left out (see unreadable.csv)' if left_out else ''}",
        ),
        ("time", f"{summary['seconds']:.1f} s, {summary['images_per_second']:.0f} images/s"),
        ("steps", f"{summary['steps']}{f', {refused} refused: not finite' if refused else ''}"),
    ]
    if summary["batches_without_step"]:
        facts.append(("without a step", _without_step(summary)))
    right = f"accuracy unknown: {no_labels}"
    if accuracy is not None:
        right = f"{accuracy:.1%} of {summary['labelled_images']} right"
    facts.append(("answers given", f"{right} (predictions.csv, {summary['mode']})"))
    measured = summary["measured"]
    if measured:
        facts.append(("", ""))
        facts.append(
            ("evaluation mode", f"the model before -> after adapting, on {counted(measured['images'], 'image')}")
        )
        unknown = "unknown: no --stats given" if stats is None else "unknown: the statistics were made without --full"
        for name, key, digits in (
            ("alignment loss", "alignment", ".3f"),
            ("Fréchet distance", "frechet_distance", ".3f"),
        ):
            facts.append((name, _arrow(measured[key], digits) or unknown))
        if measured["accuracy"]:
            facts.append(("accuracy", _arrow(measured["accuracy"], ".1%")))
    facts += [("", ""), ("written", str(output / "predictions.csv")), ("", f"{output}/summary.json, state.safetensors")]
    show_facts(facts)


def _without_step(summary: dict[str, Any]) -> str:
    some, every = summary["batches_without_step"], summary["batches"]
    reason, count = summary["most_frequent_reason"], summary["most_frequent_reason_batches"]
    return f"{some} of {counted(every, 'batch', 'batches')}: {reason}{f' ({count} of them)' if count < some else ''}"


def _arrow(pair: dict[str, float] | None, digits: str) -> str:
    return "" if pair is None else f"{pair['before']:{digits}} -> {pair['after']:{digits}}"
