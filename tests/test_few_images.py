"""Few images, and clean ones: with the defaults of the library and of `adapt`, adapting to them does no harm."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cafe_tta import data
from cafe_tta.bench.embedded import embedded_digits

BENCHMARK = Path(__file__).parents[1] / "benchmarks/few_images.py"
LARGEST_LOSS = 0.005  # half a point of accuracy


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The functions of the benchmark, with the embedded digits in random order."""
    functions = SimpleNamespace(**runpy.run_path(str(BENCHMARK)))
    embedded, test = embedded_digits(tmp_path_factory.mktemp("digits")), data.load("digits:test")
    order = np.random.default_rng(0).permutation(len(test))
    labels = torch.from_numpy(np.asarray(test.labels)[order])
    functions.setting = functions.Setting(embedded.model, embedded.stats, test.images(order.tolist()), labels)
    return functions


def right(few, kind, size, count):
    """Right answers of the source model, of the library and of `adapt`."""
    pixels = few.setting.of_kind(kind, count)
    images = few.setting.model.preprocessing(pixels)
    library = few.of_library(few.setting, images, size)
    return few.setting.source_hits(images), library, few.of_adapt(few.setting, pixels, size)[0]


@pytest.mark.parametrize(("size", "count"), [(1, 20), (2, 40), (5, 100), (10, 100), (40, 200), (400, 400)])
def test_clean_images_are_answered_as_well_as_by_the_source_model(few, size, count):
    source, library, adapt = right(few, "clean", size, count)
    assert library >= source - LARGEST_LOSS * count and adapt >= source - LARGEST_LOSS * count


@pytest.mark.parametrize(("kind", "size", "gain"), [("fog", 10, 0.1), ("fog", 400, 0.2), ("mixed", 400, 0.03)])
def test_corrupted_images_are_answered_better(few, kind, size, gain):
    source, library, adapt = right(few, kind, size, 400)
    assert library >= source + gain * 400 and adapt >= source + gain * 400


def test_few_images_are_answered_by_adapt_as_by_the_library(few):
    """Fewer than 16 cannot be judged; the benchmark relies on it."""
    _, library, adapt = right(few, "fog", 10, 30)
    assert library == adapt
