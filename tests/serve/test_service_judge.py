"""The judge: refuses what got worse, steps back, and keeps one bad camera from harming the others."""

import math

import pytest
import torch

import cafe_tta as cafe
from cafe_tta.judge import Figures, Judge
from cafe_tta.serve import Service, Settings
from cafe_tta.serve.buffer import Item, panels
from cafe_tta.serve.cameras import Camera, Screened, screen
from cafe_tta.source import Reference

WAIT = 60.0


def weather(count, seed=0, gain=1.7, bias=0.4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 10, 10, generator=generator) * gain + bias


@pytest.fixture
def serve(source):
    made = []

    def make(method="cafe", stats=True, options=None, **config):
        adapter = cafe.create(method, source.classifier, source.needs[cafe.METHODS[method].needs], **(options or {}))
        plain = {"step_images": 32, "buffer_images": 512, "validation_images": 64, "adapt_share": 1.0}
        service = Service(adapter, Settings(**(plain | config)), source.needs["stats"] if stats else None)
        made.append(service)
        service.start()
        return service

    yield make
    for service in made:
        service.close(WAIT)


def send(service, camera, images, size=16):
    found = []
    for part in images.split(size):
        found += service.answer(part, [camera] * len(part), [True] * len(part)).adapted
        assert service.settle(WAIT)
    return found


def camera_of(service, name):
    return next(c for c in service.status()["cameras"] if c["camera"] == name)


# Measuring


def test_frechet_distance_is_the_sum_over_the_groups(source):
    stats = source.needs["stats"]
    with torch.no_grad():
        features = source.classifier.backbone(weather(50))
    expected = 0.0
    for dims, cov in zip(stats.groups, stats.covs, strict=True):
        part = features[:, dims].double()
        expected += cafe.metrics.frechet_distance(part.mean(0), part.T.cov(correction=0), stats.mean[dims], cov)
    assert Reference(stats, margin=1.5).frechet(features) == pytest.approx(expected, rel=1e-6)


def test_the_server_finds_the_source_where_the_gate_does(source):
    stats = source.needs["stats"]
    with torch.no_grad():
        features = source.classifier.backbone(source.images[:32])
    reference = Reference(stats, margin=2.0)
    assert reference.alignment(features) == pytest.approx(
        cafe.losses.alignment(features, stats, samples_per_dim=2.0).item(), rel=1e-5
    )
    threshold = 2.0 * stats.meta["alignment"]["largest"]["32"]
    assert reference.threshold(32) == pytest.approx(threshold)
    assert reference.looks_like_source(features) is True and reference.looks_like_source(features + 5) is False
    assert reference.looks_like_source(features[:15]) is None  # too few images to say


def test_panels_hold_each_camera_together():
    items = [Item(f"c{i % 5}", f"c{i % 5}", torch.zeros(1), i) for i in range(100)]
    items += [Item(f"small{i}", f"small{i}", torch.zeros(1), i) for i in range(40)]
    found = panels(items)
    assert sorted(index for panel in found for index in panel) == list(range(140))
    assert [len(panel) for panel in found] == [20] * 5 + [8] * 5
    four = [Item(f"c{i % 4}", f"c{i % 4}", torch.zeros(1), i) for i in range(60)]  # 15 of each camera
    assert all({four[i].camera for i in panel} == {f"c{n}"} for n, panel in enumerate(panels(four)))
    assert all(len({items[index].camera for index in panel}) == 1 for panel in found[:5])
    assert len(panels(items[:3])) == 1  # too few for more
    assert panels([]) == []


def figures(alignment=(1.0,) * 5, frechet=(1.0,) * 5, entropy=(0.2,) * 5, classes=4.0, finite=True):
    return Figures(tuple(alignment), tuple(frechet), tuple(entropy), classes, finite)


def test_the_median_over_the_panels_decides():
    judge = Judge(None, num_classes=4)
    assert judge.worse(figures(), figures(), "it") == ""
    assert judge.worse(figures(alignment=(1, 1, 1, 100, 100)), figures(), "it") == ""
    assert judge.worse(figures(alignment=(0.01, 0.01, 1.2, 1.2, 1.2)), figures(), "it") == (
        "its alignment loss is 1.20 times that of it (1.2)"
    )
    assert "Fréchet" in judge.worse(figures(frechet=(2,) * 5), figures(), "it")
    assert "collapse" in judge.worse(figures(classes=1.5), figures(), "it")
    assert "guesses" in judge.worse(figures(entropy=(1.2,) * 5), figures(), "it")
    assert "NaN" in judge.worse(figures(finite=False), figures(), "it")
    assert judge.worse(figures(), figures(finite=False), "it") == ""


def test_collapse_is_measured_as_the_effective_number_of_classes(source):
    judge = Judge(None, num_classes=4)
    even = 9 * torch.eye(4).repeat(8, 1)
    found = judge.measure(torch.zeros(32, 12), even, [list(range(32))])
    assert found.classes == pytest.approx(4.0) and found.alignment == ()
    assert judge.measure(torch.zeros(32, 12), even[:1].repeat(32, 1), [list(range(32))]).classes == pytest.approx(1.0)
    assert not judge.measure(torch.zeros(32, 12), even * math.nan, [list(range(32))]).finite


# Images and cameras that are not worth adapting to


def test_screen_sees_flat_frames_and_equal_images():
    images = weather(6)
    images[1] = 0.3
    images[2] = torch.tensor([0.1, 0.5, -2.0])[:, None, None]
    images[4] = images[3] + 1e-4
    found = screen(images)
    assert [seen.flaw for seen in found] == ["", "flat", "flat", "", "", ""]
    assert found[3].fingerprint == found[4].fingerprint
    assert len({found[i].fingerprint for i in (0, 3, 5)}) == 3
    assert [seen.flaw for seen in screen(torch.zeros(2, 7))] == ["flat", "flat"]


def test_screen_sees_values_that_no_image_has():
    images = weather(5, gain=0.3).clamp(-1, 1)
    images[1] *= 100
    images[2, 0, 3, 3] = math.nan
    images[3, 1, 2, 2] = 2.9  # outside of the range, but by less than its length
    assert [seen.flaw for seen in screen(images, limits=(-1, 1))] == ["", "outside", "outside", "", ""]
    assert all(seen.flaw == "" for seen in screen(images[[0, 1, 3, 4]]))  # where the range is unknown


BAD = {
    "black": (lambda source: torch.zeros(96, 3, 10, 10), "flat frames"),
    "repeated": (lambda source: weather(2).repeat(48, 1, 1, 1), "the same images again and again"),
    "repeated with noise": (lambda source: weather(1) + 1e-3 * weather(96, seed=5), "it"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_degenerate_camera_is_quarantined_and_still_answered(source, serve, kind):
    make, reason = BAD[kind]
    service = serve()
    images = make(source)
    good = weather(96, seed=1)
    taken = []
    for ours, theirs in zip(good.split(16), images.split(16), strict=True):
        send(service, "good", ours)
        taken += send(service, "bad", theirs)
    service._cameras.assess()
    assert reason in camera_of(service, "bad")["quarantined"] and camera_of(service, "good")["quarantined"] is None
    assert not any(send(service, "bad", images[:16]))
    assert "bad" not in service._buffer.sizes()
    answers = service.answer(images[:4], ["bad"] * 4, [True] * 4)
    assert torch.isfinite(answers.logits).all()
    assert kind == "repeated with noise" or sum(taken) <= 2  # seen in the pixels, image by image
    # It is let in again when it has come to its senses.
    for part in weather(160, seed=7).split(16):
        send(service, "bad", part)
    service._cameras.assess()
    assert camera_of(service, "bad")["quarantined"] is None


def test_a_camera_that_sees_one_class_all_day_is_not_quarantined():
    camera = Camera("gate")
    for _ in range(128):
        camera.predictions.append((3, 0.99))
    assert camera.suspicion(None) == ""


def test_a_camera_whose_values_no_image_has_is_quarantined():
    camera = Camera("broken")
    for number in range(32):
        camera.flaw(Screened("outside" if number % 4 else "", number))
    assert camera.suspicion(None) == "it sends values that no image has"


# Refusing and stepping back


def test_a_harmful_step_is_refused_and_leaves_no_trace(source, serve):
    service = serve(options={"lr": 50.0}, gate=False)
    before = {name: tensor.clone() for name, tensor in service._adaptation.adapter.state().items()}
    images = source.images[:8]
    send(service, "a", weather(48))
    send(service, "b", weather(48, seed=1, gain=1.5))
    status = service.status()
    assert status["steps"]["refused"] >= 1 and status["version"] == 0
    assert "was refused" in next(e for e in status["events"] if e["kind"] == "refused")["text"]
    assert torch.equal(service.probe(images), source.classifier(images).detach())
    for name, tensor in service._adaptation.adapter.state().items():
        assert torch.equal(tensor, before[name]), name


def test_without_the_judge_the_same_step_is_published(serve):
    service = serve(options={"lr": 50.0}, gate=False, judge=False)
    send(service, "a", weather(96))
    assert service.status()["version"] >= 1


def test_after_refusals_the_service_waits_for_more_images(serve):
    service = serve(options={"lr": 50.0}, gate=False)
    for seed in range(12):
        send(service, "a", weather(64, seed=seed))
    assert 1 <= service.status()["steps"]["refused"] <= 5  # 768 images would do for 18 steps


def publish(service, scale):
    """A snapshot that passed every check, and is bad all the same: its first weights are scaled."""
    snapshots = service._snapshots
    state = {name: tensor.clone() for name, tensor in snapshots.adapter.state().items()}
    name = next(name for name in state if name.startswith("classifier.") and state[name].dim() == 4)
    state[name] *= scale
    snapshots.take(snapshots.highest + 1, state)


def test_a_snapshot_that_turns_out_worse_than_the_source_is_rolled_back(source, serve):
    service = serve(gate=False)
    with service._stepping:
        publish(service, 30.0)
    assert service.status()["version"] == 1
    send(service, "a", weather(32))
    send(service, "b", weather(32, seed=1))
    status = service.status()
    assert status["steps"]["rolled_back"] == 1
    event = next(e for e in status["events"] if e["kind"] == "rolled_back")
    assert "from version 1 to the source model: its " in event["text"] and event["version"] == 0


def test_the_newest_better_snapshot_is_preferred_to_the_source(source, serve):
    service = serve(gate=False)
    for seed in range(4):
        send(service, "a", weather(32, seed=seed))
        send(service, "b", weather(32, seed=10 + seed))
    good = service.status()["version"]
    assert good >= 3
    with service._stepping:
        publish(service, 30.0)
    for seed in range(4):
        if service.status()["steps"]["rolled_back"]:
            break
        send(service, "a", weather(32, seed=20 + seed))
    event = next(e for e in service.status()["events"] if e["kind"] == "rolled_back")
    assert f"from version {good + 1} to {good}: its " in event["text"] and event["version"] == good


def test_a_camera_that_the_published_snapshot_serves_worse_gets_the_source_model(source, serve):
    service = serve(gate=False)
    camera = service._cameras.touch("odd")
    camera.gain = 0.3
    with service._stepping:
        publish(service, 1.01)
    service.pause()
    answers = service.answer(source.images[:3], ["odd", "other", "odd"], [True] * 3)
    assert answers.versions == [0, 1, 0]


@pytest.mark.parametrize(
    ("drift", "gain", "source_answers"),
    [
        (None, -0.1, True),
        (1.5, -0.1, True),
        (1.5, -0.3, False),
        (3.0, -0.1, False),
        (3.0, 0.1, False),
        (3.0, 0.3, True),
    ],
)
def test_which_model_is_expected_to_be_better_depends_on_how_far_a_camera_is_from_the_source(
    drift, gain, source_answers
):
    camera = Camera("a", source_drift=drift)
    camera.learn_gain(gain, images=14)
    assert camera.wants_source  # on few images it must be clearer, whatever the drift
    camera.learn_gain(gain, images=14)
    assert camera.wants_source is source_answers
    assert Camera("a", source_drift=drift, gain=gain, looks_like_source=True).wants_source
    assert not Camera("a", source_drift=drift).wants_source  # nothing is known of what is published


@pytest.mark.parametrize("kind", ["garbage", "black", "one class", "repeated"])
def test_a_bad_camera_alone_at_night_does_not_harm_the_others(source, serve, kind):
    """By day good cameras; at night nothing but a bad one, for a long time: the others' alignment must not suffer."""
    generator = torch.Generator().manual_seed(9)
    make = {
        "garbage": lambda n: 40 * torch.rand(n, 3, 10, 10, generator=generator) ** 6 - 20,
        "black": lambda n: torch.zeros(n, 3, 10, 10),
        "one class": lambda n: weather(
            n, seed=int(torch.randint(0, 10**6, (1,), generator=generator)), gain=0.3, bias=4.0
        ),
        "repeated": lambda n: weather(1).repeat(n, 1, 1, 1) + 0.01 * torch.randn(n, 3, 10, 10, generator=generator),
    }[kind]
    reference = Reference(source.needs["stats"], margin=1.5)

    def alignment(service):
        features = service._snapshots.published.front(weather(200, seed=77)).features
        return reference.alignment(features)

    found = {}
    for judged in (True, False):
        service = serve(judge=judged, gate=False, options={"lr": 0.02})
        for seed in range(6):
            send(service, "a", weather(32, seed=seed))
            send(service, "b", weather(32, seed=10 + seed))
            send(service, "c", weather(32, seed=20 + seed))
        for _ in range(60):
            send(service, "bad", make(32), size=32)
        found[judged] = alignment(service)
    with torch.no_grad():
        of_source = reference.alignment(source.classifier.backbone(weather(200, seed=77)))
    assert found[True] <= 1.1 * of_source
    assert found[True] < found[False]
