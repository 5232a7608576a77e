"""Corrupted copies of an image set on disk, made by several processes, to be gone on with after a stop at any moment.

Every copy depends on the settings and on the place of its image in the set alone, never on how the work was cut. What
is finished has its final name; what is not lies in a hidden folder beside it, which goes away in the end.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cafe_tta import corruptions, storage
from cafe_tta.data.arrays import ArraySet
from cafe_tta.data.imageset import ImageSet, Labels, Unreadable, UnreadableImage, equally_spaced

LAYOUTS = ("folder", "arrays", "cifar-c")
FORMATS = ("png", "jpg")
STAND_IN = "a procedural texture, not the published ones: results with frost are non-standard"
_PRESET_SIDES = ((40, "cifar"), (100, "tinyimagenet"))  # up to so many pixels; larger ones are imagenet


@dataclass(frozen=True)
class Settings:
    """All that decides what the copies look like: written to settings.json, and compared with it to go on."""

    version: str  # of this package
    data: str
    digest: str
    limit: int | None
    images: int
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    preset: str
    seed: int
    layout: str
    format: str | None  # of image files
    frost: str | None  # what its textures are, if it is among the corruptions
    classes: tuple[str, ...] | None

    @property
    def domains(self) -> list[tuple[str, int]]:
        return [(corruption, severity) for corruption in self.corruptions for severity in self.severities]


@dataclass(frozen=True, eq=False)
class Job:
    """An image set to copy, and where to."""

    imageset: ImageSet
    chosen: Labels  # (n,) places in the set
    output: Path
    settings: Settings

    @property
    def unfinished(self) -> Path:
        return self.output / ".unfinished"


@dataclass(frozen=True)
class Done:
    """A piece of work that is finished."""

    copies: int
    left_out: tuple[Unreadable, ...] = ()


class Layout(Protocol):
    """How copies lie on disk."""

    def tasks(self, job: Job) -> Iterator[Any]:
        """Pieces of work, each done by itself in any process."""

    def do(self, job: Job, task: Any) -> Done: ...

    def finish(self, job: Job, task: Any) -> None:
        """What is left to do when a task is done, in the first process."""

    def read(self, job: Job, row: int, corruption: str, severity: int) -> Any:
        """A finished copy (H, W, 3), or None where its image was left out."""


def layout(name: str) -> Layout:
    from cafe_tta.data.copies import arrays, files

    return files.Files() if name == "folder" else arrays.Arrays()


def frost_texture(names: tuple[str, ...]) -> str | None:
    if "frost" not in names:
        return None
    return "the published textures" if corruptions.frost_is_standard() else STAND_IN


def choose(count: int, limit: int | None, seed: int) -> Labels:
    """All places, or so many of them, drawn at random: the first images of class folders are all of one class."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).permutation(count)[:limit])


def preset_for(imageset: ImageSet, chosen: Labels) -> str:
    """The preset of the published set whose images are nearest in size: the median of a few, their short side."""
    sides: list[int] = []
    few = chosen[equally_spaced(len(chosen), 9)].tolist()
    for number, index in enumerate([*few, *chosen.tolist()]):
        if number >= len(few) and sides:
            break  # the others are only asked if none of the few can be read
        try:
            sides.append(min(imageset.images([index]).shape[1:3]))
        except UnreadableImage:
            continue
    if not sides:
        raise ValueError(f"none of the {len(chosen)} images of {imageset.name} could be read")
    return next((name for largest, name in _PRESET_SIDES if np.median(sides) <= largest), "imagenet")


def check_preset(name: str) -> str:
    if name not in corruptions.PRESETS:
        near = get_close_matches(name, corruptions.PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown --preset {name!r}{hint}; choose from: {', '.join(corruptions.PRESETS)}")
    return name


def start(job: Job) -> None:
    """Makes the folder, or checks that it holds the same job."""
    output, path = job.output, job.output / "settings.json"
    root = getattr(job.imageset, "root", None)
    if isinstance(root, Path) and output.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{output} is inside the images' own folder {root}; choose an --output elsewhere")
    if path.exists():
        _compare(path, job.settings)
    elif output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} holds other files; choose an --output that is empty or does not exist")
    job.unfinished.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        storage.write_bytes(path, (json.dumps(asdict(job.settings), indent=2) + "\n").encode())


def end(job: Job) -> None:
    shutil.rmtree(job.unfinished, ignore_errors=True)


def write(job: Job, path: Path, content: bytes) -> None:
    """Gives a file its name once it is whole. Without waiting for the disk: it could be made again."""
    temporary = job.unfinished / f"{os.getpid()}.tmp"
    temporary.write_bytes(content)
    try:
        os.replace(temporary, path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary, path)


def is_done(path: Path) -> bool:
    """Whether a file is there, and not empty, as a power cut may leave it."""
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def fitting_one_array(
    imageset: ImageSet, chosen: Labels, advance: Callable[[int], None]
) -> tuple[Labels, tuple[Unreadable, ...]]:
    """Those of the images that can be read, if they are all of one size; and the others."""
    if isinstance(imageset, ArraySet):
        return chosen, ()
    sizes: dict[tuple[int, ...], str] = {}
    left_out: list[Unreadable] = []
    for index in chosen.tolist():
        try:
            sizes.setdefault(imageset.images([index]).shape[1:3], imageset.item_name(index))
        except UnreadableImage as error:
            left_out.append(Unreadable(index, imageset.item_name(index), str(error)))
        if len(sizes) > 1:
            shown = ", ".join(f"{name} has {width} x {height} pixels" for (height, width), name in sizes.items())
            raise ValueError(f"images of different sizes do not fit one array: {shown}; say --layout folder")
        advance(1)
    if not sizes:
        raise ValueError(f"none of the {len(chosen)} images of {imageset.name} could be read")
    return np.setdiff1d(chosen, [item.index for item in left_out]), tuple(left_out)


def _compare(path: Path, settings: Settings) -> None:
    try:
        theirs = dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); choose another --output, or delete the folder") from error
    ours = json.loads(json.dumps(asdict(settings)))
    names = [
        n for n in ours if n not in ("data", "classes") and theirs.get(n) != ours[n]
    ]  # the digest tells data apart
    if names:
        shown = ", ".join(f"{name} {_brief(theirs.get(name))} there, {_brief(ours[name])} now" for name in names)
        raise ValueError(f"{path.parent} was made with other settings: {shown}; choose another --output")


def _brief(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value).lower() if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
