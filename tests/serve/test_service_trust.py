"""Names that anyone can use: who has a share of its own, what a camera's images did, and how to undo it."""

import itertools
import os
from collections import Counter

import pytest
import torch

import cafe_tta as cafe
from cafe_tta.serve import Service, Settings
from cafe_tta.serve.buffer import FEW, NEWCOMERS, Buffer
from cafe_tta.serve.cameras import FOUNDING_STEPS, NEWCOMER, TRUST_STEPS, Camera
from cafe_tta.serve.credentials import LOOK_EVERY, Credentials
from cafe_tta.serve.events import OTHERS
from cafe_tta.serve.snapshots import CONTRIBUTORS
from cafe_tta.serve.stall import ROUNDS, STEPS

WAIT = 60.0


@pytest.fixture
def serve(source):
    made = []

    def make(start=True, **config):
        adapter = cafe.create("cafe", source.classifier, source.needs["stats"])
        plain = {"step_images": 16, "buffer_images": 512, "validation_images": 16, "adapt_share": 1.0, "gate": False}
        plain |= {"judge": False}
        service = Service(adapter, Settings(**(plain | config)), None)
        made.append(service)
        if start:
            service.start()
        return service

    yield make
    for service in made:
        service.close(WAIT)


def images(count, seed=0):
    return torch.randn(count, 3, 10, 10, generator=torch.Generator().manual_seed(seed)) * 1.7 + 0.4


def send(service, camera, count=32, seed=0, verified=False):
    service.answer(images(count, seed), [camera] * count, [True] * count, verified=[verified] * count)
    assert service.settle(WAIT)


def camera_of(service, name):
    return next(camera for camera in service.status()["cameras"] if camera["camera"] == name)


def step(service, camera):
    """Sends images of one camera until one more step was accepted."""
    wanted = service.status()["steps"]["accepted"] + 1
    while service.status()["steps"]["accepted"] < wanted:
        send(service, camera, seed=wanted)
    return service.status()["version"]


# Who has a share of its own


def test_cameras_of_the_beginning_are_trusted_after_a_few_images(serve):
    service = serve(adapt=True, step_images=128, buffer_images=1024)
    send(service, "gate", NEWCOMER)
    assert not camera_of(service, "gate")["trusted"] and service._buffer.sizes().keys() == {NEWCOMERS}
    send(service, "gate", 8)
    assert camera_of(service, "gate")["trusted"] and "gate" in service._buffer.sizes()


def test_names_that_come_and_go_share_one_share_for_ever(serve):
    service = serve()
    while service._cameras.steps < FOUNDING_STEPS:
        send(service, "gate")
    for number in range(40):  # each sends more than a newcomer does, and is never seen again
        send(service, f"fake-{number}", 2 * NEWCOMER, seed=number)
        send(service, "gate", 8)
    assert {owner for owner in service._buffer.sizes() if owner.startswith("fake")} == set()
    assert service._buffer.sizes().keys() <= {NEWCOMERS, "gate"}
    assert not any(camera["trusted"] for camera in service.status()["cameras"] if camera["camera"] != "gate")


def test_camera_that_stays_earns_a_share_of_its_own(serve):
    service = serve()
    while service._cameras.steps < FOUNDING_STEPS:
        send(service, "gate")
    began = service._cameras.steps
    while not service._cameras.touch("late").settled:
        send(service, "late")
        assert service._cameras.steps - began <= TRUST_STEPS
    send(service, "late", 8)
    assert service._cameras.steps - began >= TRUST_STEPS and camera_of(service, "late")["trusted"]
    assert "late" in service._buffer.sizes()


def test_trust_is_remembered_over_a_restart(serve, tmp_path):
    first = serve(state=tmp_path)
    while first._cameras.steps < FOUNDING_STEPS:
        send(first, "gate")
    step(first, "gate")
    first.close(WAIT)
    second = serve(state=tmp_path)
    for name in ("gate", "stranger"):
        send(second, name, 2 * NEWCOMER)
    assert camera_of(second, "gate")["trusted"] and not camera_of(second, "stranger")["trusted"]


def test_flood_of_names_makes_no_trusted_camera_forgotten(serve):
    service = serve(max_cameras=8)
    send(service, "gate", 2 * NEWCOMER)
    for number in range(100):
        send(service, f"fake-{number}", 1)
    assert "gate" in [camera["camera"] for camera in service.status()["cameras"]]
    assert len(service._cameras) == 8


def test_with_tokens_only_verified_cameras_have_shares_of_their_own(serve, tmp_path):
    tokens = tmp_path / "cameras.toml"
    tokens.write_text("")
    service = serve(camera_tokens=tokens, step_images=400, buffer_images=2048)
    for name in ("a", "b", "c"):
        send(service, name, 3 * NEWCOMER, seed=1)
    send(service, "gate", 4, verified=True)
    assert service._buffer.sizes().keys() == {NEWCOMERS, "gate"}
    assert [camera["trusted"] for camera in service.status()["cameras"]] == [False, False, False, True]


def test_cameras_without_a_token_are_answered_and_not_adapted_to_where_settings_say_so(serve, tmp_path):
    tokens = tmp_path / "cameras.toml"
    tokens.write_text("")
    service = serve(camera_tokens=tokens, unknown_cameras="answer")
    answers = service.answer(images(4), ["x", "x", "gate", "gate"], [True] * 4, verified=[False, False, True, True])
    assert answers.adapted == [False, False, True, True] and len(answers.logits) == 4


def test_new_cameras_are_quarantined_as_one(serve, monkeypatch):
    """None of them is there for long enough to be found out alone."""
    service = serve(judge=True, step_images=400, buffer_images=2048, validation_images=64)
    send(service, "gate", 2 * NEWCOMER)
    seen = []

    def suspicion(camera, reference):
        seen.append((camera.name, len(camera.predictions)))
        return "it shows one class only" if camera.name == NEWCOMERS and len(camera.predictions) >= 64 else ""

    monkeypatch.setattr(Camera, "suspicion", suspicion)
    for number in range(8):
        send(service, f"fake-{number}", 10, seed=number + 1)
    assert NEWCOMERS in service._buffer.sizes()
    service._note_quarantine(service._cameras.assess())
    assert (NEWCOMERS, NEWCOMER + 80) in seen  # also the first images of the honest one
    assert NEWCOMERS not in service._buffer.sizes() and "gate" in service._buffer.sizes()
    answers = service.answer(images(2, 99), ["fake-8", "gate"], [True] * 2)
    assert answers.adapted == [False, True]
    event = service.status()["events"][-1]
    assert (event["kind"], event["text"]) == ("quarantined", "all new cameras, taken as one: it shows one class only")


def fill(buffer, owner, count):
    for _ in range(count):
        buffer.add(owner or "fake", torch.zeros(1), owner)


def test_newcomers_count_no_more_than_one_camera_in_a_step():
    buffer = Buffer(4096)
    for name in ("a", "b", "c"):
        fill(buffer, name, 16)  # four of each validate
    fill(buffer, NEWCOMERS, 200)
    assert buffer.arrived == 3 * 12 + 12  # they bring about a step no sooner than a fourth camera would
    assert buffer.ready(48) and not buffer.ready(49)
    assert [buffer.missing(count) for count in (48, 49, 64)] == [0, 1, 16]
    taken = [item.owner for item in buffer.take(48)]
    assert {owner: taken.count(owner) for owner in set(taken)} == {"a": 12, "b": 12, "c": 12, NEWCOMERS: 12}
    validating = [item.owner for item in buffer.validation(48)]
    assert validating.count(NEWCOMERS) == validating.count("a") == 4


def test_a_flood_of_newcomers_brings_about_a_step_sooner_and_has_no_more_of_it():
    buffer = Buffer(4096)
    for name in ("a", "b", "c"):
        fill(buffer, name, 16)
    fill(buffer, NEWCOMERS, 1000)
    assert buffer.arrived == 750 // 4  # as rarely as one camera of four, however busy the others are
    assert Counter(item.owner for item in buffer.take(48)) == {"a": 12, "b": 12, "c": 12, NEWCOMERS: 12}


def test_many_names_that_stay_are_trusted_a_few_at_a_time(serve):
    service = serve(step_images=64)
    while service._cameras.steps < FOUNDING_STEPS:
        send(service, "gate")
    began = service._cameras.steps
    fakes = [f"fake-{number}" for number in range(40)]
    while service._cameras.steps < began + 3 * TRUST_STEPS:
        batch = images(40, seed=service._cameras.steps)
        service.answer(batch, fakes, [True] * 40)
        send(service, "gate", 24, seed=service._cameras.steps)
    assert camera_of(service, "gate")["trusted"]
    assert 1 <= sum(camera["trusted"] for camera in service.status()["cameras"]) - 1 <= 3


def test_names_that_send_an_image_or_two_in_the_beginning_are_no_cameras_of_the_beginning(serve):
    service = serve(step_images=64)
    service.answer(images(8), [f"fake-{number}" for number in range(8)], [True] * 8)
    while service._cameras.steps < FOUNDING_STEPS:
        send(service, "gate")
    for number in range(8):
        send(service, f"fake-{number}", 2 * NEWCOMER, seed=number)
    assert [camera["camera"] for camera in service.status()["cameras"] if camera["trusted"]] == ["gate"]


def test_newcomers_alone_bring_about_steps_as_rarely_as_one_camera_of_many():
    buffer = Buffer(4096)
    fill(buffer, NEWCOMERS, 400)
    assert buffer.arrived == 300  # nobody else is here
    for name in ("a", "b"):
        fill(buffer, name, 16)
    buffer.take(16)
    fill(buffer, NEWCOMERS, 400)  # the others are silent
    assert buffer.arrived == 100
    fill(buffer, "a", 4)  # nearly silent: that makes newcomers wait no longer
    assert buffer.arrived == 100
    fill(buffer, "a", 200)
    assert buffer.arrived == 153 + 153  # as a second camera like the busiest


@pytest.mark.parametrize("known", [1, 4, 12])
def test_nearly_silent_cameras_do_not_keep_a_busy_new_one_waiting_for_ever(known):
    count, buffer = 64, Buffer(1024)
    for number in range(known):
        fill(buffer, f"known-{number}", 2)
    sent = 0
    while buffer.missing(count):
        fill(buffer, NEWCOMERS, 1)
        sent += 1
        assert sent <= 4 * count * (known + 1)  # whatever becomes of the others
    assert sent > count * (known + 1)  # as rarely as one camera of many, at the most
    owners = [item.owner for item in buffer.take(count)]
    assert len(owners) >= count // FEW
    assert owners.count(NEWCOMERS) == max(2, count // FEW - 2 * known)  # no more of them than the step needs
    validating = [item.owner for item in buffer.validation(count)]
    assert validating.count(NEWCOMERS) == len(validating) >= count // FEW


def test_late_camera_earns_its_trust_beside_a_known_one_that_sends_an_image_now_and_then(serve):
    service = serve(step_images=64)
    while service._cameras.steps < FOUNDING_STEPS:
        send(service, "gate")
    for number in range(200):
        send(service, "gate", 1, seed=number)
        send(service, "late", 31, seed=number)
        if service._cameras.touch("late").settled:
            break
    assert camera_of(service, "late")["trusted"] and service._cameras.steps >= FOUNDING_STEPS + TRUST_STEPS
    assert number >= TRUST_STEPS * 64 // 31  # it waited for it: no sooner than a camera that is trusted


def test_a_restart_before_the_second_step_does_not_end_the_beginning(serve, tmp_path):
    first = serve(state=tmp_path, step_images=256, buffer_images=1024)
    send(first, "gate-1", 40)
    first.close(WAIT)
    second = serve(state=tmp_path, step_images=256, buffer_images=1024)
    send(second, "gate-1", 40)
    send(second, "gate-2", 2 * NEWCOMER)
    assert camera_of(second, "gate-2")["trusted"]
    assert second.status()["steps"]["accepted"] == 0
    send(second, "gate-2", 330 - 72, seed=1)
    assert second.status()["steps"]["accepted"] == 0
    send(second, "gate-2", 20, seed=2)
    assert second.status()["steps"]["accepted"] == 1


def test_status_says_how_many_images_the_next_step_takes(serve):
    service = serve(step_images=48, judge=True)
    status = service.status()
    assert (status["next_step_images"], status["waiting"]) == (64, "about 64 more images")
    send(service, "gate", 40)
    assert service.status()["next_step_images"] == pytest.approx(24, abs=1)  # one image in four validates
    send(service, "gate", 22, seed=1)
    assert service.status()["steps"]["accepted"] == 0 and 0 < service.status()["next_step_images"] <= 4
    send(service, "gate", 4, seed=2)
    assert sum(service.status()["steps"].values()) == 1
    service._patience = 4
    assert (
        "about 256 more images (4 times as many as usual, after steps that came to nothing)"
        in (service.status()["waiting"])
    )
    service.pause()
    assert service.status()["next_step_images"] is service.status()["waiting"] is None


def test_status_names_the_new_cameras_that_count_as_one(serve):
    service = serve(step_images=16)
    while service._cameras.steps < FOUNDING_STEPS:
        send(service, "gate")
    send(service, "gate", 2, seed=77)
    for number in range(5):
        send(service, f"late-{number}", 1, seed=number)
    assert service.status()["waiting"].endswith(
        "; late-0, late-1, late-2 and 2 more are new: all new cameras together count as one of 2 until they are trusted"
    )


def test_status_says_that_a_saved_state_waits_to_be_judged(serve, tmp_path):
    first = serve(state=tmp_path)
    step(first, "gate")
    first.close(WAIT)
    second = serve(state=tmp_path, judge=True)
    send(second, "gate", 5)
    assert second.status()["waiting"] == "11 more images, on which the saved state is judged"
    send(second, "gate", 11, seed=1)
    assert second.status()["waiting"].startswith("about ")


# What a camera's images did


def test_steps_say_which_cameras_they_were_taken_on(serve):
    service = serve()
    step(service, "gate")
    step(service, "yard")
    taken = [event["cameras"] for event in service.status()["events"] if event["kind"] == "accepted"]
    assert taken[0] == {"gate": 16} and all(sum(cameras.values()) <= 16 for cameras in taken)
    total = sum(cameras.get("yard", 0) for cameras in taken)
    assert total > 0 and camera_of(service, "yard")["contributed"] == total


def test_what_was_learnt_from_a_camera_is_undone(source, serve):
    service = serve(history=50)
    clean = step(service, "gate")
    expected = service.probe(source.images[:4])
    tainted = step(service, "bad")
    step(service, "bad")
    assert camera_of(service, "bad")["contributed"] > 0
    service.undo("bad")
    status = service.status()
    assert clean <= status["version"] < tainted and camera_of(service, "bad")["contributed"] == 0
    if status["version"] == clean:
        assert torch.equal(service.probe(source.images[:4]), expected)
    assert camera_of(service, "bad")["opted_out"] and status["events"][-1]["kind"] == "undone"
    later = step(service, "gate")
    service.undo("bad")  # nothing of it is left
    assert (
        service.status()["version"] == later and "had learnt nothing from it" in service.status()["events"][-1]["text"]
    )


def test_where_all_kept_versions_learnt_from_the_camera_the_source_model_answers(source, serve):
    service = serve(history=2)
    for _ in range(3):
        step(service, "bad")
    service.undo("bad")
    assert service.status()["version"] == 0
    assert torch.equal(service.probe(source.images[:4]), source.classifier(source.images[:4]).detach())


def test_contributions_are_remembered_over_a_restart(serve, tmp_path):
    first = serve(state=tmp_path, history=20)
    clean = step(first, "gate")
    first.save()
    step(first, "bad")
    while not camera_of(first, "bad")["contributed"]:
        step(first, "bad")
    first.close(WAIT)
    second = serve(state=tmp_path, history=20)
    send(second, "bad", 1)
    assert camera_of(second, "bad")["contributed"] > 0
    second.undo("bad")  # only the newest is in memory: the clean one is on disk
    assert second.status()["version"] == clean


def test_contributors_are_counted_by_name_up_to_a_limit(serve):
    snapshots = serve(start=False)._snapshots
    many = {f"camera-{number}": number + 1 for number in range(CONTRIBUTORS + 10)}
    counted = snapshots.with_step(many)
    assert len(counted) == CONTRIBUTORS and sum(counted.values()) == sum(many.values())
    assert counted[OTHERS] == sum(range(1, 12)) and "camera-0" not in counted  # the eleven smallest


# Adapting that comes to nothing


def test_steps_that_are_all_refused_are_noticed_and_shown(serve, monkeypatch):
    service = serve(judge=True)
    monkeypatch.setattr(service._adaptation, "_judge", lambda validation, ours: (ours, "it is worse, says the test"))
    seeds = itertools.count()
    while service.status()["steps"]["refused"] < STEPS:
        send(service, "noise", seed=next(seeds))
    with service._lock:
        service._look_for_stall()
    assert service.status()["stalled"] == (
        f"no step was accepted: of the last {STEPS}, {STEPS} were refused and 0 rolled back; "
        "most of their images came from noise"
    )
    assert service.status()["events"][-1]["kind"] == "stalled"
    monkeypatch.undo()
    monkeypatch.setattr(service._adaptation, "_judge", lambda validation, ours: (ours, ""))
    while not service.status()["steps"]["accepted"]:
        send(service, "noise", seed=next(seeds))
    with service._lock:
        service._look_for_stall()
    assert service.status()["stalled"] is None and service.status()["events"][-1]["kind"] == "recovered"


def test_images_that_are_never_adapted_to_are_noticed(serve):
    service = serve()
    service.camera_opt_out("gate")
    send(service, "gate", ROUNDS * 16)
    with service._lock:
        service._look_for_stall()
    assert service.status()["stalled"].startswith(f"no step was taken for {ROUNDS * 16} images: too few of them")
    service.pause()
    with service._lock:
        service._look_for_stall()
    assert service.status()["stalled"] is None  # an operator's wish is no stall


# The file of tokens


def changed(credentials, text):
    """Writes the file anew, and lets the next question look at it."""
    credentials.path.write_text(text)
    os.utime(credentials.path, ns=(1, len(text) + 1))
    credentials._next_look -= LOOK_EVERY


def test_tokens_are_read_again_when_their_file_changes(tmp_path, caplog):
    path = tmp_path / "cameras.toml"
    path.write_text('gate-1 = "first-token"\n"gate 2" = ["old-token-2", "new-token-2"]\n')
    credentials = Credentials(path)
    assert credentials.fits("gate-1", "first-token") and not credentials.fits("gate-1", "new-token-2")
    assert credentials.fits("gate 2", "old-token-2") and credentials.fits("gate 2", "new-token-2")
    changed(credentials, 'gate-1 = "second-token"')
    assert credentials.knows("gate-1") and not credentials.knows("gate 2")
    assert credentials.fits("gate-1", "second-token") and not credentials.fits("gate-1", "first-token")
    changed(credentials, "gate-1 = broken")
    assert credentials.knows("gate-1") and credentials.fits("gate-1", "second-token")  # as before
    assert "the tokens of cameras stay as they were" in caplog.text
    path.unlink()
    credentials._next_look -= LOOK_EVERY
    assert credentials.knows("gate-1")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("gate = ", "is not a TOML file: "),
        ('gate = "short"', "expected 'gate' in .* to be a token of at least 8 printable characters without spaces"),
        ("gate = 12345678", "to be a token"),
        ("gate = []", "to be a token"),
        ('[gate]\ntoken = "long-enough"', "to be a token"),
        (f'"{"x" * 300}" = "long-enough"', "expected a camera's name of 1 to 256 characters"),
    ],
)
def test_wrong_file_of_tokens_is_refused_without_telling_a_token(tmp_path, text, error):
    path = tmp_path / "cameras.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=error) as raised:
        Credentials(path)
    assert "long-enough" not in str(raised.value) and "short" not in str(raised.value)
    with pytest.raises(ValueError, match="cannot read the tokens of cameras: .*: No such file or directory"):
        Credentials(tmp_path / "missing.toml")
