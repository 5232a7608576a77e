"""Data sets with a name, in tiny files of the true layouts."""

import gzip
import hashlib
import pickle
import struct
import tarfile
import urllib.request
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from cafe_tta import data
from cafe_tta.data.imagenet import central
from cafe_tta.models import import_torchvision

datasets = import_torchvision().datasets
RANDOM = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    """Nothing of the machine that runs the tests, and no internet."""

    def refuse(*args, **options):
        raise URLError("no internet in tests")

    monkeypatch.delenv("CAFE_TTA_DOWNLOAD", raising=False)
    monkeypatch.setenv("CAFE_TTA_DATA", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Two images a batch, in the files of CIFAR-10, with checksums to match. Returns the images and the labels."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    content = {}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        content[name] = (pixels(2, 3072), RANDOM.integers(0, 10, 2).tolist())
        (folder / name).write_bytes(pickle.dumps({"data": content[name][0], "labels": content[name][1]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    reader = datasets.CIFAR10
    for attribute in ("train_list", "test_list"):
        known = [[name, md5(folder / name)] for name, _ in getattr(reader, attribute)]
        monkeypatch.setattr(reader, attribute, known)
    monkeypatch.setitem(reader.meta, "md5", md5(folder / "batches.meta"))
    return content


def test_cifar_is_read_with_its_classes_and_its_channels_last(cifar, tmp_path):
    test, train = data.load("cifar10"), data.load(f"cifar10:train@{tmp_path}")
    assert (test.name, len(test), len(train), test.classes) == ("cifar10:test", 2, 10, tuple("abcdefghij"))
    planes, labels = cifar["test_batch"]
    np.testing.assert_array_equal(test.images([1])[0, :, :, 2], planes[1, 2048:].reshape(32, 32))
    assert test.labels.tolist() == labels
    assert train.labels[:2].tolist() == cifar["data_batch_1"][1]


def test_a_damaged_file_is_named(cifar, tmp_path):
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(FileNotFoundError, match=r"test_batch is damaged .* put cifar-10-python\.tar\.gz into"):
        data.load("cifar10:test")


def test_a_missing_file_is_named(cifar, tmp_path):
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"not complete in .*: cifar-10-batches-py/data_batch_3 is missing; put"
    ):
        data.load("cifar10:test")


def test_an_archive_that_is_there_is_unpacked_without_a_download(cifar, tmp_path, monkeypatch):
    archive, folder = tmp_path / "cifar-10-python.tar.gz", tmp_path / "cifar-10-batches-py"
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, folder.name)
    for path in folder.iterdir():
        path.unlink()
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", md5(archive))
    assert len(data.load("cifar10:test")) == 2


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "cifar10",
            r"no cifar10 in {root}; put cifar-10-python\.tar\.gz into {root}.*from https://www\.cs\.toronto",
        ),
        ("cifar100:train", r"no cifar100 in .*put cifar-100-python\.tar\.gz into {root}.*CAFE_TTA_DOWNLOAD=1"),
        ("svhn:test", r"no svhn in {root}; put test_32x32\.mat into {root}, from http://ufldl"),
        ("mnist", r"no mnist in .*put MNIST/raw/train-images-idx3-ubyte\.gz, .* into {root}"),
        ("imagenet", r"put the 1000 class folders into {root}/val or .*ILSVRC2012_img_val\.tar of https://image-net"),
        ("cifar10-c", r"{root}/CIFAR-10-C; expected .* from https://zenodo.*missing: gaussian_noise\.npy, shot_noise"),
        ("imagenet-c@{root}/x", r"no ImageNet-C at {root}/x; expected .*fog/5/n01440764"),
    ],
)
def test_missing_data_is_answered_with_what_to_put_where(spec, words, tmp_path):
    with pytest.raises(FileNotFoundError, match=words.format(root=tmp_path)) as caught:
        data.load(spec.format(root=tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["cifar10", "svhn", "mnist"])
def test_a_download_without_internet_fails_with_one_line(kind, tmp_path, monkeypatch):
    with pytest.raises(
        RuntimeError, match=f"could not download {kind} from http.*no internet in tests.*into {tmp_path}"
    ):
        data.load(kind, download=True)
    monkeypatch.setenv("CAFE_TTA_DOWNLOAD", "1")
    with pytest.raises(RuntimeError, match="could not download") as caught:
        data.load(kind)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cifar10:tset", "did you mean 'cifar10:test'?"),
        ("imagenet:test", "choose from: imagenet:val, imagenet:train"),
        ("cifar10:test@", "expected a folder after the @"),
        ("cifar:test", "did you mean 'cifar10:test'?"),
        ("cifr10", "did you mean 'cifar10'?"),
        ("digits@/x", "no folder at 'digits@/x'"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(spec, words):
    with pytest.raises(ValueError) as caught:
        data.load(spec)
    assert words in str(caught.value)


def test_svhn_calls_the_digit_zero_zero(tmp_path, monkeypatch):
    images = pixels(32, 32, 3, 3)
    savemat(tmp_path / "train_32x32.mat", {"X": images, "y": np.array([[10], [1], [9]], np.uint8)})
    monkeypatch.setitem(datasets.SVHN.split_list, "train", ["", "train_32x32.mat", md5(tmp_path / "train_32x32.mat")])
    svhn = data.load("svhn:train")
    assert svhn.labels.tolist() == [0, 1, 9] and svhn.classes == tuple("0123456789")
    np.testing.assert_array_equal(svhn.images([2])[0], images[..., 2])


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">I{values.ndim}I", 0x800 + values.ndim, *values.shape) + values.tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_keeps_its_size_and_becomes_rgb(packed, tmp_path, monkeypatch):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = pixels(4, 28, 28)
    resources = []
    for part in ("train", "t10k"):
        for kind, values in (("images-idx3", images), ("labels-idx1", np.array([3, 0, 9, 1], np.uint8))):
            path = raw / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))
            resources.append((path.name if packed else f"{path.name}.gz", md5(path)))
    monkeypatch.setattr(datasets.MNIST, "resources", resources)
    mnist = data.load("mnist:test")
    assert mnist.labels.tolist() == [3, 0, 9, 1]
    assert mnist.images([0, 1]).shape == (2, 28, 28, 3)
    np.testing.assert_array_equal(mnist.images([2])[0], np.repeat(images[2][..., None], 3, axis=2))
    if not packed:
        (raw / "t10k-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03")
        with pytest.raises(FileNotFoundError, match=r"mnist cannot be read: one of .* is damaged"):
            data.load("mnist:test")


# ImageNet


def photo(path: Path, height: int, width: int, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    small = Image.fromarray(pixels(height // 8, width // 8, 3))
    small.resize((width, height)).save(path, **options)
    return path


def test_imagenet_is_cropped_as_torchvision_does_it(tmp_path):
    transforms = import_torchvision().transforms
    exif = Image.Exif()
    exif[0x0112] = 6  # torchvision does not turn images, and no published number was made with turned ones
    for number, size in enumerate([(300, 401), (401, 300), (256, 256), (97, 65), (513, 270)]):
        photo(tmp_path / "val" / f"n{number % 2}" / f"{number}.JPEG", *size, exif=exif)
    imagenet = data.load("imagenet")
    assert imagenet.images([0, 4]).shape == (2, 224, 224, 3)
    theirs = datasets.ImageFolder(tmp_path / "val")
    assert imagenet.labels.tolist() == theirs.targets and list(imagenet.classes) == theirs.classes
    crop = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])
    for index in range(5):
        np.testing.assert_array_equal(imagenet.images([index])[0], np.asarray(crop(theirs[index][0])))


def test_images_of_all_thousand_classes_have_the_numbers_of_every_model(tmp_path):
    for number in range(1000):
        path = tmp_path / "imagenet" / "val" / f"n{number:08d}" / "1.JPEG"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    imagenet = data.load("imagenet:val")
    assert imagenet.classes is None and imagenet.labels.tolist() == list(range(1000))
    with pytest.raises(data.UnreadableImage, match="empty"):
        imagenet.images([0])


def test_imagenet_without_class_folders_is_refused(tmp_path):
    photo(tmp_path / "val" / "1.JPEG", 64, 64)
    with pytest.raises(ValueError, match="not in class folders"):
        data.load("imagenet:val")


def test_an_image_of_the_right_size_is_only_cropped():
    image = pixels(256, 300, 3)
    np.testing.assert_array_equal(central(image), image[16:240, 38:262])
