"""Copies as image files: DIR/<corruption>/<severity>/<path of the image>, the layout of ImageNet-C."""

import io
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath

import numpy as np

from cafe_tta import corruptions
from cafe_tta.copies.job import Done, Job, is_done
from cafe_tta.data.folder import FolderSet, read_image
from cafe_tta.data.imageset import Images, ImageSet, Unreadable, UnreadableImage

JPEG_QUALITY = 85  # as the published ImageNet-C files
IMAGES_PER_TASK = 64
BATCH_BYTES = 2**23  # images of one size that are corrupted together
HELD_BYTES = 2**26  # images that wait for others of their size
_JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif")


class Files:
    """Image files, every domain in folders of its own."""

    def tasks(self, job: Job) -> Iterator[slice]:
        for first in range(0, len(job.chosen), IMAGES_PER_TASK):
            yield slice(first, min(first + IMAGES_PER_TASK, len(job.chosen)))

    def do(self, job: Job, task: slice) -> Done:
        """Reads every image once, and makes the copies of it that are not there."""
        left_out: dict[int, Unreadable] = {}
        by_size: dict[tuple[int, ...], list[tuple[int, Images]]] = {}
        held = 0  # bytes
        for index in job.chosen[task].tolist():
            if all(is_done(target(job, index, *domain)) for domain in job.settings.domains):
                continue
            try:
                (image,) = job.imageset.images([index])
            except (UnreadableImage, MemoryError) as error:
                why = str(error) or "too large for the memory of this machine"
                left_out[index] = Unreadable(index, job.imageset.item_name(index), why)
                continue
            by_size.setdefault(image.shape, []).append((index, image))
            held += image.nbytes
            full = [size for size, batch in by_size.items() if len(batch) * batch[0][1].nbytes >= BATCH_BYTES]
            for size in list(by_size) if held >= HELD_BYTES else full:
                held -= len(by_size[size]) * by_size[size][0][1].nbytes
                _copy(job, by_size.pop(size), left_out)
        for batch in by_size.values():
            _copy(job, batch, left_out)
        return Done((task.stop - task.start) * len(job.settings.domains), tuple(left_out.values()))

    def finish(self, job: Job, task: slice) -> None:
        pass

    def read(self, job: Job, row: int, corruption: str, severity: int) -> Images | None:
        path = target(job, int(job.chosen[row]), corruption, severity)
        return read_image(path) if is_done(path) else None


def target(job: Job, index: int, corruption: str, severity: int) -> Path:
    return job.output / corruption / str(severity) / _names(job)[index]


def _copy(job: Job, batch: list[tuple[int, Images]], left_out: dict[int, Unreadable]) -> None:
    settings = job.settings
    for corruption, severity in settings.domains:
        rest = [(index, image) for index, image in batch if not is_done(target(job, index, corruption, severity))]
        if not rest:
            continue
        indices, images = [index for index, _ in rest], np.stack([image for _, image in rest])
        try:
            made = corruptions.corrupt(images, corruption, severity, settings.seed, settings.preset, indices)
        except (ValueError, MemoryError) as error:  # such as an image of too few pixels
            why = str(error) or f"too large for {corruption} in the memory of this machine"
            left_out |= {i: Unreadable(i, job.imageset.item_name(i), why) for i in indices}
            continue
        for index, image in zip(indices, made, strict=True):
            job.write(target(job, index, corruption, severity), encode(image, settings.format or "png"))


def encode(image: Images, kind: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    if kind == "jpg":
        Image.fromarray(image).save(file, "JPEG", quality=JPEG_QUALITY, optimize=True)
    else:
        Image.fromarray(image).save(file, "PNG", compress_level=1)  # three times as fast, a tenth larger
    return file.getvalue()


@lru_cache(maxsize=4)
def _names(job: Job) -> tuple[str, ...]:
    """The names of the copies: those of the images, with the suffix of the format."""
    imageset, kind = job.imageset, job.settings.format or "png"
    if not isinstance(imageset, FolderSet):
        digits = len(str(len(imageset) - 1))
        return tuple(f"{_class(imageset, index)}{index:0{digits}d}.{kind}" for index in range(len(imageset)))
    names = [_renamed(file, kind) for file in imageset.files]
    common = {name for name, count in Counter(names).items() if count > 1}  # a.bmp and a.png would both be a.png
    return tuple(f"{f}.{kind}" if n in common else n for f, n in zip(imageset.files, names, strict=True))


def _renamed(file: str, kind: str) -> str:
    path = PurePosixPath(file)
    fits = path.suffix.lower() in (_JPEG_SUFFIXES if kind == "jpg" else (".png",))
    return file if fits else str(path.with_suffix(f".{kind}"))


def _class(imageset: ImageSet, index: int) -> str:
    if imageset.labels is None:
        return ""
    label = int(imageset.labels[index])
    name = str(label) if imageset.classes is None else imageset.classes[label]
    return f"{name.replace('/', '_').replace(chr(92), '_').lstrip('.') or label}/"
