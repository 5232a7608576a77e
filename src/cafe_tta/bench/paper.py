"""Every accuracy that the paper prints, in per cent, to be shown beside ours. https://arxiv.org/abs/2204.13263

The tables keep the paper's rows and columns under our names: its `Mixed` set of CIFAR is our protocol `all-mixed`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

NUM_GROUPS = 128  # k, wherever the paper does not say another
NOT_AVAILABLE: Literal["N/A"] = "N/A"  # CAFe did not work: a group was wider than the batch


class Accuracy(NamedTuple):
    """Mean and standard deviation over three seeds; no deviation where the paper gives none."""

    mean: float
    std: float | None


Published = Accuracy | Literal["N/A"] | None


@dataclass(frozen=True)
class Setting:
    """What published numbers were measured with; None where it is each method's own, or not said."""

    model: str  # by our name, or in words
    images: int  # of an episode
    corruptions: int = 15
    severities: tuple[int, ...] = (5,)
    seeds: int | None = 3
    weights: str = ""
    batch_size: int | None = None
    preprocessing: str = ""


SOURCE = "Adachi et al., CAFe: https://arxiv.org/abs/2204.13263"
_CIFAR = Setting("timm:resnet26", 10_000)
SETTINGS = {
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "imagenet": Setting("torchvision:resnet50", 50_000, severities=(1, 2, 3, 4, 5)),
}

# Table 1, with the row of DANN from the appendix's table of unsupervised domain adaptation.
_OFFLINE = """
                | cifar10 separated | cifar10 all-mixed | cifar100 separated | cifar100 all-mixed
source          | 63.75             | 63.46 ± 0.61      | 34.24              | 34.16 ± 0.20
adabn           | 80.26 ± 0.30      | 67.62 ± 0.13      | 51.10 ± 0.25       | 38.52 ± 0.27
t3a             | 66.02 ± 0.02      | 63.92 ± 0.42      | 36.05 ± 0.07       | 34.10 ± 0.49
tent            | 80.86 ± 0.06      | 68.59 ± 0.30      | 52.09 ± 0.07       | 38.95 ± 0.65
bacs            | 81.51 ± 0.02      | 68.69 ± 0.09      | 53.00 ± 0.12       | 39.65 ± 0.32
fr              | 80.71 ± 0.40      | 68.31 ± 0.64      | 51.50 ± 0.03       | 39.44 ± 0.32
infomax         | 81.40 ± 0.02      | 69.01 ± 0.50      | 52.48 ± 0.02       | 39.78 ± 0.36
cafe-no-infomax | 81.11 ± 0.02      | 69.02 ± 0.62      | 51.83 ± 0.02       | 38.71 ± 0.11
cafe-dimwise    | 81.40 ± 0.02      | 69.10 ± 0.38      | 52.48 ± 0.02       | 39.83 ± 0.24
cafe            | 81.66 ± 0.01      | 70.06 ± 0.25      | 52.79 ± 0.02       | 40.01 ± 0.36
dann            |                   | 69.95 ± 0.61      |                    | 38.63 ± 0.36
"""
_OFFLINE_IMAGENET = """
                | imagenet separated | imagenet severity-mixed | imagenet all-mixed
source          | 39.14              | 39.43 ± 0.00            | 39.16 ± 0.01
adabn           | 50.28 ± 0.02       | 48.00 ± 0.17            | 39.85 ± 0.18
t3a             | 39.05 ± 0.01       | 39.28 ± 0.03            | 37.46 ± 0.09
tent            | 58.97 ± 0.03       | 57.15 ± 0.05            | 44.44 ± 0.22
bacs            | 57.01 ± 0.19       | 55.05 ± 0.29            | 33.07 ± 1.38
fr              | 53.54 ± 0.01       | 50.38 ± 0.20            | 40.52 ± 0.16
infomax         | 60.20 ± 0.05       | 57.52 ± 0.23            | 46.52 ± 0.08
cafe-no-infomax | 57.35 ± 0.02       | 54.43 ± 0.14            | 43.83 ± 0.16
cafe-dimwise    | 60.29 ± 0.08       | 58.60 ± 0.36            | 47.19 ± 0.24
cafe            | 60.77 ± 0.09       | 59.04 ± 0.22            | 48.55 ± 0.26
dann            |                    |                         | 45.42 ± 0.63
"""
_ONLINE = """
                | cifar10 separated | cifar10 all-mixed | cifar100 separated | cifar100 all-mixed
source          | 63.75             | 63.46 ± 0.61      | 34.24              | 34.16 ± 0.20
adabn           | 80.04 ± 0.03      | 67.94 ± 0.16      | 50.72 ± 0.01       | 38.20 ± 0.09
t3a             | 66.02 ± 0.02      | 63.92 ± 0.42      | 36.05 ± 0.07       | 34.10 ± 0.49
tent            | 79.31 ± 0.05      | 68.57 ± 0.25      | 50.04 ± 0.07       | 39.00 ± 0.09
bacs            | 79.67 ± 0.05      | 68.28 ± 0.47      | 50.60 ± 0.07       | 38.98 ± 0.06
fr              | 77.87 ± 0.11      | 68.65 ± 0.87      | 47.93 ± 0.05       | 38.70 ± 0.01
infomax         | 78.04 ± 0.10      | 68.80 ± 0.62      | 48.49 ± 0.05       | 38.62 ± 0.37
cafe-no-infomax | 77.90 ± 0.11      | 69.08 ± 0.34      | 48.13 ± 0.03       | 38.59 ± 0.37
cafe-dimwise    | 78.04 ± 0.10      | 68.91 ± 0.34      | 48.50 ± 0.06       | 38.86 ± 0.20
cafe            | 78.18 ± 0.13      | 69.34 ± 0.43      | 48.64 ± 0.03       | 39.22 ± 0.28
"""
_ONLINE_IMAGENET = """
                | imagenet separated | imagenet severity-mixed | imagenet all-mixed
source          | 39.14              | 39.43 ± 0.00            | 39.16 ± 0.01
adabn           | 50.55 ± 0.01       | 48.02 ± 0.20            | 39.65 ± 0.10
t3a             | 39.05 ± 0.01       | 39.28 ± 0.03            | 37.46 ± 0.09
tent            | 56.91 ± 0.02       | 54.66 ± 0.20            | 43.55 ± 0.30
bacs            | 57.25 ± 0.06       | 55.40 ± 0.27            | 37.71 ± 0.89
fr              | 51.22 ± 0.02       | 48.72 ± 0.20            | 40.11 ± 0.08
infomax         | 58.22 ± 0.03       | 56.40 ± 0.19            | 45.80 ± 0.29
cafe-no-infomax | 55.95 ± 0.04       | 53.13 ± 0.14            | 43.23 ± 0.20
cafe-dimwise    | 58.21 ± 0.02       | 56.35 ± 0.20            | 45.61 ± 0.28
cafe            | 58.76 ± 0.04       | 56.90 ± 0.12            | 46.92 ± 0.34
"""
# SVHN to MNIST, and the same distribution (the clean test images).
_SHIFT_AND_CLEAN = """
                | mnist shift  | cifar10 clean | cifar100 clean | imagenet clean
source          | 73.15        | 90.52         | 63.61          | 76.15
adabn           | 70.58 ± 0.61 | 89.08 ± 0.19  | 61.12 ± 0.32   | 75.64 ± 0.08
t3a             | 76.31 ± 0.10 | 90.43 ± 0.04  | 62.59 ± 0.12   | 71.70 ± 0.05
tent            | 78.03 ± 0.36 | 89.41 ± 0.05  | 61.88 ± 0.11   | 75.97 ± 0.10
bacs            | 86.10 ± 0.29 | 89.58 ± 0.04  | 62.47 ± 0.13   | 76.38 ± 0.05
fr              | 83.61 ± 0.48 | 89.42 ± 0.07  | 61.59 ± 0.13   | 75.70 ± 0.03
infomax         | 84.89 ± 0.05 | 89.55 ± 0.04  | 62.28 ± 0.07   | 76.02 ± 0.01
cafe-no-infomax | 78.25 ± 0.24 | 89.43 ± 0.02  | 61.66 ± 0.08   | 75.50 ± 0.03
cafe-dimwise    | 87.65 ± 0.35 | 89.56 ± 0.03  | 62.28 ± 0.06   | 76.04 ± 0.01
cafe            | 87.15 ± 0.21 | 89.59 ± 0.06  | 62.30 ± 0.13   | 75.97 ± 0.05
"""
# Offline, for each number of groups, by method.
_GROUPS = {
    "cafe": """
     | cifar100 all-mixed | imagenet all-mixed
8    | N/A                | N/A
16   | N/A                | 0.11 ± 0.02
32   | 41.06 ± 0.18       | 46.22 ± 0.16
64   | 40.67 ± 0.21       | 48.58 ± 0.13
128  | 40.01 ± 0.36       | 48.55 ± 0.26
256  | 39.60 ± 0.10       | 48.21 ± 0.31
512  | N/A                | N/A
1024 | 39.70 ± 0.09       | N/A
"""
}


def published(dataset: str, protocol: str, mode: str, method: str, num_groups: int | None = None) -> Published:
    """What the paper prints for a method, "N/A" included; None where it prints nothing.

    >>> published("cifar10", "all-mixed", "offline", "cafe")
    Accuracy(mean=70.06, std=0.25)
    >>> published("cifar100", "all-mixed", "offline", "cafe", num_groups=8)
    'N/A'
    """
    if num_groups is not None and method in _GROUPS:
        swept = _BY_GROUPS.get((dataset, protocol, mode, method, num_groups))
        if swept is not None or num_groups != NUM_GROUPS:
            return swept
    return _BY_METHOD.get((dataset, protocol, mode, method))


def by_method() -> dict[tuple[str, str, str, str], Accuracy | Literal["N/A"]]:
    """All cells, by data set, protocol, mode and method; without the sweep over k."""
    return dict(_BY_METHOD)


def _entries(text: str) -> Iterator[tuple[str, str, str, Accuracy | Literal["N/A"]]]:
    """(row, dataset, protocol, value) of every cell that is not empty."""
    head, *lines = text.strip("\n").splitlines()
    columns = [cell.split() for cell in head.split("|")[1:]]
    for line in lines:
        row, *cells = (cell.strip() for cell in line.split("|"))
        for (dataset, protocol), cell in zip(columns, cells, strict=True):
            if cell == NOT_AVAILABLE:
                yield row, dataset, protocol, NOT_AVAILABLE
            elif cell:
                mean, _, std = cell.partition(" ± ")
                yield row, dataset, protocol, Accuracy(float(mean), float(std) if std else None)


_BY_METHOD: dict[tuple[str, str, str, str], Accuracy | Literal["N/A"]] = {
    (dataset, protocol, mode, method): value
    for mode, text in (
        ("offline", _OFFLINE),
        ("offline", _OFFLINE_IMAGENET),
        ("online", _ONLINE),
        ("online", _ONLINE_IMAGENET),
        ("offline", _SHIFT_AND_CLEAN),
    )
    for method, dataset, protocol, value in _entries(text)
}
_BY_GROUPS: dict[tuple[str, str, str, str, int], Accuracy | Literal["N/A"]] = {
    (dataset, protocol, "offline", method, int(row)): value
    for method, text in _GROUPS.items()
    for row, dataset, protocol, value in _entries(text)
}
