"""State on disk: saved whole, checked, taken up again; whatever is damaged is passed over for an older one."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import cafe_tta as cafe
from cafe_tta.serve import Service, Settings
from cafe_tta.serve.snapshots import History, Replica, Snapshot, Store

WAIT = 60.0


@pytest.fixture
def serve(source, tmp_path):
    made = []

    def make(method="cafe", options=None, start=True, **config):
        adapter = cafe.create(method, source.classifier, source.needs[cafe.METHODS[method].needs], **(options or {}))
        plain = {"step_images": 16, "buffer_images": 256, "validation_images": 32, "adapt_share": 1.0, "gate": False}
        service = Service(adapter, Settings(**(plain | {"state": tmp_path / "state"} | config)), None)
        made.append(service)
        if start:
            service.start()
        return service

    yield make
    for service in made:
        service.close(WAIT)


def adapt(service, steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wanted = service.status()["steps"]["accepted"] + steps
    while service.status()["steps"]["accepted"] < wanted:
        images = torch.randn(16, 3, 10, 10, generator=generator) * 1.7 + 0.4
        service.answer(images, ["gate"] * 16, [True] * 16)
        assert service.settle(WAIT)


def files(folder):
    return sorted(path for path in (folder / "state").iterdir() if path.suffix == ".safetensors")


def test_goes_on_where_it_was(source, serve, tmp_path):
    first = serve()
    adapt(first)
    first.camera_opt_out("private")
    expected, version = first.probe(source.images[:8]), first.status()["version"]
    state = {name: tensor.clone() for name, tensor in first._adaptation.adapter.state().items()}
    first.close(WAIT)
    second = serve()
    assert second.status()["version"] == version and torch.equal(second.probe(source.images[:8]), expected)
    for name, tensor in second._adaptation.adapter.state().items():  # the optimiser's memory too
        assert torch.equal(tensor, state[name]), name
    events = second.status()["events"]
    assert [event["kind"] for event in events].count("accepted") == 3
    assert f"from version {version} of" in events[-1]["text"]
    assert not any(second.answer(source.images[:2], ["private"] * 2, [True] * 2).adapted)
    adapt(second, 1)
    assert second.status()["version"] == version + 1


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_damaged_newest_file_is_passed_over(source, serve, tmp_path, damage):
    first = serve()
    adapt(first, 1)
    first.save()
    expected, version = first.probe(source.images[:8]), first.status()["version"]
    adapt(first, 1)
    first.save()
    first.close(WAIT)
    newest = files(tmp_path)[-1]
    content = bytearray(newest.read_bytes())
    if damage == "flipped":
        content[-100] ^= 1
    newest.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "text": b"{}"}.get(damage, content))
    second = serve()
    assert second.status()["version"] == version and torch.equal(second.probe(source.images[:8]), expected)
    problems = [event["text"] for event in second.status()["events"] if event["kind"] == "error"]
    assert len(problems) == 1 and newest.name in problems[0] and "an older state was used" in problems[0]


def test_when_all_files_are_damaged_the_source_model_answers(source, serve, tmp_path):
    first = serve()
    adapt(first, 1)
    first.close(WAIT)
    for path in files(tmp_path):
        path.write_bytes(path.read_bytes()[:1000])
    second = serve()
    images = source.images[:4]
    assert second.status()["version"] == 0 and torch.equal(second.probe(images), source.classifier(images).detach())


def test_files_are_few_and_old_ones_can_be_rolled_back_to(source, serve, tmp_path):
    first = serve(history=2)
    for _ in range(4):
        adapt(first, 1)
        first.save()
    assert len(files(tmp_path)) == 2
    versions = [s["version"] for s in first.status()["snapshots"]]
    assert len(versions) == 2
    first.close(WAIT)
    second = serve(history=2)
    second.rollback(versions[0])  # no longer in memory: from disk
    assert second.status()["version"] == versions[0]
    with pytest.raises(ValueError, match="it is not kept"):
        second.rollback(1)


def test_saves_on_schedule_and_only_what_is_new(serve, tmp_path):
    service = serve(save_every=0.01)
    adapt(service, 1)
    began = time.monotonic()
    while not files(tmp_path) and time.monotonic() - began < WAIT:
        time.sleep(0.05)
    assert len(files(tmp_path)) == 1
    service.save()
    service.save()
    service.close(WAIT)
    assert len(files(tmp_path)) == 1


def test_without_a_folder_nothing_is_saved(serve):
    service = serve(state=None)
    with pytest.raises(ValueError, match="started without a folder for its state"):
        service.save()


def test_two_servers_do_not_share_a_folder(serve):
    serve()
    with pytest.raises(ValueError, match="is in use by another server"):
        serve()


def test_state_of_another_model_method_or_of_other_options(source, serve, tmp_path, make_network):
    first = serve()
    adapt(first, 1)
    first.close(WAIT)
    other = serve("tent", start=False)
    with pytest.raises(ValueError, match="is a state of 'cafe', but this is 'tent'; choose another folder"):
        other.start()
    other.close(WAIT)
    stranger = cafe.create("infomax", cafe.split_classifier(make_network(seed=5)))
    stranger.name = "cafe"
    service = Service(stranger, Settings(state=tmp_path / "state"), None)
    with pytest.raises(ValueError, match="does not belong to this classifier"):
        service.start()
    service.close(WAIT)
    assert "adapted with other options" in serve(options={"lr": 0.5}).status()["events"][-1]["text"]


def test_values_that_are_not_finite_are_never_taken_up(source, serve, tmp_path):
    first = serve()
    adapt(first, 1)
    first.save()
    version = first.status()["version"]
    adapt(first, 1)
    good = first._snapshots.good
    first._snapshots.good = {n: t * torch.nan if t.is_floating_point() else t for n, t in good.items()}
    first.close(WAIT)
    second = serve()
    assert second.status()["version"] == version
    assert "NaN or infinite; an older state was used" in second.status()["events"][-2]["text"]


def test_kill_in_the_middle_of_saving_leaves_a_good_state(tmp_path):
    """kill -9, again and again, of a process that does nothing but save; what is left is whole, and only goes up."""
    program = textwrap.dedent(
        """
        import sys, torch
        from pathlib import Path
        from cafe_tta.serve.snapshots import Store
        store = Store(Path(sys.argv[1]), limit=3)
        saved = next(store.readable(), None)
        version = 0 if saved is None else saved.meta["version"]
        print("ready", flush=True)
        while True:
            version += 1
            store.write({"weights": torch.full((300_000,), float(version))}, {"version": version})
        """
    )
    last = 0
    for attempt in range(5):
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        began = time.monotonic()
        before = _newest(tmp_path)
        while _newest(tmp_path) <= before and time.monotonic() - began < WAIT:
            time.sleep(0.005)
        time.sleep(0.013 * attempt)  # another moment each time
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = Store(tmp_path, limit=3)
        saved = next(store.readable(), None)
        store.close()
        assert saved is not None and not store.damaged
        assert saved.meta["version"] >= last and torch.equal(
            saved.tensors["weights"], torch.full((300_000,), float(saved.meta["version"]))
        )
        last = saved.meta["version"]
        assert not list(tmp_path.glob(".snapshot-*.tmp"))
    assert last >= 5


def _newest(folder):
    return max((path.name for path in folder.glob("snapshot-*")), default="")


def test_history_is_bounded_by_number_and_by_bytes():
    history = History(3, 10_000)
    for version in range(1, 10):
        history.add(Snapshot(version, 0.0, {"weights": torch.zeros(10)}))
    assert [s.version for s in history] == [7, 8, 9] and [s.version for s in history.before(9)] == [8, 7]
    history.add(Snapshot(10, 0.0, {"weights": torch.zeros(2400)}))
    assert [s.version for s in history] == [8, 9, 10]
    history.add(Snapshot(11, 0.0, {"weights": torch.zeros(5000)}))
    assert [s.version for s in history] == [11]


@pytest.mark.parametrize("name", cafe.METHODS)
def test_a_replica_answers_as_the_adapter_would(name, source, source_without_batchnorm):
    """Whatever a method remembers of the stream: of all it takes but the optimiser's memory."""
    made = source_without_batchnorm if name == "moetta" else source
    adapter = cafe.create(name, made.classifier, made.needs[cafe.METHODS[name].needs])
    replica = Replica(adapter)
    for images in (made.corrupted, made.corrupted.flip(0)):
        adapter(images)
    replica.load(1, adapter.state())
    assert torch.equal(replica(made.corrupted).logits, adapter.predict(made.corrupted))
