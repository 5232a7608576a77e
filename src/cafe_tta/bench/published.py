"""Published numbers of other methods in mixed streams, with what they were measured with, to be shown beside ours.

Each number was read in the source that it names. The numbers of the CAFe paper itself are in `paper.py`; `NUMBERS` has
all of them in one form.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cafe_tta.bench import paper
from cafe_tta.bench.paper import Setting

MIXED = ("all-mixed", "mixed-75k", "mixed-full")  # protocols whose numbers are near enough to be looked at together


@dataclass(frozen=True)
class Number:
    """An accuracy that somebody published.

    >>> near("cifar10", "mixed-full", "online", "roid")[0].accuracy
    72.0
    """

    method: str  # as it is called there
    ours: str | None  # our method of that name; None where we have none
    dataset: str
    protocol: str  # the one of ours that deals images in the same way
    mode: str
    accuracy: float  # in per cent
    std: float | None
    setting: Setting
    source: str


def near(dataset: str, protocol: str, mode: str, method: str) -> list[Number]:
    """What was published for one of our methods on the same data set, in the same kind of stream."""
    kind = MIXED if protocol in MIXED else (protocol,)
    return [
        number
        for number in NUMBERS
        if (number.dataset, number.mode, number.ours) == (dataset, mode, method) and number.protocol in kind
    ]


_OURS = {
    "No adaptation": "source",
    "BN-1": "adabn",
    **{name: name.lower() for name in ("Tent", "EATA", "SAR", "DeYO", "CoTTA", "RoTTA", "LAME", "ROID")},
    **{name: name.lower() for name in ("MoETTA", "ZeroSiam")},
}

# In error %, mean of seeds 1 to 5: images of all corruptions shuffled.
STUTT = "test-time-adaptation (Döbler et al.), its benchmark: https://github.com/mariodoebler/test-time-adaptation"
_STUTT = """
                  | No adaptation | BN-1 | Tent | EATA | SAR  | CoTTA | RoTTA | AdaContrast | RMT  | LAME | ROID
cifar10 wrn       | 43.5          | 33.8 | 44.1 | 28.6 | 33.8 | 32.5  | 33.4  | 26.2        | 31.0 | 75.2 | 28.0
cifar100 resnext  | 46.4          | 45.8 | 82.5 | 36.9 | 45.5 | 43.1  | 45.4  | 41.8        | 38.6 | 98.4 | 35.0
imagenet resnet50 | 82.0          | 82.5 | 86.4 | 72.3 | 79.4 | 76.0  | 78.1  | 90.8        | 75.4 | 95.1 | 69.5
imagenet swin     | 64.0          |      | 62.6 | 56.3 | 60.6 | 63.3  | 62.6  | 66.0        | 55.4 | 64.6 | 55.0
imagenet vit      | 60.2          |      | 55.0 | 51.8 | 52.3 | 89.3  | 58.2  | 65.5        | 73.4 | 62.6 | 50.7
"""
# The same, with images of a class together.
_STUTT_CORRELATED = """
                  | No adaptation | SAR  | LAME | ROID
imagenet vit      | 60.2          | 54.3 | 36.1 | 23.6
"""
_IMAGENET = Setting("", 75_000, batch_size=64, preprocessing="that of the weights (torchvision)", seeds=5)
_STUTT_SETTINGS = {
    "wrn": Setting(
        "WRN-28-10 (RobustBench Standard)", 150_000, batch_size=200, preprocessing="in the model (RobustBench)", seeds=5
    ),
    "resnext": Setting(
        "ResNeXt-29 (RobustBench Hendrycks2020AugMix)",
        150_000,
        batch_size=200,
        preprocessing="in the model (RobustBench)",
        seeds=5,
    ),
    "resnet50": replace(_IMAGENET, model="torchvision:resnet50", weights="IMAGENET1K_V1"),
    "swin": replace(_IMAGENET, model="torchvision:swin_b"),
    "vit": replace(_IMAGENET, model="torchvision:vit_b_16"),
}

# In accuracy %, all 750,000 images of ImageNet-C at severity 5; rivals tuned anew there.
MOETTA = "MoETTA (2026), its table of mixed corruptions"
_MOETTA = """
                  | No adaptation | Tent  | EATA  | SAR   | DeYO  | MGTTA | BECoTTA | MoETTA
imagenet vit      | 55.52         | 63.20 | 64.28 | 60.76 | 63.97 | 66.20 | 61.57   | 67.20
imagenet convnext | 54.81         | 58.88 | 64.50 | 61.67 | 64.32 |       | 50.16   | 67.40
"""
_TIMM = Setting("", 750_000, batch_size=64, preprocessing="that of the weights (timm)", seeds=None)
_MOETTA_SETTINGS = {
    "vit": replace(_TIMM, model="timm:vit_base_patch16_224"),
    "convnext": replace(_TIMM, model="ConvNeXt-B (timm)"),
}

# In accuracy %, mean over five networks, which get ImageNet's mean and std whatever they were trained with.
ZEROSIAM = "ZeroSiam (2026), Table 2"
_ZEROSIAM = """
              | No adaptation | Tent | COME | DeYO | SAR  | EATA | ZeroSiam
imagenet five | 29.9          | 14.3 | 34.4 | 38.1 | 39.5 | 42.9 | 44.2
"""
_ZEROSIAM_SETTINGS = {
    "five": Setting(
        "mean of ResNet-50-GN, ViT-B, ViT-S, ConvNeXt-T and Swin-T (timm)",
        750_000,
        batch_size=64,
        preprocessing="ImageNet's mean and std, also for the ViTs",
        seeds=None,
    )
}


def _numbers(
    text: str, settings: dict[str, Setting], protocols: Sequence[str], source: str, error: bool
) -> Iterator[Number]:
    """The numbers of a table. `protocols` are those of CIFAR and of ImageNet."""
    head, *lines = text.strip("\n").splitlines()
    methods = [cell.strip() for cell in head.split("|")[1:]]
    for line in lines:
        row, *cells = (cell.strip() for cell in line.split("|"))
        dataset, key = row.split()
        for method, cell in zip(methods, cells, strict=True):
            if cell:
                value = round(100 - float(cell), 2) if error else float(cell)
                protocol = protocols[dataset == "imagenet"]
                yield Number(method, _OURS.get(method), dataset, protocol, "online", value, None, settings[key], source)


def _of_the_paper() -> Iterator[Number]:
    for (dataset, protocol, mode, method), value in paper.by_method().items():
        if dataset in paper.SETTINGS and isinstance(value, paper.Accuracy):
            setting = paper.SETTINGS[dataset]
            yield Number(method, method, dataset, protocol, mode, *value, setting, paper.SOURCE)


NUMBERS: tuple[Number, ...] = (
    *_of_the_paper(),
    *_numbers(_STUTT, _STUTT_SETTINGS, ("mixed-full", "mixed-75k"), STUTT, error=True),
    *_numbers(_STUTT_CORRELATED, _STUTT_SETTINGS, ("", "mixed-correlated"), STUTT, error=True),
    *_numbers(_MOETTA, _MOETTA_SETTINGS, ("", "mixed-full"), MOETTA, error=False),
    *_numbers(_ZEROSIAM, _ZEROSIAM_SETTINGS, ("", "mixed-full"), ZEROSIAM, error=False),
)
