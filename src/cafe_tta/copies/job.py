"""A job: which images to copy with which corruptions, and the settings by which a stopped one is recognised."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from cafe_tta import corruptions, storage
from cafe_tta._version import __version__
from cafe_tta.corruptions.table import Preset
from cafe_tta.data import ArraySet, FolderSet, ImageSet, Labels, Unreadable, UnreadableImage
from cafe_tta.data.imageset import equally_spaced
from cafe_tta.options import Options, option

PROCEDURAL_FROST = "a procedural texture, not the published ones: results with frost are non-standard"
_PRESET_SIDES = ((40, "cifar"), (100, "tinyimagenet"))  # pixels, at most; larger images are imagenet


@dataclass(frozen=True)
class CopyOptions(Options):
    """Which corrupted copies are made, and how they are stored."""

    corruptions: str | tuple[str, ...] = option(
        "all", "The corruptions: all (the 15 of the paper), held-out (the other 4), or names such as fog,snow."
    )
    severities: str | int | tuple[int, ...] = option(
        "1-5",
        "The severities, such as 5 or 1,3 or 1-3; by default all, from 1 to 5.",
        flag="--severity",
        repeated=True,
        metavar="TEXT",
    )
    preset: Preset | None = option(
        None,
        "Parameters of the corruptions. By default those for the size of the images: cifar up to 40 pixels, "
        "tinyimagenet up to 100, else imagenet.",
    )
    seed: int = option(0, "Seed of the corruptions, and of the choice of images with a limit.", least=0)
    limit: int | None = option(None, "Copy at most this number of images, drawn at random.", least=1)
    layout: Literal["auto", "folder", "cifar-c", "arrays"] = option(
        "auto",
        "How the copies are stored. folder: image files, as ImageNet-C. cifar-c: one array for each corruption, as "
        "CIFAR-10-C. arrays: one for each corruption and severity. auto: folder for image files, cifar-c for arrays.",
    )
    format: Literal["png", "jpg"] | None = option(
        None, "Format of image files: png (default), or jpg of quality 85, as the published ImageNet-C."
    )


@dataclass(frozen=True)
class Settings:
    """Everything that decides what the copies look like: written to settings.json, and compared to continue a job."""

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
    """An image set to copy, and the folder for the copies."""

    imageset: ImageSet
    chosen: Labels  # (n,) indices in the set
    output: Path
    settings: Settings
    left_out: tuple[Unreadable, ...] = ()  # images that could not be read while planning

    @property
    def total(self) -> int:
        """The number of copies."""
        return len(self.chosen) * len(self.settings.domains)

    @property
    def unfinished(self) -> Path:
        return self.output / ".unfinished"

    def write(self, path: Path, content: bytes) -> None:
        """Gives a file its name once it is whole. It is not flushed to disk, since it can be made again."""
        temporary = self.unfinished / f"{os.getpid()}.tmp"
        temporary.write_bytes(content)
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, path)


@dataclass(frozen=True)
class Done:
    """A finished task."""

    copies: int
    left_out: tuple[Unreadable, ...] = ()


class Layout(Protocol):
    """How copies are stored."""

    def tasks(self, job: Job) -> Iterator[Any]:
        """Pieces of work, each done by itself in any process."""

    def do(self, job: Job, task: Any) -> Done: ...

    def finish(self, job: Job, task: Any) -> None:
        """Called in the first process when a task is done."""

    def read(self, job: Job, row: int, corruption: str, severity: int) -> Any:
        """A finished copy (H, W, 3), or None where its image was left out."""


def plan(
    imageset: ImageSet,
    output: str | os.PathLike[str],
    options: CopyOptions | None = None,
    *,
    name: str | None = None,
    advance: Callable[[int], None] = lambda amount: None,
) -> Job:
    """Chooses images and settings, and creates the output folder, or checks that it holds the same job.

    `name` is what worker processes load the image set by. `advance` is called with the number of images that were
    looked at, where they must have one size.
    """
    options = options or CopyOptions()
    names, severities = corruptions.choose_names(options.corruptions), choose_severities(options.severities)
    layout = options.layout
    if layout == "auto":
        layout = "folder" if isinstance(imageset, FolderSet) else "cifar-c"
    if options.format and layout != "folder":
        raise ValueError(f"`format` is for image files, but the layout {layout} has none; choose `layout` folder")
    chosen = _choose_images(len(imageset), options.limit, options.seed)
    left_out: tuple[Unreadable, ...] = ()
    if layout != "folder":
        chosen, left_out = _of_one_size(imageset, chosen, advance)
    settings = Settings(
        version=__version__,
        data=name or imageset.name,
        digest=imageset.digest(),
        limit=options.limit,
        images=len(chosen),
        corruptions=names,
        severities=severities,
        preset=options.preset or preset_for(imageset, chosen),
        seed=options.seed,
        layout=layout,
        format=options.format or "png" if layout == "folder" else None,
        frost=_frost_texture(names),
        classes=imageset.classes,
    )
    job = Job(imageset, chosen, Path(output), settings, left_out)
    _create_or_compare(job)
    return job


def choose_severities(severities: str | int | tuple[int, ...]) -> tuple[int, ...]:
    """Severities by numbers and ranges.

    >>> choose_severities("5,1-2,2"), choose_severities((3, 1))
    ((1, 2, 5), (1, 3))
    """
    chosen: set[int] = set()
    text = ",".join(map(str, severities)) if isinstance(severities, tuple) else str(severities)
    for part in (part.strip() for part in text.split(",")):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end in set("12345") for end in ends) or ends[0] > ends[1]:
            raise ValueError(
                f"expected `severities` to be numbers from 1 to 5, such as 5 or 1,3 or 1-5, but got {part!r}"
            )
        chosen |= set(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(chosen))


def is_done(path: Path) -> bool:
    """Whether a file is there, and not empty, as a power cut may leave it."""
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _choose_images(count: int, limit: int | None, seed: int) -> Labels:
    """All indices, or `limit` of them drawn at random: the first images of class folders are all of one class."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).permutation(count)[:limit])


def _of_one_size(
    imageset: ImageSet, chosen: Labels, advance: Callable[[int], None]
) -> tuple[Labels, tuple[Unreadable, ...]]:
    """The images that can be read, if they are all of one size; and the others."""
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
            raise ValueError(f"images of different sizes do not fit one array: {shown}; choose `layout` folder")
        advance(1)
    if not sizes:
        raise ValueError(f"none of the {len(chosen)} images of {imageset.name} could be read")
    return np.setdiff1d(chosen, [item.index for item in left_out]), tuple(left_out)


def preset_for(imageset: ImageSet, chosen: Labels) -> str:
    """The preset of the published set whose images are nearest in size: the median of a few, their short side."""
    sides: list[int] = []
    few = chosen[equally_spaced(len(chosen), 9)].tolist()
    for number, index in enumerate([*few, *chosen.tolist()]):
        if number >= len(few) and sides:
            break  # the others are only read if none of the few can be
        try:
            sides.append(min(imageset.images([index]).shape[1:3]))
        except UnreadableImage:
            continue
    if not sides:
        raise ValueError(f"none of the {len(chosen)} images of {imageset.name} could be read")
    return next((name for largest, name in _PRESET_SIDES if np.median(sides) <= largest), "imagenet")


def _frost_texture(names: tuple[str, ...]) -> str | None:
    if "frost" not in names:
        return None
    return "the published textures" if corruptions.frost_is_standard() else PROCEDURAL_FROST


def _create_or_compare(job: Job) -> None:
    output, path = job.output, job.output / "settings.json"
    root = getattr(job.imageset, "root", None)
    if isinstance(root, Path) and output.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{output} is inside the images' own folder {root}; choose an `output` elsewhere")
    if path.exists():
        _compare(path, job.settings)
    elif output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} holds other files; choose an `output` that is empty or does not exist")
    job.unfinished.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        storage.write_bytes(path, (json.dumps(asdict(job.settings), indent=2) + "\n").encode())


def _compare(path: Path, settings: Settings) -> None:
    try:
        theirs = dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); choose another `output`, or delete the folder") from error
    theirs, ours = ({k: v for k, v in s.items() if k not in ("data", "classes")} for s in (theirs, asdict(settings)))
    if shown := storage.differences(theirs, ours):  # the digest identifies the data
        raise ValueError(f"{path.parent} was made with other settings: {shown}; choose another `output`")
