"""The paper's numbers: as many as it prints, some of them by hand, and its bold ones are its best."""

import pytest

from cafe_tta import METHODS
from cafe_tta.bench import paper
from cafe_tta.bench.paper import Accuracy, published

OURS = ("cafe-plus", "unmix")
RIVALS = [n for n, kind in METHODS.items() if kind.in_tables and kind.needs != "data" and n not in OURS]
CIFAR = [(dataset, protocol) for dataset in ("cifar10", "cifar100") for protocol in ("separated", "all-mixed")]
IMAGENET = [("imagenet", protocol) for protocol in ("separated", "severity-mixed", "all-mixed")]
CLEAN = [(dataset, "clean") for dataset in ("cifar10", "cifar100", "imagenet")]
COLUMNS = [(*column, mode) for mode in ("offline", "online") for column in CIFAR + IMAGENET]
COLUMNS += [(*column, "offline") for column in [("mnist", "shift"), *CLEAN]]


@pytest.mark.parametrize("column", COLUMNS, ids=" ".join)
def test_every_column_has_every_method(column):
    assert all(isinstance(published(*column, method), Accuracy) for method in RIVALS)


def test_there_is_nothing_else():
    assert len(paper._BY_METHOD) == len(COLUMNS) * len(RIVALS) + 3  # 3 of DANN
    assert {key[:3] for key in paper._BY_METHOD} == set(COLUMNS)
    assert len(paper._BY_GROUPS) == 2 * 8


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (("cifar10", "separated", "offline", "source"), (63.75, None)),
        (("cifar10", "separated", "offline", "bacs"), (81.51, 0.02)),
        (("cifar100", "all-mixed", "offline", "fr"), (39.44, 0.32)),
        (("imagenet", "severity-mixed", "offline", "cafe-dimwise"), (58.60, 0.36)),
        (("imagenet", "all-mixed", "offline", "bacs"), (33.07, 1.38)),
        (("cifar10", "all-mixed", "online", "fr"), (68.65, 0.87)),
        (("cifar100", "separated", "online", "adabn"), (50.72, 0.01)),
        (("imagenet", "separated", "online", "tent"), (56.91, 0.02)),
        (("imagenet", "severity-mixed", "online", "source"), (39.43, 0.00)),
        (("mnist", "shift", "offline", "t3a"), (76.31, 0.10)),
        (("imagenet", "clean", "offline", "bacs"), (76.38, 0.05)),
        (("cifar100", "clean", "offline", "source"), (63.61, None)),
        (("cifar10", "all-mixed", "offline", "dann"), (69.95, 0.61)),
        (("imagenet", "all-mixed", "offline", "dann"), (45.42, 0.63)),
        (("imagenet", "all-mixed", "offline", "cafe", 16), (0.11, 0.02)),
        (("imagenet", "all-mixed", "offline", "cafe", 64), (48.58, 0.13)),
        (("cifar100", "all-mixed", "offline", "cafe", 1024), (39.70, 0.09)),
        (("cifar100", "all-mixed", "offline", "cafe", 128), (40.01, 0.36)),
        (("cifar10", "all-mixed", "offline", "cafe", 128), (70.06, 0.25)),  # k of all other tables
    ],
)
def test_numbers_copied_by_hand(place, expected):
    assert published(*place) == expected


@pytest.mark.parametrize(
    "place",
    [
        ("digits", "all-mixed", "offline", "cafe"),
        ("cifar10", "severity-mixed", "offline", "cafe"),
        ("cifar10", "separated", "offline", "dann"),
        ("cifar10", "all-mixed", "online", "dann"),
        ("mnist", "shift", "online", "cafe"),
        ("cifar10", "all-mixed", "offline", "cafe", 64),
        ("cifar100", "all-mixed", "online", "cafe", 64),
        ("cifar100", "all-mixed", "offline", "cafe", 100),
    ],
)
def test_what_the_paper_does_not_print_is_none(place):
    assert published(*place) is None


def test_not_available_is_not_nothing():
    found = {k: published("cifar100", "all-mixed", "offline", "cafe", k) for k in (8, 16, 32, 512)}
    assert [k for k, value in found.items() if value == paper.NOT_AVAILABLE] == [8, 16, 512]
    found = {k: published("imagenet", "all-mixed", "offline", "cafe", k) for k in (8, 16, 512, 1024)}
    assert [k for k, value in found.items() if value == paper.NOT_AVAILABLE] == [8, 512, 1024]


@pytest.mark.parametrize(
    ("column", "bold", "underlined"),
    [
        (("cifar10", "separated", "offline"), "cafe", "bacs"),
        (("cifar10", "all-mixed", "offline"), "cafe", "cafe-dimwise"),
        (("cifar100", "separated", "offline"), "bacs", "cafe"),
        (("cifar100", "all-mixed", "offline"), "cafe", "cafe-dimwise"),
        (("imagenet", "separated", "offline"), "cafe", "cafe-dimwise"),
        (("imagenet", "severity-mixed", "offline"), "cafe", "cafe-dimwise"),
        (("imagenet", "all-mixed", "offline"), "cafe", "cafe-dimwise"),
        (("cifar10", "separated", "online"), "adabn", "bacs"),
        (("cifar10", "all-mixed", "online"), "cafe", "cafe-no-infomax"),
        (("cifar100", "separated", "online"), "adabn", "bacs"),
        (("cifar100", "all-mixed", "online"), "cafe", "tent"),
        (("imagenet", "separated", "online"), "cafe", "infomax"),
        (("imagenet", "severity-mixed", "online"), "cafe", "infomax"),
        (("imagenet", "all-mixed", "online"), "cafe", "infomax"),
        (("mnist", "shift", "offline"), "cafe-dimwise", "cafe"),
    ],
)
def test_bold_and_underlined_ones_are_the_best_two(column, bold, underlined):
    order = sorted(RIVALS, key=lambda method: published(*column, method).mean, reverse=True)
    assert order[:2] == [bold, underlined]


def test_the_best_number_of_groups_is_the_bold_one():
    for dataset, best in (("cifar100", 32), ("imagenet", 64)):
        values = {k: published(dataset, "all-mixed", "offline", "cafe", k) for k in (16, 32, 64, 128, 256, 1024)}
        numbers = {k: value.mean for k, value in values.items() if isinstance(value, Accuracy)}
        assert max(numbers, key=numbers.__getitem__) == best


def test_every_published_method_is_in_the_registry():
    assert {key[3] for key in paper._BY_METHOD} <= set(METHODS)
