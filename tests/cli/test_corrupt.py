import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from cafe_tta import corruptions, data
from cafe_tta.cli import app
from cafe_tta.copies import choose_severities
from cafe_tta.corruptions import CORRUPTIONS, Corruption, choose_names
from cafe_tta.data.folder import read_image

runner = CliRunner()


def run(*args, code=0):
    """Runs the command in this process; if it fails, it must say why in one line."""
    result = runner.invoke(app, ["corrupt", *map(str, args)])
    assert result.exit_code == code, result.output
    if code == 2:
        assert re.fullmatch(r"error: .+\n", result.stderr), result.stderr
    return result


def files_under(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def photos(tmp_path):
    """A folder with images of two sizes, a small one, two that cannot be read, and two with one stem."""
    digits = data.load("digits:test")
    for number in range(8):
        path = tmp_path / "photos" / f"c{number % 2}" / f"{number}.{'jpg' if number < 4 else 'bmp'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images([number])[0][: 32 - 4 * (number % 3 == 0)]).save(path)
    Image.fromarray(digits.images([0])[0]).save(tmp_path / "photos/c0/4.png")
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(tmp_path / "photos/c0/tiny.png")
    (tmp_path / "photos/c1/bad.jpg").write_text("words")
    (tmp_path / "photos/c1/empty.png").write_bytes(b"")
    return tmp_path / "photos"


# Folders


def test_a_folder_becomes_folders_of_the_same_names(photos, tmp_path):
    said = run(
        "--data", photos, "--output", tmp_path / "c", "--corruptions", "glass_blur,contrast", "--severity", "1,5"
    )
    folder = tmp_path / "c/contrast/5"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert names == {
        *("c0/0.png", "c0/2.png", "c0/4.bmp.png", "c0/4.png.png", "c0/6.png", "c0/tiny.png"),
        *("c1/1.png", "c1/3.png", "c1/5.png", "c1/7.png"),
    }
    source = data.load(photos)
    index = source.files.index("c0/6.bmp")
    expected = corruptions.corrupt(source.images([index]), "contrast", 5, indices=[index])
    np.testing.assert_array_equal(read_image(folder / "c0/6.png"), expected[0])
    listed = (tmp_path / "c/left-out.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in listed] == ["c0/tiny.png", "c1/bad.jpg", "c1/empty.png"]
    assert "needs images of at least" in listed[0] and not (tmp_path / "c/glass_blur/5/c0/tiny.png").exists()
    assert "left out    3 images" in said.stdout and "note: left out c1/bad.jpg: not an image" in said.stderr
    with Image.open(tmp_path / "c/contact-sheet.png") as sheet:
        assert sheet.width > 500 and sheet.height > 200


def test_several_processes_give_the_same_files_and_finished_ones_are_kept(photos, tmp_path):
    options = ("--data", photos, "--corruptions", "fog,snow,elastic_transform", "--severity", "4")
    one, two = tmp_path / "one", tmp_path / "two"
    run(*options, "--output", one)
    run(*options, "--output", two, "--workers", 2)
    assert files_under(one) == files_under(two)
    kept, gone, broken = one / "snow/4/c0/0.png", one / "fog/4/c1/1.png", one / "fog/4/c1/3.png"
    before = kept.stat().st_mtime_ns
    gone.unlink()
    broken.write_bytes(b"")  # as a power cut may leave it
    run(*options, "--output", one)
    assert kept.stat().st_mtime_ns == before
    assert files_under(one) == files_under(two)


def test_the_format_jpg_is_that_of_the_published_files(photos, tmp_path):
    run("--data", photos, "--output", tmp_path / "c", "--corruptions", "fog", "--severity", 5, "--format", "jpg")
    assert (tmp_path / "c/fog/5/c0/6.jpg").is_file() and (tmp_path / "c/fog/5/c0/0.jpg").is_file()
    source = data.load(photos)
    index = source.files.index("c0/6.bmp")
    Image.fromarray(corruptions.corrupt(source.images([index]), "fog", 5, indices=[index])[0]).save(
        tmp_path / "expected.jpg", quality=85, optimize=True
    )
    assert (tmp_path / "c/fog/5/c0/6.jpg").read_bytes() == (tmp_path / "expected.jpg").read_bytes()


def test_imagenet_becomes_imagenet_c(tmp_path, monkeypatch):
    for number in range(3):
        path = tmp_path / "val" / f"n{number % 2}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((260 + 10 * number, 300, 3), 60 * number + 20, np.uint8)).save(path)
    options = ("--corruptions", "contrast,brightness", "--format", "jpg", "--severity", "1,3")
    said = run("--data", f"imagenet@{tmp_path}", "--output", tmp_path / "c", *options).stdout
    assert "preset imagenet" in said
    found = data.load(f"imagenet-c@{tmp_path / 'c'}")
    assert found.severities() == (1, 3) and found.labels.tolist() == [0, 0, 1]
    assert found.corrupted([0, 1, 2], "brightness", 3).shape == (3, 224, 224, 3)
    assert found.item_name(0) == "n0/0.JPEG"


def test_images_of_a_folder_become_an_array_if_they_have_one_size(photos, tmp_path):
    options = ("--corruptions", "fog", "--severity", 1, "--layout", "cifar-c", "--no-contact-sheet")
    refused = run("--data", photos, "--output", tmp_path / "c", *options, code=2)
    assert "do not fit one array" in refused.stderr and "choose `layout` folder" in refused.stderr
    for odd in ("c0/0.jpg", "c1/3.jpg", "c0/6.bmp", "c0/tiny.png"):
        (photos / odd).unlink()
    said = run("--data", photos, "--output", tmp_path / "c", *options)
    assert "left out c1/bad.jpg: not an image" in said.stderr
    assert np.load(tmp_path / "c/fog.npy").shape == (6, 32, 32, 3)
    assert data.load(f"cifar10-c@{tmp_path / 'c'}").labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_arrays_become_files_in_class_folders(tmp_path):
    options = ("--corruptions", "fog", "--severity", 1, "--limit", 5, "--layout", "folder")
    run("--data", "digits:test", "--output", tmp_path / "c", *options)
    made, digits = data.load(tmp_path / "c/fog/1"), data.load("digits:test")
    for index, file in enumerate(made.files):
        label, number = re.fullmatch(r"(\d)/(\d{3})\.png", file).groups()
        assert digits.labels[int(number)] == int(label)
        expected = corruptions.corrupt(digits.images([int(number)]), "fog", 1, indices=[int(number)])
        np.testing.assert_array_equal(made.images([index]), expected)


def test_a_folder_without_a_readable_image_is_refused_with_the_reason(tmp_path):
    for number in range(12):
        (tmp_path / f"{number:02d}.png").write_bytes(b"")
    options = ("--corruptions", "fog", "--severity", 1, "--no-contact-sheet")
    output = tmp_path.parent / f"{tmp_path.name}-c"
    assert "none of the 12 images" in run("--data", tmp_path, "--output", output, *options, code=2).stderr
    Image.fromarray(np.zeros((50, 50, 3), np.uint8)).save(tmp_path / "02.png")
    assert "preset tinyimagenet" in run("--data", tmp_path, "--output", output, *options).stdout


# Settings


def test_other_settings_in_the_same_folder_are_refused_with_what_differs(tmp_path):
    options = ("--data", "digits:test", "--output", tmp_path / "c", "--corruptions", "contrast", "--limit", 4)
    run(*options, "--severity", 5)
    said = run(*options, "--severity", "3,5", "--seed", 2, code=2).stderr
    assert "severities=[5] there, [3, 5] here" in said and "seed=0 there, 2 here" in said and "digest" not in said
    assert "digest" in run(*("--data", "digits:train", *options[2:]), "--severity", 5, code=2).stderr
    run(*options, "--severity", 5)
    (tmp_path / "c/settings.json").write_text("{")
    assert "settings.json is damaged" in run(*options, "--severity", 5, code=2).stderr


def test_a_folder_with_other_files_is_left_alone(photos, tmp_path):
    options = ("--corruptions", "fog", "--severity", 1)
    assert "holds other files" in run("--data", photos, "--output", tmp_path, *options, code=2).stderr
    assert "inside the images' own folder" in run("--data", photos, "--output", photos / "c", *options, code=2).stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--corruptions", "fogg"), "unknown corruption 'fogg'; did you mean 'fog'?"),
        (("--severity", "6"), "numbers from 1 to 5"),
        (("--severity", "3-1"), "but got '3-1'"),
        (("--preset", "cifr"), "did you mean 'cifar'?"),
        (("--layout", "folders"), "did you mean 'folder'?"),
        (("--format", "gif"), "expected `format` to be one of 'png', 'jpg'"),
        (("--format", "png"), "choose `layout` folder"),
        (("--data", "cifar10:test"), "cifar-10-python.tar.gz"),
    ],
)
def test_wrong_options_are_answered_with_the_right_ones(options, words, tmp_path, monkeypatch):
    monkeypatch.setenv("CAFE_TTA_DATA", str(tmp_path / "none"))
    said = run("--data", "digits", "--output", tmp_path / "c", *options, code=2).stderr
    assert words in said and not (tmp_path / "c").exists()


def test_a_stand_in_for_the_frost_textures_is_said_and_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(corruptions, "frost_is_standard", lambda: False)
    options = ("--data", "digits:test", "--limit", 2, "--severity", 1, "--no-contact-sheet")
    said = run(*options, "--output", tmp_path / "c", "--corruptions", "frost,fog")
    assert "non-standard" in said.stderr
    assert "non-standard" in json.loads((tmp_path / "c/settings.json").read_text())["frost"]
    assert run(*options, "--output", tmp_path / "d", "--corruptions", "fog").stderr == ""


@pytest.mark.parametrize(
    ("side", "preset"), [(40, "cifar"), (41, "tinyimagenet"), (100, "tinyimagenet"), (101, "imagenet")]
)
def test_the_preset_is_that_of_the_images_size(side, preset, tmp_path):
    np.save(tmp_path / "images.npy", np.zeros((2, side, side + 50, 3), np.uint8))
    options = ("--corruptions", "contrast", "--severity", 1, "--no-contact-sheet")
    run("--data", f"arrays:{tmp_path}", "--output", tmp_path / "c", *options)
    assert json.loads((tmp_path / "c/settings.json").read_text())["preset"] == preset
    assert data.load(f"cifar10-c@{tmp_path / 'c'}").labels is None
    shutil.rmtree(tmp_path / "c")
    run("--data", f"arrays:{tmp_path}", "--output", tmp_path / "c", *options, "--preset", "cifar")
    assert json.loads((tmp_path / "c/settings.json").read_text())["preset"] == "cifar"


def test_names_and_severities_are_in_the_usual_order():
    assert choose_names("all,held-out") == (*corruptions.NAMES, *corruptions.HELD_OUT)
    assert choose_names("spatter, fog ,held-out")[0] == "fog"
    assert choose_severities("5,1,3-4") == (1, 3, 4, 5)


def test_a_corruption_of_the_table_can_be_copied_at_once(tmp_path, monkeypatch):
    rows = ((0.9,), (0.8,), (0.7,), (0.6,), (0.5,))
    row = Corruption(20, "own", lambda images, streams, f: (images * f).astype(np.uint8), rows, rows, rows)
    monkeypatch.setitem(CORRUPTIONS, "darken", row)
    run("--data", "digits:test", "--output", tmp_path / "c", "--corruptions", "darken,fog", "--limit", 3)
    copied = data.load(f"cifar10-c:darken-5@{tmp_path / 'c'}")
    clean = data.load("digits:test").images(np.sort(np.random.default_rng(0).permutation(896)[:3]).tolist())
    np.testing.assert_array_equal(copied.images([0, 1, 2]), (clean * 0.5).astype(np.uint8))
    assert "darken" in run("--data", "digits", "--output", tmp_path / "d", "--corruptions", "rain", code=2).stderr
