"""The result for an image depends on the image, the arguments and its index, and on nothing else."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cafe_tta.corruptions import CORRUPTIONS, HELD_OUT, NAMES, PRESETS, corrupt

from .pictures import pictures

ALL = NAMES + HELD_OUT
DETERMINISTIC = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
IMAGES = pictures(7, 24, 32)
INDICES = np.array([5, 0, 3, 1000, 12, 2, 9])


@pytest.mark.parametrize("name", ALL)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_any_split_and_order_of_the_batch_gives_the_same_images(name: str, data: st.DataObject) -> None:
    preset = data.draw(st.sampled_from(PRESETS))
    severity = data.draw(st.integers(1, 5))
    order = data.draw(st.permutations(range(len(IMAGES))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(IMAGES) - 1))))
    whole = corrupt(IMAGES, name, severity, seed=2, preset=preset, indices=INDICES)
    for part in np.split(np.array(order), cuts):
        again = corrupt(IMAGES[part], name, severity, seed=2, preset=preset, indices=INDICES[part])
        np.testing.assert_array_equal(again, whole[part])


@pytest.mark.parametrize("name", ALL)
def test_blocks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = corrupt(IMAGES, name, 4)
    monkeypatch.setitem(CORRUPTIONS, name, replace(CORRUPTIONS[name], block=2 * IMAGES[0].size))
    np.testing.assert_array_equal(corrupt(IMAGES, name, 4), whole)


@pytest.mark.parametrize("name", ALL)
def test_large_images_one_by_one(name: str) -> None:
    images = pictures(2, 96, 130)
    whole = corrupt(images, name, 1, preset="imagenet")
    np.testing.assert_array_equal(corrupt(images[1:], name, 1, preset="imagenet", indices=[1]), whole[1:])


@pytest.mark.parametrize("name", ALL)
def test_threads_do_not_show(name: str) -> None:
    images = pictures(1, 224, 224)
    before = cv2.getNumThreads()
    try:
        cv2.setNumThreads(1)
        alone = corrupt(images, name, 5, preset="imagenet")
        cv2.setNumThreads(4)
        np.testing.assert_array_equal(corrupt(images, name, 5, preset="imagenet"), alone)
    finally:
        cv2.setNumThreads(before)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: corrupt(IMAGES, name, 3, seed=1), range(8)):
            np.testing.assert_array_equal(result, corrupt(IMAGES, name, 3, seed=1))


@pytest.mark.parametrize("name", ALL)
def test_seed_and_index_change_the_random_ones_only(name: str) -> None:
    image = IMAGES[:1]
    first = corrupt(image, name, 5)
    for other in (corrupt(image, name, 5, seed=1), corrupt(image, name, 5, indices=[1])):
        assert (other == first).all() == (name in (*DETERMINISTIC, "gaussian_blur", "saturate"))


@pytest.mark.parametrize("name", ALL)
def test_input_is_left_alone(name: str) -> None:
    images = IMAGES.copy()
    images.flags.writeable = False
    result = corrupt(images, name, 5)
    np.testing.assert_array_equal(images, IMAGES)
    assert result.dtype == np.uint8 and result.shape == images.shape
    assert result.flags.writeable and not np.shares_memory(result, images)


@pytest.mark.parametrize("name", ALL)
def test_strided_input_is_taken_as_it_is(name: str) -> None:
    channels_first = np.ascontiguousarray(IMAGES.transpose(0, 3, 1, 2))
    strided = channels_first.transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(corrupt(strided, name, 2), corrupt(IMAGES, name, 2))
