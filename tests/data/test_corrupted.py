"""Published corrupted sets, in tiny files of the true layouts; digests."""

import json
import os

import numpy as np
import pytest
from PIL import Image

from cafe_tta import data
from cafe_tta.data.imageset import SAMPLED_IMAGES, array_digest

RANDOM = np.random.default_rng(0)


@pytest.fixture
def cifar_c(tmp_path):
    """Three images, whose every pixel encodes corruption, severity and index."""
    for number, name in enumerate(("gaussian_noise", "fog", "spatter")):
        values = np.arange(15, dtype=np.uint8) + 20 * number  # severity 1 first
        np.save(tmp_path / f"{name}.npy", np.broadcast_to(values[:, None, None, None], (15, 4, 4, 3)))
    np.save(tmp_path / "labels.npy", np.tile(np.array([7, 0, 9], np.uint8), 5))
    return tmp_path


def test_cifar_c_gives_the_images_of_a_domain(cifar_c):
    found = data.load(f"cifar10-c@{cifar_c}")
    assert isinstance(found, data.CorruptedSet)
    assert (len(found), found.labels.tolist(), found.classes) == (3, [7, 0, 9], None)
    assert found.corruptions() == ("gaussian_noise", "fog", "spatter") and found.severities() == (1, 2, 3, 4, 5)
    assert found.corrupted([2, 0], "fog", 5)[:, 0, 0, 0].tolist() == [20 + 14, 20 + 12]
    assert found.corrupted([], "fog", 1).shape == (0, 4, 4, 3)
    assert not isinstance(data.load("digits"), data.CorruptedSet)


def test_one_domain_is_an_image_set_like_any_other(cifar_c):
    fog = data.load(f"cifar100-c:fog-2@{cifar_c}")
    assert not isinstance(fog, data.CorruptedSet)
    assert fog.name == f"cifar100-c:fog-2@{cifar_c}" and fog.item_name(2) == "2"
    (batch,) = data.Loader(fog, None, 8).batches()
    assert batch.images[:, 0, 0, 0].tolist() == [23, 24, 25] and fog.labels.tolist() == [7, 0, 9]
    assert fog.digest() != data.load(f"cifar100-c:fog-1@{cifar_c}").digest()


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda s: s.images([0]), r"holds no clean images; .* say cifar10-c:gaussian_noise-5@"),
        (
            lambda s: s.corrupted([0], "snow", 1),
            "no corruption 'snow'.*it has gaussian_noise, fog, spatter; missing of",
        ),
        (lambda s: s.corrupted([0], "fogg", 1), "did you mean 'fog'"),
        (lambda s: s.corrupted([0], "fog", 0), "no severity 0; it has 1, 2, 3, 4, 5"),
        (lambda s: data.load(s.name.replace("-c", "-c:fog")), "such as cifar10-c:fog-5@DIR, but got 'fog'"),
        (lambda s: data.load(s.name.replace("-c", "-c:snow-5")), "missing of the 15: shot_noise.*from https://zenodo"),
    ],
)
def test_a_corrupted_set_says_what_it_has_not(ask, words, cifar_c):
    with pytest.raises(ValueError, match=words):
        ask(data.load(f"cifar10-c@{cifar_c}"))


@pytest.mark.parametrize("index", [-1, 3])
def test_no_image_is_taken_from_another_severity(index, cifar_c):
    with pytest.raises(IndexError, match="images 0 to 2"):
        data.load(f"cifar10-c@{cifar_c}").corrupted([index], "fog", 2)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("fog", np.zeros((15, 4, 4, 3)), "but got float64"),
        ("fog", np.zeros((14, 4, 4, 3), np.uint8), "5 N x 32 x 32 x 3"),
        ("fog", np.zeros((10, 4, 4, 3), np.uint8), "the same shape as the other files"),
        ("labels", np.zeros(3, int), "expected 15 integer labels"),
        ("labels", np.arange(15), "the same labels for every severity"),
        ("fog", None, "not a whole .npy file"),
    ],
)
def test_files_of_another_shape_are_refused(name, array, words, cifar_c):
    if array is None:
        (cifar_c / "fog.npy").write_bytes((cifar_c / "fog.npy").read_bytes()[:-1])
    else:
        np.save(cifar_c / f"{name}.npy", array)
    with pytest.raises(ValueError, match=words):
        data.load(f"cifar10-c@{cifar_c}")


def test_labels_may_only_be_missing_where_we_made_the_files(cifar_c):
    (cifar_c / "labels.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"no labels\.npy"):
        data.load(f"cifar10-c@{cifar_c}")
    (cifar_c / "settings.json").write_text(json.dumps({"severities": [3, 4, 5], "classes": None}))
    found = data.load(f"cifar10-c@{cifar_c}")
    assert found.labels is None and len(found) == 5 and found.severities() == (3, 4, 5)
    assert found.corrupted([1], "gaussian_noise", 4)[0, 0, 0, 0] == 6


# ImageNet-C


@pytest.fixture
def imagenet_c(tmp_path):
    files = ("n2/b.JPEG", "n2/a.JPEG", "n1/z.JPEG")
    for number, folder in enumerate(
        ("fog/1", "fog/5", "noise/shot_noise/1", "noise/shot_noise/5", "noise/shot_noise/3")
    ):
        for place, file in enumerate(files):
            path = tmp_path / folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8, 3), 40 * number + 10 * place, np.uint8)).save(path)
    return tmp_path


def test_imagenet_c_is_in_the_order_of_its_names_for_every_domain(imagenet_c):
    found = data.load(f"imagenet-c@{imagenet_c}")
    assert isinstance(found, data.CorruptedSet)
    assert [found.item_name(i) for i in range(3)] == ["n1/z.JPEG", "n2/a.JPEG", "n2/b.JPEG"]
    assert found.labels.tolist() == [0, 1, 1] and found.classes == ("n1", "n2")
    assert found.corruptions() == ("shot_noise", "fog") and found.severities() == (1, 5)
    assert found.corrupted([0, 2], "fog", 5)[:, 0, 0, 0].tolist() == [60, 40]
    assert data.load(f"imagenet-c:shot_noise-5@{imagenet_c}").images([1])[0, 0, 0, 0] == 130


def test_an_incomplete_domain_is_refused(imagenet_c):
    found = data.load(f"imagenet-c@{imagenet_c}")
    (imagenet_c / "fog/1/n2/a.JPEG").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 images are missing in .*fog/1, such as n2/a.JPEG"):
        found.corrupted([0], "fog", 1)
    (imagenet_c / "fog/5/n3.JPEG").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="has 1 images that"):
        found.corrupted([0], "fog", 5)
    with pytest.raises(ValueError, match="no corruption 'snow'"):
        found.corrupted([0], "snow", 5)
    with pytest.raises(ValueError, match="no clean images"):
        found.images([0])


# Digests


def test_a_digest_is_of_pixels_and_labels_wherever_they_lie(tmp_path):
    digits = data.load("digits:test")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "images.npy", digits.array)
        np.save(tmp_path / name / "labels.npy", digits.labels.astype(np.uint8))
    one, two = (data.load(f"arrays:{tmp_path / name}") for name in ("one", "two"))
    assert one.digest() == two.digest() == digits.digest() and len(one.digest()) == 64
    assert data.ArraySet("x", digits.array).digest() != digits.digest()
    changed = digits.array.copy()
    changed[500, 3, 3, 1] ^= 1
    assert data.ArraySet("x", changed, digits.labels).digest() != digits.digest()
    assert data.ArraySet("x", digits.array.reshape(896, 16, 64, 3), digits.labels).digest() != digits.digest()


def test_large_arrays_are_sampled():
    images = RANDOM.integers(0, 256, (5 * SAMPLED_IMAGES, 2, 2, 3), dtype=np.uint8)
    before = array_digest(images, None, whole=10)
    images[1] ^= 1
    assert array_digest(images, None, whole=10) == before
    images[-1] ^= 1
    assert array_digest(images, None, whole=10) != before


def test_a_folder_has_a_digest_of_names_sizes_labels_and_some_content(tmp_path):
    for place in ("one", "two"):
        for file in ("cat/1.png", "dog/2.png", "dog/gone.png"):
            path = tmp_path / place / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if file == "dog/gone.png":
                os.symlink("nowhere", path)
            else:
                path.write_bytes(file.encode())
    one, two = data.load(tmp_path / "one"), data.load(tmp_path / "two")
    assert one.digest() == two.digest()
    before = one.digest()
    (tmp_path / "one/cat/1.png").write_bytes(b"CAT/1.png")
    assert one.digest() == before  # of this object, once and for all
    assert data.load(tmp_path / "one").digest() != before
    (tmp_path / "two/cat").rename(tmp_path / "two/cow")
    assert data.load(tmp_path / "two").digest() != before


def test_corrupted_sets_have_digests(cifar_c, imagenet_c):
    before = data.load(f"cifar10-c@{cifar_c}").digest()
    np.save(cifar_c / "fog.npy", np.zeros((15, 4, 4, 3), np.uint8))
    assert data.load(f"cifar10-c@{cifar_c}").digest() != before
    before = data.load(f"imagenet-c@{imagenet_c}").digest()
    (imagenet_c / "fog/5/n2/a.JPEG").write_bytes(b"another")
    after = data.load(f"imagenet-c@{imagenet_c}").digest()
    (imagenet_c / "fog/5").rename(imagenet_c / "fog/2")
    assert len({before, after, data.load(f"imagenet-c@{imagenet_c}").digest()}) == 3
