import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from cafe_tta import data, models
from cafe_tta.data.folder import read_image


def write(path: Path, array: np.ndarray, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return path


def grey(value: int, height: int = 4, width: int = 4) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def small(images: np.ndarray) -> torch.Tensor:
    """A preprocessing: the mean colour, as an image of one pixel."""
    return torch.from_numpy(images.astype(np.float32).mean((1, 2)))[:, :, None, None]


# The digits


def test_the_digits_are_split_into_halves_that_hold_every_class_alike():
    every, train, test = (data.load(spec) for spec in ("digits", "digits:train", "digits:test"))
    assert len(every) == len(train) + len(test) == 1797
    assert np.abs(np.bincount(train.labels) - np.bincount(test.labels)).max() <= 1
    assert every.classes == tuple("0123456789")


def test_the_split_of_the_digits_never_changes():
    train = data.load("digits:train")
    assert train.labels[:12].tolist() == [3, 5, 7, 8, 9, 3, 4, 5, 6, 8, 9, 0]
    assert zlib.crc32(train.labels.tobytes()) == 1638400407
    images = train.images([0, 5])
    assert images.shape == (2, 32, 32, 3) and images.dtype == np.uint8
    np.testing.assert_allclose(images[0, ::6, 16, 0], [242, 199, 230, 115, 23, 224], atol=1)


# Names


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("digit:train", "did you mean 'digits:train'?"),
        ("digits:tset", "did you mean 'digits:test'?"),
        ("arays:x", "did you mean 'arrays:x'?"),
        (
            "nothing-here",
            "choose from: a folder of images, an image file, a pattern such as",
        ),
        ("", "got nothing"),
    ],
)
def test_an_unknown_name_is_answered_with_what_there_is(spec, words):
    with pytest.raises(ValueError, match="choose from") as caught:
        data.load(spec)
    assert words in str(caught.value)


@pytest.fixture
def photos(tmp_path):
    """Six images in two folders, and files that we cannot read."""
    for name in ("a/1.png", "a/2.jpg", "a/3.PNG", "b/1.png", "b/2.png", "b/deep/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (len(name), 0, 0)).save(tmp_path / name)
    for name in ("a/phone.HEIC", "b/camera.cr2", "b/notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "files", "classes"),
    [
        ("a/2.jpg", ["2.jpg"], None),
        ("a/*.png", ["1.png"], None),
        ("*/1.png", ["a/1.png", "b/1.png"], ("a", "b")),
        ("b/**/*.png", ["1.png", "2.png", "deep/3.png"], None),
        ("a/[12].*", ["1.png", "2.jpg"], None),
    ],
)
def test_files_and_patterns(photos, pattern, files, classes):
    imageset = data.load(f"{photos}/{pattern}")
    assert (imageset.files, imageset.classes, len(imageset)) == (files, classes, len(files))
    assert imageset.images([0]).shape == (1, 4, 4, 3) and imageset.name == f"files:{photos}/{pattern}"


def test_files_that_are_no_images_are_told(photos):
    with pytest.raises(FileNotFoundError, match=r"notes.txt is no image file; expected .jpg"):
        data.load(photos / "b/notes.txt")
    with pytest.raises(FileNotFoundError, match=r"no file matches '.*\*.gif'"):
        data.load(f"{photos}/*.gif")
    with pytest.raises(FileNotFoundError, match=r"phone.HEIC: HEIC files cannot be read; convert it to JPEG or PNG"):
        data.load(photos / "a/phone.HEIC")


def test_images_in_foreign_formats_are_named_as_unreadable(photos):
    imageset = data.load(photos)
    assert len(imageset) == 6
    assert [(item.name, item.why.split()[0]) for item in data.left_out(imageset)] == [
        ("a/phone.HEIC", "HEIC"),
        ("b/camera.cr2", "CR2"),
    ]
    assert data.left_out(data.load("digits:test")) == []


@pytest.mark.parametrize("spec", ["arrays:", "arrays:{}", "folder:{}/none", "{}"])
def test_missing_data_is_answered_with_what_to_put_where(spec, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"images\.npy|expected a folder of images|put \.jpg"):
        data.load(spec.format(tmp_path))


# Arrays


def test_arrays_stay_on_disk_until_they_are_asked_for(tmp_path):
    np.save(tmp_path / "images.npy", np.arange(5 * 2 * 2 * 3, dtype=np.uint8).reshape(5, 2, 2, 3))
    np.save(tmp_path / "labels.npy", np.array([0, 1, 0, 1, 1], np.uint8))
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    arrays = data.load(f"arrays:{tmp_path}")
    assert isinstance(arrays.array, np.memmap)
    assert arrays.labels.dtype == np.int64 and arrays.classes == ("cat", "dog")
    assert arrays.images([4, 0])[:, 0, 0, 0].tolist() == [48, 0]
    assert arrays.item_name(3) == "3"


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.zeros((2, 4, 4, 3)), None, "expected images of uint8"),
        (np.zeros((2, 3, 4, 4), np.uint8), None, "expected images of uint8"),
        (np.zeros((0, 4, 4, 3), np.uint8), None, "at least one image"),
        (np.zeros((2, 4, 4, 3), np.uint8), np.zeros(3, int), "expected 2 integer labels"),
        (np.zeros((2, 4, 4, 3), np.uint8), np.array([-1, 0]), "expected labels at least 0"),
        (np.zeros((2, 4, 4, 3), np.uint8), np.array([None, 0]), "not a whole .npy file"),
    ],
)
def test_arrays_of_another_kind_are_refused(images, labels, words, tmp_path):
    np.save(tmp_path / "images.npy", images)
    if labels is not None:
        np.save(tmp_path / "labels.npy", labels, allow_pickle=True)
    with pytest.raises(ValueError, match=words):
        data.load(f"arrays:{tmp_path}")


# Folders


def test_a_flat_folder_has_no_labels_and_sorted_names(tmp_path):
    for name in ("b.PNG", "a.jpg", "deep/er/c.webp", ".hidden.png", "notes.txt", "__MACOSX/a.png"):
        if name.endswith("txt"):
            (tmp_path / name).write_text("no image")
        else:
            write(tmp_path / name, grey(100))
    folder = data.load(tmp_path)
    assert folder.files == ["a.jpg", "b.PNG", "deep/er/c.webp"]
    assert folder.labels is None and folder.classes is None


def test_class_folders_give_the_labels(tmp_path):
    for name in ("dog/1.png", "cat/x/2.png", "cat/1.png"):
        write(tmp_path / name, grey(1))
    folder = data.load(f"folder:{tmp_path}")
    assert folder.classes == ("cat", "dog") and folder.labels.tolist() == [0, 0, 1]


def test_a_folder_that_links_to_itself_ends(tmp_path):
    write(tmp_path / "a" / "1.png", grey(1))
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert data.load(tmp_path).files == ["a/1.png"]


def test_a_folder_called_like_a_data_set_is_a_folder(tmp_path, monkeypatch):
    write(tmp_path / "digits" / "1.png", grey(1))
    monkeypatch.chdir(tmp_path)
    assert len(data.load("digits")) == 1


def test_images_of_different_sizes_are_only_read_one_by_one(tmp_path):
    write(tmp_path / "1.png", grey(1, 4, 4))
    write(tmp_path / "2.png", grey(1, 8, 6))
    folder = data.load(tmp_path)
    with pytest.raises(ValueError, match="different sizes"):
        folder.images([0, 1])
    with pytest.raises(ValueError, match="different sizes"):
        list(data.Loader(folder, None, 2))


# Kinds of images


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_their_orientation_says(orientation, tmp_path):
    array = np.random.default_rng(0).integers(0, 255, (3, 5, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = write(tmp_path / "1.png", array, exif=exif)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    np.testing.assert_array_equal(read_image(path), expected)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F"])
def test_every_kind_of_pixel_becomes_rgb(mode, tmp_path):
    if mode == "I;16":
        image = Image.fromarray(np.full((4, 4), 65535, np.uint16))
    elif mode == "I":
        image = Image.fromarray(np.full((4, 4), 65535, np.int32))
    elif mode == "F":
        image = Image.fromarray(np.full((4, 4), 1.0, np.float32))
    else:
        image = Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode)
    path = tmp_path / ("1.png" if mode in ("1", "L", "LA", "P", "RGBA", "I;16") else "1.tif")
    image.save(path)
    found = read_image(path)
    assert found.shape == (4, 4, 3) and found.dtype == np.uint8
    assert found.min() >= 254


def test_sixteen_bits_are_scaled_not_cut_off(tmp_path):
    path = tmp_path / "1.png"
    Image.fromarray(np.array([[0, 257 * 100, 65535]], np.uint16)).save(path)
    assert read_image(path)[0, :, 0].tolist() == [0, 100, 255]


def test_a_transparent_palette_is_read_without_a_warning(tmp_path):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(tmp_path / "1.png", transparency=bytes([0, 128]))
    assert read_image(tmp_path / "1.png")[0, 0].tolist() == [10, 20, 30]


# Images that cannot be read


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return start + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def whole_png() -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


BROKEN = {
    "empty.png": (b"", "empty"),
    "text.jpg": (b"hello", "not an image"),
    "half.png": (whole_png()[:500], "truncated"),
    "bomb.png": (png_header(10_000, 10_000), "pixels; shrink it first"),
    "big-bomb.png": (png_header(60_000, 60_000), "pixels; shrink it first"),
}


def test_broken_images_are_listed_and_left_out(tmp_path):
    for name, (content, _) in BROKEN.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    for number in range(5):
        write(tmp_path / f"good{number}.png", grey(number, 4 + number, 7))
    unreadable: list[data.Unreadable] = []
    found = list(data.Loader(data.load(tmp_path), small, 2).batches(unreadable=unreadable))
    assert [len(batch.images) for batch in found] == [2, 2, 1]
    assert [name for batch in found for name in batch.names] == [f"good{i}.png" for i in range(5)]
    assert torch.cat([batch.images for batch in found])[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    whys = {item.name: item.why for item in unreadable}
    assert whys.keys() == BROKEN.keys() | {"gone.png"}
    for name, (_, words) in BROKEN.items():
        assert words in whys[name]


def test_larger_images_are_read_where_the_environment_allows_them(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # restored afterwards, though reading changes it
    write(tmp_path / "1.png", grey(7, 12, 30))
    with pytest.raises(data.UnreadableImage, match="^more than 100 pixels; shrink it first, or allow more: CAFE_"):
        read_image(tmp_path / "1.png")
    monkeypatch.setenv("CAFE_TTA_MAX_PIXELS", "360")
    assert read_image(tmp_path / "1.png").shape == (12, 30, 3)
    monkeypatch.setenv("CAFE_TTA_MAX_PIXELS", "359")
    with pytest.raises(data.UnreadableImage, match="^more than 359 pixels"):
        read_image(tmp_path / "1.png")
    monkeypatch.setenv("CAFE_TTA_MAX_PIXELS", "many")
    with pytest.raises(data.UnreadableImage, match="^expected CAFE_TTA_MAX_PIXELS to be a number of pixels, but got "):
        read_image(tmp_path / "1.png")


def test_images_of_different_sizes_can_be_read_at_one(tmp_path):
    """Each is what the preprocessing makes of it alone."""
    sizes = [(40, 30), (32, 32), (33, 64)]
    random = np.random.default_rng(0)
    for number, (height, width) in enumerate(sizes):
        write(tmp_path / f"{number}.png", random.integers(0, 255, (height, width, 3), dtype=np.uint8))
    folder, half = data.load(tmp_path), (0.5, 0.5, 0.5)
    assert not folder.has_one_size() and data.load(tmp_path / "1.png").has_one_size()
    preprocessing = models.Preprocessing(24, half, half, resize=28)
    fitted = data.FittedFolder(folder, preprocessing.fit, "24 px")
    alone = [preprocessing(folder.images([number])) for number in range(3)]
    assert torch.equal(preprocessing(fitted.images([0, 1, 2])), torch.cat(alone))
    assert fitted.name == folder.name and fitted.digest() != folder.digest()


def test_a_turned_photo_has_the_size_that_it_is_read_at(tmp_path):
    write(tmp_path / "1.jpg", grey(1, 20, 30))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 30)).save(tmp_path / "2.jpg", exif=exif)
    folder = data.load(tmp_path)
    assert folder.has_one_size() and folder.images([0, 1]).shape == (2, 20, 30, 3)


@given(st.binary(max_size=300), st.integers(0, 2000))
def test_no_file_whatever_its_content_stops_a_stream(tmp_path_factory, junk, place):
    path = tmp_path_factory.mktemp("junk") / "1.png"
    whole = whole_png()
    path.write_bytes(whole[:place] + junk + whole[place + len(junk) :])
    try:
        assert read_image(path).ndim == 3
    except data.UnreadableImage as error:
        assert str(error)


# Batches


def numbered(count: int) -> data.ArraySet:
    return data.ArraySet(
        "numbers", np.arange(count, dtype=np.uint8)[:, None, None, None] * np.ones((2, 2, 3), np.uint8)
    )


def test_batches_without_a_preprocessing_are_the_pixels():
    (batch,) = data.Loader(numbered(3), None, 4).batches()
    assert batch.images.dtype == torch.uint8 and batch.images.shape == (3, 2, 2, 3)


@given(count=st.integers(1, 20), size=st.integers(1, 7), workers=st.integers(0, 2))
def test_batches_come_in_order_whoever_reads_them(count, size, workers):
    order = np.random.default_rng(count).permutation(count)
    found = list(data.Loader(numbered(count), small, size, order=order, workers=workers).batches())
    assert np.concatenate([batch.indices for batch in found]).tolist() == order.tolist()
    assert all(len(batch.images) == size for batch in found[:-1])
    assert found[-1].consumed == count


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_where_it_was_left(workers, tmp_path):
    for number in range(9):
        write(tmp_path / f"{number}.png", grey(number))
    (tmp_path / "2x.png").write_bytes(b"")
    folder = data.load(tmp_path)
    whole = list(data.Loader(folder, small, 2).batches())
    for stop, batch in enumerate(whole):
        rest = list(data.Loader(folder, small, 2, workers=workers).batches(batch.consumed))
        assert [other.names for other in rest] == [other.names for other in whole[stop + 1 :]]


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 1, "workers": -1}])
def test_batches_refuse_impossible_numbers(options):
    with pytest.raises(ValueError, match="expected `"):
        data.Loader(numbered(1), **options)


def test_a_loader_gives_labels_and_reports_what_it_read_on_every_pass(tmp_path):
    for number in range(5):
        write(tmp_path / f"{number}.png", grey(number))
    (tmp_path / "3.png").write_bytes(b"")
    amounts: list[int] = []
    loader = data.Loader(data.load(tmp_path), small, 2, labels=np.arange(10, 15), advance=amounts.append)
    for _ in range(2):
        amounts.clear()
        assert [labels.tolist() for _, labels in loader] == [[10, 11], [12, 14]]
        assert amounts == [2, 3] and [item.name for item in loader.unreadable] == ["3.png"]


def test_a_data_set_is_added_with_a_reader_and_a_line(monkeypatch):
    monkeypatch.setitem(
        data.DATASETS, "numbers", data.NamedSet(lambda rest: numbered(int(rest)), ("numbers:N",), False)
    )
    assert len(data.load("numbers:3")) == 3
    with pytest.raises(ValueError, match=r"did you mean 'numbers:3'\?; choose from: .*, numbers:N"):
        data.load("number:3")


@pytest.mark.parametrize(
    ("names", "classes", "expected"),
    [
        (("cat", "dog"), ("dog", "cat", "owl"), [1, 0, 0]),  # by name, in the model's order
        (("cat", "emu"), ("dog", "cat", "owl"), [1, -1, -1]),
        (("2", "7"), None, [2, -1, -1]),  # folders that are called by their numbers
        (None, None, [0, 1, 1]),
        (("a", "b", "c"), None, [0, 1, 1]),  # as many classes as the model has
        (("emu", "ibis"), ("dog", "cat", "owl"), "no class folder is called like a class of the model"),
        (("a", "b"), None, "there are 2 classes, but the model has 3, without names"),
    ],
)
def test_labels_become_the_models_numbers(names, classes, expected):
    images = data.ArraySet("toy", numbered(3).array, np.array([0, 1, 1]), names)
    labels, reason = data.match_labels(images, classes, num_classes=3)
    assert (reason if labels is None else labels.tolist()) == expected
