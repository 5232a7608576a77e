"""A folder of image files, flat or with a folder for each class, read one image at a time."""

import glob
import io
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from cafe_tta.data.imageset import Images, Labels, Unreadable, UnreadableImage, files_digest

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".webp", ".tif", ".tiff", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"),
)
# Files that are images, too, and that we cannot read: named as such, instead of passed over.
FOREIGN = (
    *(".heic", ".heif", ".hif", ".jxl", ".svg", ".psd", ".xcf", ".exr", ".hdr"),
    *(".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".raf", ".rw2", ".pef", ".srw"),
)
MAX_PIXELS = "CAFE_TTA_MAX_PIXELS"  # environment variable: the most pixels of an image, instead of Pillow's 89 million
CONTACT_SHEET = "contact-sheet.png"  # drawn by `cafe-tta corrupt` beside its copies
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap height and width
_WARNINGS = threading.Lock()  # Python's warning filters are global: one thread at a time may change them


class FolderSet:
    """Image files under a folder, in the order of their names. Labels come from the first level of folders."""

    read_as = ""  # how a file becomes an image of this set, for the digest

    def __init__(self, root: str | os.PathLike[str], files: Sequence[str] | None = None) -> None:
        self.root = Path(root).expanduser()
        self.name = f"folder:{self.root}"
        found = list(_files(self.root)) if files is None else files
        self.files = sorted(file for file in found if file.lower().endswith(SUFFIXES))  # relative, with forward slashes
        self.foreign = sorted(file for file in found if file.lower().endswith(FOREIGN))
        if CONTACT_SHEET in self.files and _is_made_by_corrupt(self.root):
            self.files.remove(CONTACT_SHEET)
        if not self.files:
            arrays = f"; for its images.npy, say arrays:{root}" if (self.root / "images.npy").is_file() else ""
            if self.foreign:
                more = f" and {len(self.foreign) - 1} more like it" if len(self.foreign) > 1 else ""
                raise FileNotFoundError(f"{self.root / self.foreign[0]}{more}: {_why_foreign(self.foreign[0])}")
            raise FileNotFoundError(
                f"no images in {self.root}; put {', '.join(SUFFIXES[:3])}, .png, .bmp, .webp or .tif files there, "
                f"or one folder of them for each class{arrays}"
            )
        self.classes: tuple[str, ...] | None = None
        self.labels: Labels | None = None
        if all("/" in file for file in self.files):
            folders = [file.split("/", 1)[0] for file in self.files]
            self.classes = tuple(sorted(set(folders)))
            number = {folder: i for i, folder in enumerate(self.classes)}
            self.labels = np.array([number[folder] for folder in folders], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.files)

    def item_name(self, index: int) -> str:
        return self.files[index]

    def images(self, indices: Sequence[int]) -> Images:
        return stack(self.name, [self.read(self.root / self.files[index]) for index in indices])

    def read(self, path: Path) -> Images:
        """One image file (H, W, 3)."""
        return read_image(path)

    def has_one_size(self) -> bool:
        """Whether all images have the same height and width, as far as the headers of their files tell."""
        sizes = {size for file in self.files if (size := _size(self.root / file))}
        return len(sizes) < 2

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return files_digest(self.root, self.files, self.labels, self.read_as)


class FittedFolder(FolderSet):
    """A folder of images that differ in size, each brought to one size as it is read. `read_as` says how."""

    def __init__(self, folder: FolderSet, fit: Callable[[Images], Images], read_as: str) -> None:
        super().__init__(folder.root, folder.files)
        self.name, self.foreign, self.read_as = folder.name, folder.foreign, read_as
        self._fit = fit

    def read(self, path: Path) -> Images:
        return self._fit(super().read(path))

    def has_one_size(self) -> bool:
        return True


def stack(name: str, images: list[Images]) -> Images:
    """Images of one size as one array (n, H, W, 3)."""
    if len({image.shape for image in images}) > 1:
        sizes = sorted({f"{image.shape[1]} x {image.shape[0]}" for image in images})
        raise ValueError(
            f"{name} has images of different sizes ({', '.join(sizes[:3])}, …), which do not fit one array; "
            "read them with data.Loader and a preprocessing, or as data.FittedFolder"
        )
    return np.stack(images) if images else np.zeros((0, 0, 0, 3), dtype=np.uint8)


def load_folder(folder: str) -> FolderSet:
    """The images of a folder."""
    root = Path(folder).expanduser()
    if not folder or not root.is_dir():
        what = f"{folder} is a file" if root.is_file() else f"no folder at {folder!r}"
        raise FileNotFoundError(f"{what}; expected a folder of images, or of one folder of images for each class")
    return FolderSet(folder)


def load_files(pattern: str) -> FolderSet:
    """One image file, or all that a pattern such as `photos/*.jpg` matches."""
    text = os.path.expanduser(pattern)
    found = [text] if os.path.isfile(text) else glob.glob(text, recursive=True)
    files = [Path(file) for file in found if file.lower().endswith(SUFFIXES + FOREIGN) and os.path.isfile(file)]
    if not files:
        what = f"{pattern} is no image file" if found else f"no file matches {pattern!r}"
        raise FileNotFoundError(f"{what}; expected {', '.join(SUFFIXES[:4])}, .png, .bmp, .webp, .tif or other images")
    root = Path(os.path.commonpath([file.parent for file in files]))
    imageset = FolderSet(root, [file.relative_to(root).as_posix() for file in files])
    imageset.name = f"files:{pattern}"
    return imageset


def left_out(imageset: object) -> list[Unreadable]:
    """The files of a folder that are images in formats that we cannot read."""
    foreign: Sequence[str] = getattr(imageset, "foreign", ())
    return [Unreadable(-1, file, _why_foreign(file)) for file in foreign]


def _why_foreign(file: str) -> str:
    return f"{Path(file).suffix.lower()[1:].upper()} files cannot be read; convert it to JPEG or PNG"


def read_image(path: str | os.PathLike[str], upright: bool = True) -> Images:
    """One image file as RGB pixels (H, W, 3), rotated by its EXIF orientation if `upright`.

    Transparency is dropped, 16-bit values are scaled to 8 bits, and of an animation the first frame is read.
    """
    try:
        return _decode(Path(path), upright)
    except MemoryError as error:
        raise UnreadableImage("too large for the memory of this machine") from error
    except Exception as error:  # decoders raise errors of every kind on damaged files
        raise UnreadableImage(_reason(path, error)) from error


def _decode(path: Path, upright: bool) -> Images:
    if path.stat().st_size == 0:
        raise ValueError("the file is empty")
    with path.open("rb") as file:
        return _decode_file(file, upright)


def decode_image(content: bytes | memoryview, max_pixels: int, formats: tuple[str, ...]) -> Images:
    """The content of an image file as upright RGB pixels (H, W, 3). Its size is checked before a pixel is decoded."""
    try:
        if not content:
            raise ValueError("it is empty")
        return _decode_file(io.BytesIO(content), True, max_pixels, formats)
    except MemoryError as error:
        raise UnreadableImage("too large for the memory of this machine") from error
    except Exception as error:  # decoders raise errors of every kind on damaged files
        raise UnreadableImage(_reason("", error)) from error


def _decode_file(
    file: BinaryIO, upright: bool, max_pixels: int | None = None, formats: tuple[str, ...] | None = None
) -> Images:
    from PIL import Image

    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an image that cannot be read is reported once, by us
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # checked before a pixel is decoded
        if allowed := os.environ.get(MAX_PIXELS):
            Image.MAX_IMAGE_PIXELS = _positive(allowed)
        image: Image.Image = Image.open(file, formats=formats)
        orientation = _orientation(image) if upright else 1
    if max_pixels is not None and image.width * image.height > max_pixels:
        raise ValueError(f"{image.width} x {image.height} pixels, but at most {max_pixels:,} are allowed")
    image.load()
    return np.ascontiguousarray(_rotated(_rgb(image), orientation))


def _size(path: Path) -> tuple[int, int] | None:
    """Height and width of the upright image in a file, by its header; None where there is no such header."""
    from PIL import Image

    try:
        with _WARNINGS, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                turned = _orientation(image) in _TURNED
                return (image.width, image.height) if turned else (image.height, image.width)
    except Exception:  # as in read_image; reading it will say why
        return None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected {MAX_PIXELS} to be a number of pixels, but got {text!r}")
    return int(text)


def _orientation(image: "Image") -> int:
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # damaged EXIF data: the pixels may be good all the same
        return 1


def _rotated(image: Images, orientation: int) -> Images:
    """Upright, by EXIF's numbers: 5 to 8 swap the axes, and each of 1 to 8 then mirrors none, one or both of them."""
    if orientation in _TURNED:
        image = image.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    return image


def _rgb(image: "Image") -> Images:
    if image.mode == "F":  # floating-point TIFF: 0..1, or else 0..255
        values = np.nan_to_num(np.asarray(image, dtype=np.float64), nan=0.0)
        scaled = values * 255 if values.max() <= 1 else values
        grey = scaled.clip(0, 255).round().astype(np.uint8)
    elif image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255 instead of scaling
        grey = (np.asarray(image).astype(np.int64).clip(0, 65535) / 257).round().astype(np.uint8)
    else:
        if image.mode == "P":
            image = image.convert("RGBA")  # a palette may hold transparency, which must not become a colour
        return np.array(image.convert("RGB"))
    return np.repeat(grey[..., None], 3, axis=2)


def _reason(path: str | os.PathLike[str], error: Exception) -> str:
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, (Image.DecompressionBombWarning, Image.DecompressionBombError)):
        return (
            f"more than {Image.MAX_IMAGE_PIXELS or 0:,} pixels; shrink it first, or allow more: {MAX_PIXELS}=200000000"
        )
    if isinstance(error, UnidentifiedImageError):
        return "not an image of a known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _is_made_by_corrupt(root: Path) -> bool:
    """Whether `cafe-tta corrupt` wrote this folder; elsewhere, a file of this name is an image of the user."""
    try:
        settings = json.loads((root / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and {"corruptions", "severities", "layout"} <= settings.keys()


def _files(root: Path) -> Iterator[str]:
    seen = set()
    for folder, folders, files in os.walk(root, followlinks=True):  # data sets are often folders of links
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder above would never end
            folders.clear()
            continue
        seen.add(real)
        # Hidden files are not images of the user: thumbnails, the `._name.jpg` of a Mac, folders of version control.
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        for name in files:
            if not name.startswith(".") and name.lower().endswith(SUFFIXES + FOREIGN):
                yield Path(folder, name).relative_to(root).as_posix()
