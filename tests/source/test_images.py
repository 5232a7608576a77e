"""Source values know how their images were read; what cannot be right is noticed, and what is honest is not."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import cafe_tta as cafe
from cafe_tta import corruptions, data, storage
from cafe_tta.models import IMAGENET, Model, Preprocessing
from cafe_tta.source import ImageRecord, SourceWarning, agreed_record
from cafe_tta.source import load as load_source
from cafe_tta.source.images import ImageCheck, TrainingCheck, few_images
from cafe_tta.source.make import SourceImages

DIGITS = Preprocessing(32, (0.3, 0.3, 0.3), (0.35, 0.35, 0.35))
CLASSES = ("cat", "dog", "frog", "newt")


@pytest.mark.parametrize("kind", [kind for kind, value in cafe.SOURCES.items() if value.file_kind])
def test_every_file_keeps_how_its_images_were_read(source, kind, tmp_path):
    value = source.needs[kind].of_images(DIGITS, CLASSES)
    value.save(tmp_path / "value")
    loaded = load_source(tmp_path / "value")
    assert loaded.images.preprocessing == DIGITS and loaded.images.classes == CLASSES
    loaded.check_belongs_to(source.classifier)  # it still knows its classifier
    assert "read at 32 px, mean 0.3,0.3,0.3" in repr(loaded)


def test_fit_keeps_preprocessing_classes_shape_and_range_through_groups_and_files(source, tmp_path):
    stats = cafe.FeatureStats.fit(source.classifier, source.loader, IMAGENET, CLASSES)
    low, high = source.images.min().item(), source.images.max().item()
    expected = ImageRecord(IMAGENET, CLASSES, (3, 10, 10), low, high)
    stats.save(tmp_path / "features")
    stats.group(3).save(tmp_path / "grouped")
    for value in (stats, cafe.FeatureStats.load(tmp_path / "features"), cafe.SourceStats.load(tmp_path / "grouped")):
        assert value.images == expected


def test_files_without_a_record_load_and_compare_with_everything(source, tmp_path):
    """As those that were made before there was one."""
    stats = source.needs["stats"]
    old = {name: value for name, value in stats.meta.items() if name != "images"}
    storage.write(tmp_path / "old", "source-stats", 1, stats._tensors(), old)
    loaded = cafe.SourceStats.load(tmp_path / "old")
    assert loaded.images == ImageRecord()
    assert agreed_record({"old": loaded}, {"size": 7, "mean": None, "std": None}) == ImageRecord()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cafe.create("cafe", source.classifier, loaded)(source.images[:32] * 255)


def test_shards_that_were_read_differently_are_not_merged(source):
    half = len(source.loader) // 2
    ours, theirs = (
        cafe.FeatureStats.fit(source.classifier, part, preprocessing)
        for part, preprocessing in ((source.loader[:half], DIGITS), (source.loader[half:], replace(DIGITS, size=64)))
    )
    with pytest.raises(ValueError, match=r"read differently: 32 px, mean 0.3,.* there, 64 px, mean 0.3,.* here"):
        cafe.FeatureStats.merge(ours, theirs)
    unknown = cafe.FeatureStats.fit(source.classifier, source.loader[half:])
    merged = cafe.FeatureStats.merge(ours, unknown)
    whole = cafe.FeatureStats.fit(source.classifier, source.loader, DIGITS)
    assert merged.images == whole.images  # range and shape too
    with pytest.raises(ValueError, match="class 1 is 'dog' there, 'frog' here"):
        ImageRecord(classes=("cat", "dog")).merge(ImageRecord(classes=("cat", "frog")))
    assert ImageRecord(shape=(3, 8, 8), low=0, high=1).merge(ImageRecord(shape=(3, 9, 9), low=-1, high=0)) == (
        ImageRecord(shape=None, low=-1, high=1)
    )


def test_settings_that_contradict_the_source_values_are_refused(source):
    values = {
        "s.safetensors": source.needs["stats"].of_images(DIGITS),
        "h.safetensors": source.needs["histograms"].of_images(DIGITS),
    }
    asked = {"size": 32, "mean": (0.3, 0.3, 0.3), "std": None}
    assert agreed_record(values, asked).preprocessing == DIGITS
    with pytest.raises(ValueError, match=r"s.safetensors was made of images at 32 px, mean .*, but size 224 was asked"):
        agreed_record(values, asked | {"size": 224})
    with pytest.raises(ValueError, match=r"std 0.35,0.35,0.35, but mean 0.5,0.4,0.3 was asked for; leave it out"):
        agreed_record(values, asked | {"mean": (0.5, 0.4, 0.3)})
    values["h.safetensors"] = source.needs["histograms"].of_images(IMAGENET)
    with pytest.raises(ValueError, match=r"32 px, .* in s.safetensors, 224 px .* in h.safetensors"):
        agreed_record(values, {})


# What cannot be right


def prepared(images: np.ndarray) -> torch.Tensor:
    return DIGITS(images)


@pytest.fixture(scope="module")
def records() -> list[ImageRecord]:
    """Of the digits as they are in training, with and without a known preprocessing."""
    images = prepared(data.load("digits:train").images(range(400)))
    return [ImageRecord(DIGITS).seen(images), ImageRecord().seen(images)]


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    return data.load("digits:test").images(range(24))


@pytest.mark.parametrize("name", corruptions.choose_names("all,held-out"))
def test_honest_corruptions_raise_no_alarm(name, records, digits):
    for severity in (3, 5):
        images = prepared(corruptions.corrupt(digits, name, severity))
        for record in records:
            assert ImageCheck(record).look(images) == ""


def undone(images: torch.Tensor) -> torch.Tensor:
    return images * 0.35 + 0.3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (undone, "divided by 255 that were not normalised"),
        (lambda images: 255 * undone(images), "not normalised, not divided by 255, or normalised twice"),
        (lambda images: (images - 0.3) / 0.35, "normalised twice"),
    ],
    ids=["0..1", "0..255", "twice"],
)
def test_images_that_are_normalised_wrongly_raise_an_alarm_once(wrong, words, records, digits):
    right = prepared(digits)
    for record in records:
        check = ImageCheck(record)
        found = [check.look(part) for part in wrong(right).split(4)]  # also where the batches are small
        assert sum(map(bool, found)) == 1 and words in "".join(found)
        assert "the source images from -0.857 to 2" in "".join(found)


def test_statistics_of_images_that_were_not_normalised_raise_an_alarm(digits):
    right = prepared(digits)
    for wrong in (undone(right), 255 * undone(right)):
        assert "the ones or the others" in (found := ImageCheck(ImageRecord().seen(wrong)).look(right)) or (
            "the source images were not" in found
        )


def test_an_adapter_a_monitor_and_a_server_warn_of_other_images(source):
    stats = source.needs["stats"]
    for watching in (cafe.create("cafe", source.classifier, stats), cafe.Monitor(source.classifier, stats)):
        with pytest.warns(cafe.SourceWarning, match="the images have values from .* the source images from"):
            watching(source.images[:40] * 60)
        watching(source.images[:40] * 60)  # once
    with pytest.warns(cafe.SourceWarning, match="the images are 3×12×12, but the source images were 3×10×10"):
        cafe.create("cafe", source.classifier, stats)(torch.randn(8, 3, 12, 12))
    service = cafe_service(source.classifier, stats)
    service.answer(source.images[:40] * 60, ["gate"] * 40, [True] * 40)
    events = [event["text"] for event in service.status()["events"] if event["kind"] == "warning"]
    assert len(events) == 1 and "camera gate: the images have values from" in events[0]


def cafe_service(classifier, stats):
    from cafe_tta.serve import Service, Settings

    return Service(cafe.create("cafe", classifier, stats), Settings(), stats)


def test_source_images_unlike_those_of_training_are_noticed(source):
    for wrong in (lambda x: x * 0.25 + 0.5, lambda x: x * 64 + 120, lambda x: x * 4 - 2):
        with pytest.warns(cafe.SourceWarning, match=r"first BatchNorm layer .* normalised as in training\?"):
            cafe.FeatureStats.fit(source.classifier, [wrong(batch) for batch, _ in source.loader])


def test_the_divergence_from_training_equals_a_slow_computation(source):
    check = TrainingCheck(source.classifier)
    images = source.images[:20] * 1.5 + 0.2
    with torch.no_grad(), check.watching():
        source.classifier(images[:7])
        source.classifier(images[7:])
    source.classifier(source.images)  # nobody listens any more
    convolution, norm = source.classifier.backbone.model[:2]
    values = convolution(images).detach().double().numpy()
    total = 0.0
    for channel in range(values.shape[1]):
        mean, var = values[:, channel].mean(), values[:, channel].var()
        trained_mean, trained_var = norm.running_mean[channel].item(), norm.running_var[channel].item()
        there = 0.5 * (var / trained_var + (mean - trained_mean) ** 2 / trained_var - 1 - math.log(var / trained_var))
        back = 0.5 * (trained_var / var + (mean - trained_mean) ** 2 / var - 1 - math.log(trained_var / var))
        total += (there + back) / 2
    assert check.divergence() == pytest.approx(total / values.shape[1], rel=1e-6)


def test_models_that_tell_nothing_of_training_are_not_judged(source_without_batchnorm, make_network):
    assert TrainingCheck(source_without_batchnorm.classifier).layer is None
    assert TrainingCheck(make_network()).layer is None  # its BatchNorm layers are new


def test_statistics_of_few_images_are_noticed_where_they_are_made_and_where_they_are_loaded(source, tmp_path):
    stats = cafe.FeatureStats.fit(source.classifier, [source.images[:23]])
    with pytest.warns(cafe.SourceWarning, match=r"of 23 images, but the widest group has 12 .* at least 96 images"):
        grouped = stats.group(1)
    grouped.save(tmp_path / "few")
    with pytest.warns(cafe.SourceWarning, match=r"few: the statistics are of 23 images"):
        cafe.SourceStats.load(tmp_path / "few")
    assert few_images(96, 12) == "" and stats.group(12).widest_group == 1  # enough for groups of one


def test_reprs_are_short(source):
    values = [*source.needs.values(), source.feature_stats, source.needs["posterior"].members[0]]
    shown = [value for value in values if hasattr(value, "_repr_html_")]
    assert len(shown) == len(cafe.SOURCES) + 1  # all but loaders; statistics before grouping, and a member
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"], lr=0.01)
    adapter(source.images[:40])
    monitor = cafe.Monitor(source.classifier, source.needs["stats"])
    for value in [*shown, adapter, adapter.report, monitor]:
        assert len(repr(value)) < 300 and "tensor(" not in repr(value), repr(value)
        assert value._repr_html_().startswith("<table>") and len(value._repr_html_()) < 1000
    assert repr(adapter) == (
        "<CAFe: method cafe, options lr=0.01, model 12 features, 4 classes, so far 1 batches, 40 images, 1 steps>"
    )


# Names of classes


def test_folders_that_are_not_in_the_order_of_the_models_outputs_are_noticed(tmp_path):
    """Ten classes are ten shades of grey, which the model tells apart: 2 v t - t² is largest for the nearest t."""
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    shades = torch.arange(10) / 9
    head = nn.Linear(3, 10)
    with torch.no_grad():
        head.weight.copy_(100 * 2 / 3 * shades[:, None].expand(-1, 3))
        head.bias.copy_(-100 * shades**2)
    classifier = cafe.split_classifier(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), head))
    model = Model(classifier, "shades", Preprocessing(16, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)), None)
    for root, called in (("wrong", names), ("right", [f"{i} {name}" for i, name in enumerate(names)])):
        for label, name in enumerate(called):
            (tmp_path / root / name).mkdir(parents=True)
            for i in range(12):
                shade = Image.new("RGB", (16, 16), (int(label / 9 * 255),) * 3)
                shade.save(tmp_path / root / name / f"{i}.png")

    def made(root, model=model):
        return SourceImages(model, data.load(str(tmp_path / root))).feature_stats().stats.images.classes

    said = "10% of 120 source images are answered correctly, and 100% if .* order.*eight, five, four, ….*--classes FILE"
    with pytest.warns(SourceWarning, match=said):
        made("wrong")
    assert made("right")[0] == "0 zero"  # without a warning
    assert made("wrong", replace(model, classes=tuple(names))) == tuple(names)  # the model knows its classes
