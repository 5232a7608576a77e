"""The files of results that a run leaves in its folder."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cafe_tta import data, storage
from cafe_tta.data import Labels
from cafe_tta.runs.progress import Answers
from cafe_tta.runs.sheet import Clusters

SHEET, CLUSTERS = "clusters.png", "clusters.csv"
FILES = ("predictions.csv", "unreadable.csv", "state.safetensors", SHEET, CLUSTERS, "summary.json")


def remove(output: Path) -> None:
    """Removes the files of an earlier run, and nothing else: the folder may hold other files."""
    for name in FILES:
        (output / name).unlink(missing_ok=True)


def write_predictions(
    path: Path, imageset: data.ImageSet, answers: Answers, classes: Sequence[str] | None, both: Answers | None = None
) -> None:
    """The answers, one line an image; `both` adds those of the adapted and of the source model."""
    parts = [("", answers, "")]
    if both is not None:
        parts += [("adapted_", both, ""), ("source_", both, "source_")]
    ranks = range(answers.dtype["label"].shape[0])
    header = [f"{prefix}{name}{_rank(k)}" for prefix, _, _ in parts for k in ranks for name in ("class", "confidence")]

    def cells(row: int) -> Iterator[object]:
        yield imageset.item_name(int(answers["index"][row]))
        for _, part, key in parts:
            for label, share in zip(part[f"{key}label"][row], part[f"{key}confidence"][row], strict=True):
                yield classes[label] if classes else int(label)
                yield f"{share:.6f}"

    _write_csv(path, ("file", *header), (list(cells(row)) for row in range(len(answers))))


def _rank(k: int) -> str:
    return "" if k == 0 else f"_{k + 1}"


def write_clusters(output: Path, imageset: data.ImageSet, clusters: Clusters, method: str, seed: int) -> None:
    """The cluster of every image, and a contact sheet of them."""
    pairs = zip(clusters.indices.tolist(), clusters.numbers.tolist(), strict=True)
    _write_csv(output / CLUSTERS, ("file", "cluster"), ((imageset.item_name(index), number) for index, number in pairs))
    images, count = len(clusters.indices), len(clusters.sizes)
    title = f"{method}: {images:,} images in {count} {'cluster' if count == 1 else 'clusters'}"
    storage.write_bytes(output / SHEET, clusters.sheet(imageset, title, seed))


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


def accuracy(answers: Answers, labels: Labels | None) -> tuple[float | None, int]:
    """Accuracy on the images with a known label, and their number."""
    if labels is None:
        return None, 0
    truth = labels[answers["index"]]
    known = truth >= 0
    if not known.any():
        return None, 0
    return float((answers["label"][known, 0] == truth[known]).mean()), int(known.sum())
