"""Drift without labels: 1 for clean images of any number, more for worse images; a monitor that only watches."""

import threading

import pytest
import torch

import cafe_tta as cafe
from cafe_tta import corruptions, data, models
from cafe_tta.models import Preprocessing

# The running statistics of a toy network are not quite those of its source images.
pytestmark = pytest.mark.filterwarnings("ignore:source images that are normalised:cafe_tta.SourceWarning")

DIGITS = Preprocessing(32, (0.3, 0.3, 0.3), (0.35, 0.35, 0.35))


@pytest.fixture(scope="module")
def watched():
    """A small ResNet on digits, with BatchNorm statistics of its source images."""
    torch.manual_seed(0)
    classifier = cafe.split_classifier(models.build("cafe:digits-resnet", num_classes=10))
    images = DIGITS(data.load("digits:train").images(range(896)))
    classifier.train()
    with torch.no_grad():
        for _ in range(20):
            classifier(images[:256])
    classifier.eval()
    return classifier, cafe.FeatureStats.fit(classifier, images.split(256), DIGITS).group()


@pytest.mark.parametrize("size", [8, 32, 64, 256])
def test_clean_images_have_a_drift_of_1_for_every_batch_size(watched, size):
    images = DIGITS(data.load("digits:test").images(range(512)))
    found = sorted(cafe.drift(*watched, part) for part in images.split(size))
    assert 0.85 < found[len(found) // 2] < 1.15
    assert sum(0.7 < one < 1.3 for one in found) >= 0.9 * len(found)


@pytest.mark.parametrize("name", ["fog", "contrast", "brightness", "gaussian_noise"])
def test_drift_grows_with_the_severity_and_not_with_the_batch_size(watched, name):
    digits = data.load("digits:test").images(range(128))
    batches = [DIGITS(corruptions.corrupt(digits, name, severity)) for severity in (1, 2, 3, 4, 5)]
    found = [cafe.drift(*watched, images) for images in batches]
    assert found == sorted(found) and found[-1] > 1.1 * found[0]
    small = [cafe.drift(*watched, part) for part in batches[-1].split(16)]
    assert sum(small) / len(small) == pytest.approx(found[-1], rel=0.1)


def test_a_monitor_answers_as_the_model_does_and_forgets_what_leaves_its_window(watched):
    classifier, stats = watched
    digits = data.load("digits:test").images(range(160))
    clean, fog = DIGITS(digits), DIGITS(corruptions.corrupt(digits, "fog", 5))
    monitor = cafe.Monitor(classifier, stats, window=64)
    assert monitor.drift is None and "unknown yet" in repr(monitor)
    classifier.train()
    try:
        logits = monitor(fog)
        assert all(module.training for module in classifier.modules())  # left as it was
    finally:
        classifier.eval()
    assert torch.equal(logits, classifier(fog).detach())
    features = classifier.backbone(fog[-64:]).detach()
    assert monitor.drift == pytest.approx(cafe.Reference(stats).drift(features), rel=1e-6)
    monitor(clean)
    assert 0.8 < monitor.drift < 1.2 and monitor.images == 320 and len(monitor._features) == 64
    monitor.reset()
    assert monitor.drift is None and monitor.images == 0


def test_many_threads_may_ask_a_monitor(watched):
    monitor = cafe.Monitor(*watched, window=32)
    images = DIGITS(data.load("digits:test").images(range(64)))
    expected = watched[0](images).detach()
    answers: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: answers.append(monitor(images))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(answer, expected) for answer in answers) and monitor.images == 8 * 64


def test_what_cannot_be_watched_is_refused(watched, source):
    with pytest.raises(ValueError, match="expected at least 8 images to tell their drift, but got 7"):
        cafe.drift(*watched, torch.zeros(7, 3, 32, 32))
    with pytest.raises(ValueError, match="expected a `window` of at least 8 images, but got 4"):
        cafe.Monitor(*watched, window=4)
    with pytest.raises(ValueError, match="the source statistics have 12 features"):
        cafe.Monitor(watched[0], source.needs["stats"])
    with pytest.raises(TypeError, match="a monitor needs SourceStats, but got SourceHistograms"):
        cafe.Monitor(watched[0], source.needs["histograms"])


def test_the_gate_reports_the_drift_that_the_source_classifier_sees(source):
    """Whatever the adapted one makes of the images."""
    stats = source.needs["stats"]
    adapter = cafe.create("cafe", source.classifier, stats, gate=True, gate_patience=1, lr=0.01)
    for images in (source.corrupted, source.images[:48], source.corrupted):
        adapter(images)
        assert adapter.report.drift == pytest.approx(cafe.drift(source.classifier, stats, images), rel=1e-5)
    assert cafe.drift(source.classifier, stats, source.corrupted) > 1.3
    plain = cafe.create("cafe", source.classifier, stats)
    plain(source.corrupted)
    assert plain.report.drift is None
