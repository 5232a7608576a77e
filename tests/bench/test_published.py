"""Numbers that others published: copied by hand, with sources; the report says whether settings are the same."""

import pytest

from cafe_tta import METHODS
from cafe_tta.bench import paper, published, report
from cafe_tta.bench.protocols import PROTOCOLS

from .report_records import record, save, table

RIVALS = [number for number in published.NUMBERS if number.source != paper.SOURCE]


@pytest.mark.parametrize(
    ("place", "model", "accuracy"),
    [
        (("cifar10", "mixed-full", "online", "roid"), "WRN-28-10 (RobustBench Standard)", 72.0),
        (("cifar10", "mixed-full", "online", "lame"), "WRN-28-10 (RobustBench Standard)", 24.8),
        (("cifar100", "mixed-full", "online", "tent"), "ResNeXt-29 (RobustBench Hendrycks2020AugMix)", 17.5),
        (("imagenet", "mixed-75k", "online", "eata"), "torchvision:resnet50", 27.7),
        (("imagenet", "mixed-75k", "online", "cotta"), "torchvision:vit_b_16", 10.7),
        (("imagenet", "mixed-75k", "online", "rotta"), "torchvision:swin_b", 37.4),
        (("imagenet", "mixed-correlated", "online", "roid"), "torchvision:vit_b_16", 76.4),
        (("imagenet", "mixed-full", "online", "moetta"), "timm:vit_base_patch16_224", 67.20),
        (("imagenet", "mixed-full", "online", "tent"), "ConvNeXt-B (timm)", 58.88),
        (("cifar10", "all-mixed", "offline", "cafe"), "timm:resnet26", 70.06),
    ],
)
def test_numbers_copied_by_hand(place, model, accuracy):
    (found,) = [n for n in published.near(*place) if n.setting.model == model and n.protocol == place[1]]
    assert found.accuracy == pytest.approx(accuracy)


def test_every_number_has_a_source_and_a_setting():
    assert len(RIVALS) == 11 + 11 + 11 + 10 + 10 + 4 + 8 + 7 + 7
    for number in published.NUMBERS:
        assert 0 < number.accuracy < 100 and number.source and number.setting.model and number.setting.images
        assert number.ours in METHODS or number.ours is None
        assert number.protocol in PROTOCOLS
    for number in RIVALS:
        assert number.mode == "online" and number.setting.batch_size and number.setting.preprocessing
    unknown = {number.method for number in RIVALS if number.ours is None}
    assert unknown == {"AdaContrast", "RMT", "MGTTA", "BECoTTA", "COME"}
    names = {(n.method, n.dataset, n.protocol, n.mode, n.setting.model, n.source) for n in published.NUMBERS}
    assert len(names) == len(published.NUMBERS)


def test_ours_beside_theirs_with_what_differs(tmp_path):
    made = report.make([save(tmp_path, [record("roid", 0.65, mode="online"), record("cafe", 0.7, mode="online")])])
    shown = table(made, "published-cifar10-all-mixed-online")
    (line,) = shown.lines
    assert line.head == ("roid", "test-time-adaptation (Döbler et al.)", "WRN-28-10 (RobustBench Standard)")
    assert [cell.text for cell in line.cells] == ["65.00", "72.00", "-7.00"]
    where = "test-time-adaptation (Döbler et al.), WRN-28-10 (RobustBench Standard)"
    assert shown.notes == (
        f"{where}: here, timm:resnet26 instead of WRN-28-10 (RobustBench Standard); 10,000 images instead of "
        "150,000; 2 domains of severity 5 instead of 15 of severity 5; protocol all-mixed instead of mixed-full",
        "roid: batches of 256 instead of 200 (test-time-adaptation (Döbler et al.))",
    )
    assert (
        "150,000 images, batches of 200, preprocessing: in the model (RobustBench), mean of 5 seeds" in shown.about[0]
    )
    (found,) = shown.measurements
    assert (found.mean, found.paper_mean) == (65, 72)
    assert not any("published" in other.name for other in report.make([tmp_path], with_paper=False).tables)


def test_the_same_setting_is_said_to_be_the_same(tmp_path):
    domains = {f"{name}-5": 5000 for name in "abcdefghijklmno"}
    place = {"name": "mixed", "images": 75000, "domains": domains, "digest": "x"}
    run = record(
        "roid",
        0.3,
        mode="online",
        dataset="imagenet",
        protocol="mixed-75k",
        episode=place,
        by_domain=dict.fromkeys(domains, 0.3),
        config__batch_size=64,
        model__architecture="torchvision:resnet50",
    )
    shown = table(report.make([save(tmp_path, [run])]), "published-imagenet-mixed-75k-online")
    same = [note for note in shown.notes if "the same setting, as far as the records tell: model, images" in note]
    assert len(same) == 1 and same[0].startswith("test-time-adaptation (Döbler et al.), torchvision:resnet50: the same")
    assert not any("batches of" in note for note in shown.notes)
    assert sum("here, torchvision:resnet50 instead of torchvision:" in note for note in shown.notes) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "offline"},
        {"label": "roid(lr=1)"},
        {"dataset": "digits"},
        {"protocol": "separated"},
        {"corruptions__names": ["spatter"]},
    ],
)
def test_nothing_is_compared_that_cannot_be(tmp_path, changes):
    made = report.make([save(tmp_path, [record("roid", 0.65, **{"mode": "online", **changes})])])
    assert not any(table.name.startswith("published") for table in made.tables)
