"""The service: answers from snapshots, adapts behind them, obeys opt-outs and operators. Real threads, real models."""

import itertools
import json
import threading

import pytest
import torch

import cafe_tta as cafe
from cafe_tta.serve import Service, Settings
from cafe_tta.serve.snapshots import Published, Replica, copied

WAIT = 60.0  # seconds; the machine may be slow and busy


def small(**options):
    plain = {"step_images": 16, "buffer_images": 256, "validation_images": 32, "adapt_share": 1.0}
    return Settings(**(plain | options))


@pytest.fixture
def serve(source):
    """Makes services that are closed at the end, whatever happens."""
    made = []

    def make(method="cafe", stats=True, start=True, options=None, **config):
        adapter = cafe.create(method, source.classifier, source.needs[cafe.METHODS[method].needs], **(options or {}))
        service = Service(adapter, small(**config), source.needs["stats"] if stats else None)
        made.append(service)
        if start:
            service.start()
        return service

    yield make
    for service in made:
        service.close(WAIT)
        assert service._thread is None or not service._thread.is_alive()


def shifted(source, count=64, seed=0):
    """Images that do not look like the source."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 10, 10, generator=generator) * 1.7 + 0.4


def send(service, images, camera="gate", adapt=True, size=8):
    answers = []
    for part in images.split(size):
        answers.append(service.answer(part, [camera] * len(part), [adapt] * len(part)))
        assert service.settle(WAIT)
    return answers


def test_a_method_that_sets_batchnorm_up_in_its_own_way_takes_statistics_too(source, serve):
    service = serve("tent", stats=True)  # which drops the running statistics of its copy of the classifier
    send(service, shifted(source, 160))
    assert sum(service.status()["steps"].values()) > 0, service.status()["events"]
    other = cafe.split_classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(300, 4)))
    with pytest.raises(ValueError, match="the source statistics do not belong to this classifier: "):
        Service(cafe.create("source", other), small(), source.needs["stats"])


def test_before_any_step_the_source_model_answers(source, serve):
    service = serve()
    images = source.images[:7]
    answers = service.answer(images, ["a"] * 7, [True] * 7)
    assert torch.equal(answers.logits, source.classifier(images).detach())
    assert answers.version == 0 and answers.versions == [0] * 7 and answers.drift == [None] * 7


def test_shifted_images_are_adapted_to_and_published(source, serve):
    service = serve()
    images = shifted(source, 160)
    send(service, images)
    status = service.status()
    assert status["steps"]["accepted"] >= 3 and status["version"] == status["steps"]["accepted"]
    assert service.answer(images[:1], ["gate"], [False]).version == status["version"]
    assert not torch.equal(service.probe(images[:8]), source.classifier(images[:8]).detach())
    assert all(answer.adapted == [True] * 8 for answer in send(service, shifted(source, 16, seed=1)))
    assert [s["version"] for s in status["snapshots"]] == list(range(1, status["version"] + 1))


def test_one_image_is_answered_as_in_a_batch(source, serve):
    service = serve()
    images = shifted(source, 96)
    send(service, images)
    service.pause()
    batch = service.answer(images[:32], ["gate"] * 32, [False] * 32).logits
    single = torch.cat([service.answer(image[None], ["quiet"], [False]).logits for image in images[:32]])
    torch.testing.assert_close(single, batch)


def test_readers_never_see_a_mixture_of_two_snapshots(source):
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"])
    images = source.images[:6]
    states, expected = [copied(adapter.state())], [adapter.predict(images)]
    for _ in range(4):
        adapter(source.corrupted)
        states.append(copied(adapter.state()))
        expected.append(adapter.predict(images))
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(expected))
    published = Published(adapter)
    published.swap_in(0, states[0])
    stop, seen, wrong = threading.Event(), set(), []

    def read():
        while not stop.is_set():
            answer = published.front(images)
            seen.add(answer.version)
            if not torch.equal(answer.logits, expected[answer.version]):
                wrong.append(answer.version)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    shown = 0
    while shown < 300 or len(seen) < len(states):
        published.swap_in(shown % len(states), states[shown % len(states)])
        shown += 1
        assert shown < 100_000
    stop.set()
    for reader in readers:
        reader.join(WAIT)
    assert not wrong and seen == set(range(len(states)))


def test_every_answer_while_adapting_is_that_of_one_kept_snapshot(source, serve):
    service = serve(gate=False, history=500)
    fixed, found, failed, done = source.images[:5], [], [], threading.Event()

    def ask(name):
        try:
            while not done.is_set():
                found.append(service.answer(fixed, [name] * 5, [False] * 5))
        except Exception as error:
            failed.append(error)

    askers = [threading.Thread(target=ask, args=(f"asker-{i}",)) for i in range(3)]
    for asker in askers:
        asker.start()
    send(service, shifted(source, 480), size=16)  # waits for the steps: on a busy machine, batches would share them
    done.set()
    for asker in askers:
        asker.join(WAIT)
    assert not failed
    replica = Replica(service._adaptation.adapter)
    expected = {0: source.classifier(fixed).detach()}
    for snapshot in service._snapshots.history:
        replica.load(snapshot.version, snapshot.tensors)
        expected[snapshot.version] = replica(fixed).logits
    assert len(expected) > 3 and len({answers.version for answers in found}) > 3
    for answers in found:
        (version,) = set(answers.versions)
        assert torch.equal(answers.logits, expected[version])


def test_nobody_waits_for_a_step(source, serve):
    """While the adapting thread is in the middle of a step, images are answered."""
    service = serve()
    inside, go_on = threading.Event(), threading.Event()
    answer = service._adaptation.adapter.answer

    def slow(images):
        inside.set()
        assert go_on.wait(WAIT)
        return answer(images)

    service._adaptation.adapter.answer = slow
    images = shifted(source, 96)
    service.answer(images, ["gate"] * 96, [True] * 96)
    assert inside.wait(WAIT)
    for _ in range(5):
        assert service.answer(images[:2], ["gate"] * 2, [True] * 2).version == 0
    assert service.status()["version"] == 0
    go_on.set()
    assert service.settle(WAIT) and service.status()["version"] == 1


def test_opt_outs(source, serve):
    service = serve()
    images = shifted(source, 64)
    assert not any(any(a.adapted) for a in send(service, images, adapt=False))
    service.camera_opt_out("private")
    assert not any(any(a.adapted) for a in send(service, images, camera="private"))
    status = service.status()
    assert status["adapted_images"] == 0 and status["version"] == 0 and status["answered"] == 128
    assert {c["camera"]: c["opted_out"] for c in status["cameras"]} == {"gate": False, "private": True}
    service.camera_opt_out("private", out=False)
    assert any(any(a.adapted) for a in send(service, shifted(source, 32, seed=1), camera="private"))


def test_opting_out_drops_what_waits(source, serve):
    service = serve(start=False)
    images = shifted(source, 20)
    service.answer(images, ["a"] * 10 + ["b"] * 10, [True] * 20)
    service.camera_opt_out("a")
    assert len(service._buffer) == 10
    assert {item.camera for item in service._buffer.take(100) + service._buffer.validation(100)} == {"b"}


def test_adapt_off_keeps_nothing(source, serve):
    service = serve(adapt=False)
    answers = send(service, shifted(source))
    assert not any(any(a.adapted) for a in answers) and len(service._buffer) == 0
    assert service.status()["state"] == "off" and service.status()["version"] == 0
    with pytest.raises(ValueError, match="cannot pause: the service was started with adapt=off"):
        service.pause()


def test_pause_resume_and_reset(source, serve):
    service = serve()
    send(service, shifted(source, 96))
    version = service.status()["version"]
    assert version > 0
    service.pause()
    send(service, shifted(source, 96, seed=1))
    assert service.status()["version"] == version and service.status()["state"] == "paused"
    with pytest.raises(ValueError, match="paused already"):
        service.pause()
    service.resume()
    with pytest.raises(ValueError, match="is not paused"):
        service.resume()
    service.reset()
    images = source.images[:4]
    assert service.status()["version"] == 0 and torch.equal(service.probe(images), source.classifier(images).detach())
    assert len(service._buffer) == 0
    send(service, shifted(source, 96, seed=2))
    assert service.status()["version"] > version  # a number is never given out twice
    kinds = [event["kind"] for event in service.status()["events"]]
    assert [kind for kind in kinds if kind in ("paused", "resumed", "reset")] == ["paused", "resumed", "reset"]


def test_rollback(source, serve):
    service = serve(gate=False)
    with pytest.raises(ValueError, match="the source model answers already"):
        service.rollback()
    send(service, shifted(source, 160))
    service.pause()
    snapshots = {s.version: s for s in service._snapshots.history}
    now = service.status()["version"]
    images = source.images[:4]
    service.rollback()
    assert service.status()["version"] == now - 1
    replica = Replica(service._adaptation.adapter)
    replica.load(1, snapshots[1].tensors)
    service.rollback(1)
    assert torch.equal(service.probe(images), replica(images).logits)
    with pytest.raises(ValueError, match="cannot roll back to version 77: it is not kept; kept: 1, 2"):
        service.rollback(77)
    with pytest.raises(ValueError, match="it is the one that answers now"):
        service.rollback(1)
    service.rollback()
    assert service.status()["version"] == 0
    assert torch.equal(service.probe(images), source.classifier(images).detach())


STATUS = {
    "name": str, "method": str, "state": str, "version": int, "started": float, "now": float, "images": int,
    "answered": int, "adapted_images": int, "steps": dict, "next_step_images": int, "waiting": str, "drift": dict,
    "stalled": type(None), "cameras": list,
    "groups": list, "classes": list, "clusters": type(None), "events": list, "series": list, "snapshots": list,
    "leader": type(None),
}  # fmt: skip


def test_status_has_the_promised_fields_and_is_plain_json(source, serve):
    service = serve()
    send(service, shifted(source, 96))
    service.observe(8, 0.004)
    service._cameras.look()
    service._series.point(1.0, 2.0)
    status = service.status()
    assert json.loads(json.dumps(status, allow_nan=False)) == status
    assert {name: type(value) for name, value in status.items()} == STATUS
    assert set(status["steps"]) == {"accepted", "refused", "rolled_back", "skipped"}
    assert set(status["drift"]) == {"overall", "source"} and status["drift"]["overall"] > 0
    (camera,) = status["cameras"]
    assert camera.keys() == {
        "camera", "images", "drift", "share", "trusted", "contributed", "opted_out", "last_seen", "quarantined",
        "model", "clusters",
    }  # fmt: skip
    assert camera["camera"] == "gate" and camera["images"] == 96 and camera["share"] == 1.0 and camera["drift"] > 0
    assert all(group.keys() == {"group", "dims", "divergence"} for group in status["groups"]) and status["groups"]
    assert sum(c["share"] for c in status["classes"]) == pytest.approx(1)
    figures = {"id", "time", "kind", "version", "text", "request", "alignment", "frechet", "entropy", "loss",
               "cameras"}  # fmt: skip
    assert all(event.keys() == figures for event in status["events"])
    accepted = [event for event in status["events"] if event["kind"] == "accepted"]
    assert accepted and all(event[name] is not None for event in accepted for name in figures)
    assert all(event["cameras"] == {"gate": 16} for event in accepted)
    point = status["series"][-1]
    assert point.keys() == {
        "time", "drift", "source_drift", "images_per_second", "latency_p50_ms", "latency_p95_ms"
    }  # fmt: skip
    assert point["latency_p50_ms"] == pytest.approx(4.0)
    assert all(s.keys() == {"version", "time", "alignment"} for s in status["snapshots"])


@pytest.mark.parametrize("method", ["tent", "source", "t3a", "adabn", "bacs", "cafe"])
def test_every_method_is_served_without_statistics(source, serve, method):
    service = serve(method, stats=False)
    answers = send(service, shifted(source, 96))
    status = service.status()
    assert all(torch.isfinite(answer.logits).all() for answer in answers)
    assert not [event for event in status["events"] if event["kind"] == "error"]
    if method == "source":
        assert status["version"] == 0 and status["steps"]["skipped"] > 0
    else:
        assert status["steps"]["accepted"] > 0
    assert status["drift"] == {"overall": None, "source": None} and json.dumps(status)


def test_images_that_look_like_the_source_are_not_adapted_to(source, serve):
    service = serve()
    answers = send(service, source.images[:160], camera="clean")
    status = service.status()
    assert status["version"] == 0 and status["steps"]["skipped"] >= 1
    assert "look" in [e for e in status["events"] if e["kind"] == "skipped"][-1]["text"]
    assert not any(answers[-1].adapted) and 0.7 < answers[-1].drift[0] < 1.3
    ungated = serve(gate=False)
    send(ungated, source.images[:160], camera="clean")
    assert ungated.status()["steps"]["accepted"] + ungated.status()["steps"]["refused"] > 0


def test_a_camera_that_looks_like_the_source_is_answered_by_the_source_model(source, serve):
    service = serve()
    for part, bad in zip(source.images[:160].split(8), shifted(source, 160).split(8), strict=True):
        service.answer(torch.cat([part, bad]), ["clean"] * 8 + ["gate"] * 8, [True] * 16)
        assert service.settle(WAIT)
    service._cameras.assess()
    images = torch.cat([source.images[:4], shifted(source, 4)])
    cameras = ["clean", "gate"] * 4
    answers = service.answer(images, cameras, [True] * 8)
    assert answers.version > 0 and answers.versions == [0, answers.version] * 4
    torch.testing.assert_close(answers.logits[::2], source.classifier(images[::2]).detach())
    torch.testing.assert_close(answers.logits[1::2], service.probe(images[1::2]))
    models = {c["camera"]: c["model"] for c in service.status()["cameras"]}
    assert models == {"clean": "source", "gate": "published"}


def test_bad_requests_are_refused_and_leave_no_trace(source, serve):
    service = serve()
    images = source.images[:2]
    nan = images.clone()
    nan[0, 0, 0, 0] = torch.nan
    for bad, cameras, adapt, error, text in (
        (images, ["a"], [True, True], ValueError, "2 images, 1 cameras, 2 of `adapt`"),
        (images, ["a", ""], [True, True], ValueError, "a camera's name of 1 to 256 characters"),
        (images, ["a", "x" * 257], [True, True], ValueError, "a camera's name of 1 to 256 characters"),
        (nan, ["a", "a"], [True, True], ValueError, "expected finite images"),
        (images.double(), ["a", "a"], [True, True], TypeError, "expected images of torch.float32"),
        (images[:0], [], [], ValueError, "at least one image"),
        (images[:, :2], ["a", "a"], [True, True], ValueError, "cannot read images of shape"),
        ([[1.0]], ["a"], [True], TypeError, "expected a tensor"),
    ):
        with pytest.raises(error, match=text):
            service.answer(bad, cameras, adapt)
    status = service.status()
    assert status["answered"] == 0 and not status["cameras"] and len(service._buffer) == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step_images": 1}, "`step_images` to be at least 2"),
        ({"buffer_images": 300}, "`buffer_images` to be at least `step_images` \\+ `validation_images` = 384"),
        ({"per_camera": 0}, "`per_camera` to be at least 64 or None"),
        ({"validation_images": 15}, "`validation_images` to be at least 16"),
        ({"adapt_share": 0.0}, "`adapt_share` to be above 0"),
        ({"gate_margin": -1.0}, "`gate_margin` to be above 0"),
        ({"save_every": 0.0}, "`save_every` to be above 0"),
        ({"history": 0}, "`history` to be at least 1"),
        ({"name": " "}, "`name` to be letters, digits, and . _ - or None"),
    ],
)
def test_options_are_checked(options, text):
    with pytest.raises(ValueError, match=text):
        Settings(**options)


def test_a_mistake_in_the_adapting_thread_is_an_event_and_not_the_end(source, serve):
    service = serve()
    answer = service._adaptation.adapter.answer
    calls = []

    def fails_once(images):
        calls.append(len(images))
        if len(calls) == 1:
            raise RuntimeError("out of luck")
        return answer(images)

    service._adaptation.adapter.answer = fails_once
    send(service, shifted(source, 200))
    status = service.status()
    assert any("out of luck" in event["text"] for event in status["events"] if event["kind"] == "error")
    assert status["steps"]["accepted"] >= 1


def test_adapting_takes_no_more_than_its_share_of_the_time(source, serve):
    import time

    service = serve(gate=False, judge=False, adapt_share=0.25)
    answer, spent = service._adaptation.adapter.answer, []

    def timed(images):
        began = time.monotonic()
        while time.monotonic() - began < 0.02:
            pass
        logits = answer(images)
        spent.append(time.monotonic() - began)
        return logits

    service._adaptation.adapter.answer = timed
    began = time.monotonic()
    while len(spent) < 5 and time.monotonic() - began < WAIT:
        service.answer(shifted(source, 16), ["gate"] * 16, [True] * 16)
    whole = time.monotonic() - began
    assert len(spent) >= 5 and sum(spent[:4]) / whole < 0.5


def test_memory_stays_flat_whatever_names_clients_invent(source, serve):
    service = serve(max_cameras=32, gate=False)
    images = shifted(source, 250)

    def play(begin, end):
        for number in range(begin, end):
            names = [f"camera-{number}-{i}" if i % 2 else f"camera-{i % 7}" for i in range(250)]
            service.answer(images.roll(number, 0) + 0.01 * number, names, [True] * 250)
            assert service.settle(WAIT)

    def kept():
        rows = sum(len(c.features) + len(c.source_features) for c in service._cameras)
        return len(service._cameras), rows

    play(0, 20)
    before = _resident()
    play(20, 60)  # 10,000 images more
    assert kept()[0] == 32 and kept()[1] <= 32 * 128 and len(service._buffer) <= 256
    assert len(service.status()["events"]) <= 200
    assert _resident() - before < 30 * 2**20


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_service_starts_once(serve):
    service = serve()
    with pytest.raises(RuntimeError, match="started already"):
        service.start()
