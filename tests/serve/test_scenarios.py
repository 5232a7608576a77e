"""Scenarios: what honest cameras and attackers send, how it is scored, and how the server fares in some of them."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from cafe_tta import data
from cafe_tta.bench.embedded import embedded_digits
from cafe_tta.cli.app import app
from cafe_tta.methods import method
from cafe_tta.serve import Service, load_settings
from cafe_tta.simulate import SCENARIOS, SimulationOptions, images
from cafe_tta.simulate.attacks import LASTS
from cafe_tta.simulate.client import read, request
from cafe_tta.simulate.scenarios import DEVELOPMENT, EACH, ROUNDS, STRETCH, WEATHER, domains, honest_cameras
from cafe_tta.simulate.scores import WINDOW, Scores

from .http_server import Server
from .test_simulate import run

WAIT = 60.0
NAMES = [camera.name for camera in honest_cameras()]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    return embedded_digits(tmp_path_factory.mktemp("cache") / "digits")


@pytest.fixture(scope="module")
def pool(embedded, tmp_path_factory):
    """Test digits in the weather that rules are chosen on: the figures of the docs are of other images."""
    digits = data.load("digits:test")

    def classify(pixels):
        with torch.no_grad():
            return embedded.classifier(embedded.model.preprocessing(pixels))

    wanted = sorted({*domains(), *domains(DEVELOPMENT)})
    labels = np.asarray(digits.labels)
    return images.make(tmp_path_factory.mktemp("pool"), digits, labels, classify, wanted, preset="cifar", seed=0)


def rounds_of(name, pool, rounds=32, seed=0):
    return list(SCENARIOS[name].rounds(pool, rounds=rounds, seed=seed))


def of_attackers(played):
    return [[sending for sending in sent if sending.honest is None] for sent in played]


# What is sent


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_sends_what_it_says(pool, name):
    scenario = SCENARIOS[name]
    assert scenario.name == name and scenario.text.endswith(".")
    played = rounds_of(name, pool)
    assert len(played) == 32
    for number, sent in enumerate(played):
        honest, others = sent[: len(WEATHER)], sent[len(WEATHER) :]
        assert [sending.camera for sending in honest] == NAMES
        assert [sending.honest for sending in honest] == list(range(len(WEATHER)))
        for sending in honest:
            assert sending.images.dtype == np.uint8 and sending.images.shape == (EACH, *pool.shape)
            assert len(sending.labels) == len(sending.source) == EACH
            assert sending.adapt is not (scenario.quiet and 16 <= number < 24)
        attacked = scenario.attack is not None and number >= scenario.attack.begins * 32
        assert bool(others) is attacked
        assert sum(len(sending.images) for sending in others) == (scenario.attack.images if attacked else 0)
        for sending in others:
            assert sending.honest is sending.labels is sending.source is None and sending.adapt
            height, width, channels = pool.shape
            plain = sending.images.dtype == np.uint8
            assert sending.images.shape[1:] == (pool.shape if plain else (channels, height, width))
            assert plain or sending.images.dtype == np.float32


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_seed_decides_everything(pool, name):
    first, again, other = (rounds_of(name, pool, 12, seed) for seed in (3, 3, 4))
    for ours, theirs in zip(first, again, strict=True):
        assert [s.camera for s in ours] == [s.camera for s in theirs]
        assert all(np.array_equal(a.images, b.images) for a, b in zip(ours, theirs, strict=True))
    assert any(not np.array_equal(a[0].labels, b[0].labels) for a, b in zip(first, other, strict=True))


def test_the_weather_of_development_is_other_weather():
    assert set(WEATHER) & set(DEVELOPMENT) == {("clean", 0)} and len(WEATHER) == len(DEVELOPMENT)


def test_cameras_see_one_class_each_for_a_while(pool):
    played = rounds_of("one-class", pool, 4 * STRETCH)
    seen = [[set(sending.labels) for sending in sent] for sent in played]
    assert all(len(classes) == 1 for sent in seen for classes in sent)
    assert all(len(set.union(*sent)) == len(WEATHER) for sent in seen)  # another one for each camera
    assert all(seen[0][n] == seen[STRETCH - 1][n] != seen[STRETCH][n] for n in range(len(WEATHER)))


def test_cameras_see_the_same_two_classes_at_the_same_time(pool):
    played = rounds_of("same-classes", pool, 4 * STRETCH)
    stretches = [set(np.concatenate([s.labels for sent in played[n : n + STRETCH] for s in sent]))
                 for n in range(0, len(played), STRETCH)]  # fmt: skip
    assert all(len(classes) == 2 for classes in stretches) and len(set.union(*stretches)) == 8


def test_an_honest_camera_sends_no_image_twice_in_a_row(pool):
    for name in ("no-attack", "one-class"):
        sent = [played[0].images for played in rounds_of(name, pool, 10)]
        assert len({image.tobytes() for part in sent for image in part}) == 10 * EACH


def test_names_of_attackers(pool):
    assert {s.camera for sent in of_attackers(rounds_of("noise", pool)) for s in sent} == {"bad"}
    assert {s.camera for sent in of_attackers(rounds_of("honest-names-fog", pool)) for s in sent} == set(NAMES)
    many = Counter(s.camera for sent in of_attackers(rounds_of("names-clean-noise", pool)) for s in sent)
    assert len(many) == 200 and not set(many) & set(NAMES)
    new = [{s.camera for s in sent} for sent in of_attackers(rounds_of("new-names", pool))]
    assert all(len(names) in (0, 17) for names in new)
    assert all(not new[n] & new[n + LASTS] for n in range(len(new) - LASTS))  # given up


def test_attackers_send_what_they_are_called_for(pool):
    def sent(name, place=-1):
        return np.concatenate([s.images for s in of_attackers(rounds_of(name, pool))[place]])

    assert not sent("black").any()
    assert np.abs(sent("extreme")).max() > 1000
    first, last = (sent("ramp", place).astype(float) for place in (8, -1))
    assert np.abs(np.diff(first, axis=1)).mean() < np.abs(np.diff(last, axis=1)).mean()  # snow, and noise in the end
    assert len({image.tobytes() for image in sent("mosaics")}) == 48
    assert sent("negatives").mean() > 128 > sent("honest-names-clean").mean()
    assert sent("foreign").shape == (36, *pool.shape)
    three = pool.take(("snow", 5), np.arange(3)).astype(float)
    near = [min(np.abs(image - one).mean() for one in three) for image in sent("repeated")]
    assert max(near) < 8  # of 256 levels: their noise


# How it is scored


def test_the_worst_window_is_found_wherever_it_is():
    scores = Scores(rounds=20, cameras=2)
    for number in range(20):
        for camera in range(2):
            bad = camera == 1 and 4 <= number < 4 + WINDOW
            scores.add(number, camera, images=10, source=5, served=2 if bad else 6)
    assert len(scores.windows) == 13 and scores.worst == pytest.approx(100 * (8 - 24) / 160)
    assert scores.far_below == sum(gain < -2 for gain in scores.windows) > 1
    assert scores.by_camera.tolist() == pytest.approx([10, 100 * (12 - 24) / 200])
    assert json.loads(json.dumps(scores.numbers()))["windows"] == 13
    few = Scores(rounds=3, cameras=1)
    few.add(0, 0, 10, 5, 5)
    assert few.worst == 0 and len(few.windows) == 1


# The server under the important ones


@pytest.fixture
def play(embedded, pool):
    """Plays a scenario in the service, in the weather that rules are chosen on: scores and status."""

    def tensor_of(made):
        return embedded.model.preprocessing(made) if made.dtype == np.uint8 else torch.from_numpy(made)

    def go(name, rounds=40, seed=100, step_images=256):
        settings = load_settings({"step_images": step_images, "adapt_share": 1.0})
        adapter = method(settings.method)(embedded.classifier, embedded.stats, settings.config())
        service, scores = Service(adapter, settings, embedded.stats), Scores(rounds, len(DEVELOPMENT))
        service.start()
        try:
            for number, sent in enumerate(SCENARIOS[name].rounds(pool, DEVELOPMENT, rounds, seed)):
                made = torch.cat([tensor_of(sending.images) for sending in sent])
                names = [sending.camera for sending in sent for _ in sending.images]
                adapt = [sending.adapt for sending in sent for _ in sending.images]
                answered = service.answer(made, names, adapt).labels.split([len(sending.images) for sending in sent])
                for sending, labels in zip(sent, answered, strict=True):
                    if sending.honest is not None:
                        right = [int((np.asarray(a) == sending.labels).sum()) for a in (sending.source, labels)]
                        scores.add(number, sending.honest, len(labels), *right)
                assert service.settle(WAIT)
            return scores, service.status()
        finally:
            service.close(WAIT)

    return go


@pytest.mark.parametrize("name", ["one-class", "same-classes"])
def test_cameras_that_see_few_classes_are_helped_and_not_quarantined(play, name):
    scores, status = play(name, rounds=48, step_images=96)
    assert status["steps"]["accepted"] > 0
    assert not [camera["camera"] for camera in status["cameras"] if camera["quarantined"]]
    assert scores.accuracy > scores.source_accuracy + 3 and scores.worst >= -2


@pytest.mark.parametrize("name", ["names-clean-noise", "names-noise-quiet"])
def test_a_flood_of_names_does_no_harm(play, name):
    scores, status = play(name)
    trusted = [camera["camera"] for camera in status["cameras"] if camera["trusted"]]
    assert set(trusted) >= {camera.name for camera in honest_cameras(DEVELOPMENT)}
    assert len(trusted) <= 12  # of 206
    assert scores.accuracy > scores.source_accuracy + 5 and scores.worst >= -2


def test_values_that_no_image_has_are_not_adapted_to(play):
    scores, status = play("extreme", rounds=24)
    bad = next(camera for camera in status["cameras"] if camera["camera"] == "bad")
    assert bad["quarantined"] == "it sends values that no image has" and bad["contributed"] == 0
    assert scores.worst >= -2


# The command


def test_scenarios_are_listed_with_a_sentence_each(capsys):
    with pytest.raises(SystemExit) as end:
        app(["simulate", "--list"])
    assert end.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for scenario in SCENARIOS.values():
        assert scenario.name in said and scenario.text.split()[0] in said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scenario": "blak"}, "no scenario 'blak'; did you mean 'black'?"),
        ({"scenario": "black", "duration": 5.0}, "expected `rounds` with `scenario`, but got `duration`"),
        ({"scenario": "black", "images": 5}, "expected `rounds` with `scenario`, but got `images`"),
    ],
)
def test_scenarios_that_cannot_be_are_refused(options, expected):
    with pytest.raises(ValueError, match=expected.replace("?", r"\?")):
        SimulationOptions(**options)
    assert SimulationOptions(scenario="black").rounds == ROUNDS


def test_tensors_and_images_that_are_not_adapted_to_are_asked_for_in_the_protocol():
    size, body = request(np.zeros((2, 3, 4, 4), np.float32), "gate", adapt=False)
    header = json.loads(body[:size])
    assert header["parameters"] == {"camera": "gate", "adapt": False}
    assert header["inputs"][0]["datatype"] == "FP32" and len(body) - size == 2 * 3 * 4 * 4 * 4
    size, body = request(np.zeros((2, 4, 4, 3), np.uint8), "gate")
    assert "adapt" not in json.loads(body[:size])["parameters"]
    assert read(json.dumps({"outputs": [{"name": "label", "data": [1, 2]}]}).encode(), None)[0].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["extreme", "names-noise-quiet"])
def test_a_scenario_is_played_against_a_real_server(embedded, tmp_path, name):
    cache = {"CAFE_TTA_CACHE": str(embedded.folder.parent)}
    with Server("--step-images", 64, "--validation-images", 64, env=cache) as server:
        arguments = ("--scenario", name, "--rounds", 12, "--fast", "--pool", 128, "--output", tmp_path / "found.json")
        found = run("--url", server.url, *arguments, env=cache)
        with server.client() as client:
            status = client.get("/api/status").json()
    assert found.returncode == 0, found.stderr
    assert SCENARIOS[name].text in found.stderr and "worst window of 8 rounds" in found.stdout
    numbers = json.loads((tmp_path / "found.json").read_text())
    assert numbers["settings"]["scenario"] == name and numbers["settings"]["rounds"] == 12
    assert numbers["overall"]["images"] == 12 * 6 * EACH and numbers["lost"] == {}
    assert numbers["scenario"]["windows"] == 5
    assert sum(numbers["scenario"]["steps"].values()) <= sum(status["steps"].values())  # one more may have come since
    sent = {camera["camera"]: camera["images"] for camera in status["cameras"]}
    assert all(sent[camera] == 12 * EACH for camera in NAMES)
    assert sum(images for camera, images in sent.items() if camera not in NAMES) > 0
