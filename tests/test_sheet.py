"""The clusters at the end of a run: numbered by size, and drawn."""

import io
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cafe_tta.runs import sheet
from cafe_tta.runs.sheet import Clusters


@settings(deadline=None)
@given(st.lists(st.integers(-1, 31), max_size=60))
def test_clusters_are_numbered_by_size(members):
    numbers = sheet._by_size(np.array(members, dtype=np.int64))
    slots, ranks = Counter(m for m in members if m >= 0), Counter(n for n in numbers.tolist() if n)
    assert sorted(ranks) == list(range(1, len(slots) + 1))
    assert [ranks[number] for number in sorted(ranks)] == sorted(slots.values(), reverse=True)
    assert len(set(zip(members, numbers.tolist(), strict=True))) == len(set(members))  # one number for each, and back
    assert all((member < 0) == (number == 0) for member, number in zip(members, numbers, strict=True))
    assert Clusters(np.arange(len(members)), numbers).sizes == sorted(slots.values(), reverse=True)


def drawn(numbers):
    """The sheet of images that are each of one grey, which is their index."""

    class Greys:
        def images(self, indices):
            return np.stack([np.full((32, 32, 3), index, np.uint8) for index in indices])

    found = Clusters(np.arange(len(numbers)), np.array(numbers))
    with Image.open(io.BytesIO(found.sheet(Greys(), "a title"))) as sheet:
        return np.asarray(sheet)


def shown(sheet, line, column):
    """The grey of a tile, or None where there is none."""
    tile = sheet[76 + line * 108 :][:96, 210 + column * 99 :][:, :96]
    assert (tile == tile[0, 0]).all()
    return None if (tile == 255).all() else int(tile[0, 0, 0])


def test_a_sheet_has_a_row_for_each_of_the_largest_clusters_and_one_for_images_in_none():
    numbers = [1] * 20 + [2] * 5 + [n for n in range(3, 19) for _ in range(2)] + [0]
    sheet = drawn(numbers)
    for line in range(17):
        number = 0 if line == 16 else line + 1
        own = {index for index, of in enumerate(numbers) if of == number}
        tiles = [shown(sheet, line, column) for column in range(12)]
        greys = [grey for grey in tiles if grey is not None]
        assert len(set(greys)) == len(greys) == min(12, len(own)) and set(greys) <= own
    assert sheet.shape[0] == 2 * 20 + 56 + 17 * 108 + 28  # the last line: two smaller clusters


def test_one_cluster_is_one_row():
    sheet = drawn([1, 1, 1])
    assert sheet.shape == (2 * 20 + 56 + 108, 2 * 20 + 190 + 12 * 99 - 3, 3)
    assert {shown(sheet, 0, column) for column in range(4)} == {0, 1, 2, None}
