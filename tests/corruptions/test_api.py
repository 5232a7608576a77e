"""Names, errors, sizes, imports."""

import subprocess
import sys

import numpy as np
import pytest

from cafe_tta.corruptions import (
    CORRUPTIONS,
    HELD_OUT,
    NAMES,
    PRESETS,
    Corruption,
    corrupt,
    frost_is_standard,
    textures,
)

from .pictures import pictures

ALL = NAMES + HELD_OUT
IMAGES = np.zeros((2, 32, 32, 3), np.uint8)


def test_fifteen_in_the_order_of_the_paper_and_four_held_out() -> None:
    assert len(NAMES) == 15 and NAMES[0] == "gaussian_noise" and NAMES[-1] == "jpeg_compression"
    assert set(HELD_OUT) == {"speckle_noise", "gaussian_blur", "saturate", "spatter"}
    assert PRESETS == ("cifar", "imagenet", "tinyimagenet")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("size", [(9, 9), (37, 50), (300, 70)])
@pytest.mark.parametrize("name", ALL)
def test_any_size_and_shape(name: str, size: tuple[int, int], preset: str) -> None:
    images = pictures(1, *size)
    for severity in (1, 5):
        result = corrupt(images, name, severity, preset=preset)
        assert result.shape == images.shape and result.dtype == np.uint8


@pytest.mark.parametrize("name", ALL)
def test_single_pixels_and_black_images_do_no_harm(name: str) -> None:
    corrupt(np.zeros((1, 32, 32, 3), np.uint8), name, 5)
    corrupt(np.full((1, 32, 32, 3), 255, np.uint8), name, 5)
    if name not in ("glass_blur", "pixelate", "elastic_transform"):
        corrupt(np.full((1, 1, 1, 3), 100, np.uint8), name, 5, preset="imagenet")


def test_fog_leaves_black_images_black() -> None:
    assert not corrupt(IMAGES, "fog", 5).any()


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch_stays_empty(name: str) -> None:
    assert corrupt(IMAGES[:0], name, 3).shape == (0, 32, 32, 3)


@pytest.mark.parametrize(
    ("name", "severity", "preset", "side", "needed"),
    [
        ("glass_blur", 5, "imagenet", 8, 9),
        ("pixelate", 5, "imagenet", 3, 4),
        ("elastic_transform", 1, "cifar", 2, 3),
    ],
)
def test_images_too_small_are_refused(name: str, severity: int, preset: str, side: int, needed: int) -> None:
    with pytest.raises(ValueError, match=f"{name} at severity {severity}.*at least {needed} x {needed} pixels"):
        corrupt(np.zeros((1, side, 40, 3), np.uint8), name, severity, preset=preset)
    corrupt(np.zeros((1, needed, 40, 3), np.uint8), name, severity, preset=preset)


def test_unknown_names_are_refused_with_a_guess() -> None:
    with pytest.raises(ValueError, match=r"unknown corruption 'fogg'; did you mean 'fog'\?; choose from: gaussian"):
        corrupt(IMAGES, "fogg", 1)
    with pytest.raises(ValueError, match="unknown corruption 'rain'; choose from: gaussian_noise, shot_noise"):
        corrupt(IMAGES, "rain", 1)
    with pytest.raises(ValueError, match=r"unknown preset 'cifar10'; did you mean 'cifar'\?"):
        corrupt(IMAGES, "fog", 1, preset="cifar10")


@pytest.mark.parametrize("severity", [0, 6, 2.5, 3.0, True, "3", None])
def test_unknown_severities_are_refused(severity: object) -> None:
    with pytest.raises(ValueError, match="`severity` must be 1, 2, 3, 4 or 5, got"):
        corrupt(IMAGES, "fog", severity)  # type: ignore[arg-type]


def test_wrong_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a numpy array of uint8.*got list"):
        corrupt([[1]], "fog", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be of dtype uint8.*got float32; convert"):
        corrupt(IMAGES.astype(np.float32), "fog", 1)
    with pytest.raises(ValueError, match=r"shape \(N, H, W, 3\), got \(32, 32, 3\); pass one image as image\[None\]"):
        corrupt(IMAGES[0], "fog", 1)
    with pytest.raises(ValueError, match=r"got \(2, 3, 32, 32\); move the channels last"):
        corrupt(np.zeros((2, 3, 32, 32), np.uint8), "fog", 1)
    with pytest.raises(ValueError, match="must have pixels"):
        corrupt(np.zeros((2, 0, 32, 3), np.uint8), "fog", 1)


def test_wrong_seeds_and_indices_are_refused() -> None:
    with pytest.raises(ValueError, match="`seed` must be a whole number from 0 to"):
        corrupt(IMAGES, "fog", 1, seed=-1)
    with pytest.raises(ValueError, match=r"one entry per image, shape \(2,\), got \(1,\)"):
        corrupt(IMAGES, "fog", 1, indices=[0])
    with pytest.raises(TypeError, match="`indices` must be integers, got float64"):
        corrupt(IMAGES, "fog", 1, indices=[0.0, 1.0])
    with pytest.raises(ValueError, match="`indices` must not be negative, got -1"):
        corrupt(IMAGES, "fog", 1, indices=[0, -1])


def test_importing_the_package_is_light() -> None:
    heavy = "{'cv2', 'PIL', 'scipy', 'torch'}"
    package = sys.modules["cafe_tta.corruptions"].__file__
    # Loaded by path, so that what `cafe_tta` itself imports does not count.
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('alone', {package!r})\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['alone'] = module\n"
        f"spec.loader.exec_module(module); print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_frost_without_the_published_textures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert frost_is_standard()
    images = pictures(2, 32, 32)
    standard = corrupt(images, "frost", 5)
    clear = (textures.standard_folder, textures.full_size, textures.textures)
    monkeypatch.setattr(textures, "STANDARD_FILES", {"frost1.jpg": "of another picture"})
    try:
        for function in clear:
            function.cache_clear()
        assert not frost_is_standard()
        with pytest.warns(UserWarning, match="label results with frost as non-standard"):
            stand_in = corrupt(images, "frost", 5)
        assert (stand_in != standard).any()
        np.testing.assert_array_equal(corrupt(images, "frost", 5), stand_in)
    finally:
        for function in clear:
            function.cache_clear()


def test_a_corruption_is_added_with_a_function_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def darken(images: np.ndarray, streams: object, factor: float) -> np.ndarray:
        return (images * factor).astype(np.uint8)

    rows = ((0.9,), (0.8,), (0.7,), (0.6,), (0.5,))
    row = Corruption(20, "own", darken, rows, rows, rows, smallest_side=lambda factor: 2)
    monkeypatch.setitem(CORRUPTIONS, "darken", row)
    assert corrupt(np.full((3, 4, 4, 3), 100, np.uint8), "darken", 5).tolist() == np.full((3, 4, 4, 3), 50).tolist()
    with pytest.raises(ValueError, match="needs images of at least 2 x 2 pixels, got 1 x 4"):
        corrupt(np.zeros((1, 1, 4, 3), np.uint8), "darken", 5)
    with pytest.raises(ValueError, match="did you mean 'darken'"):
        corrupt(IMAGES, "darkn", 5)
