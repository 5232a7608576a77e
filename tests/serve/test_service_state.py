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
from cafe_tta import storage
from cafe_tta.serve import Service, Settings
from cafe_tta.serve.service import FIRST_IMAGES
from cafe_tta.serve.snapshots import History, Replica, Snapshot
from cafe_tta.serve.store import FORMAT, KIND, Store

WAIT = 60.0


@pytest.fixture
def serve(source, tmp_path):
    made = []

    def make(method="cafe", options=None, start=True, stats=None, **config):
        adapter = cafe.create(method, source.classifier, source.needs[cafe.METHODS[method].needs], **(options or {}))
        plain = {"step_images": 16, "buffer_images": 256, "validation_images": 32, "adapt_share": 1.0, "gate": False}
        service = Service(adapter, Settings(**(plain | {"state": tmp_path / "state"} | config)), stats)
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


def judged(service, seed=50):
    """Shows a restored state the images that it is judged on; the model learns nothing from them."""
    images = torch.randn(FIRST_IMAGES, 3, 10, 10, generator=torch.Generator().manual_seed(seed)) * 1.7 + 0.4
    service.answer(images, ["gate"] * FIRST_IMAGES, [False] * FIRST_IMAGES)
    return service


def errors(service):
    return [event["text"] for event in service.status()["events"] if event["kind"] == "error"]


def files(folder):
    return sorted(path for path in (folder / "state").iterdir() if path.suffix == ".safetensors")


def test_goes_on_where_it_was(source, serve, tmp_path):
    first = serve()
    adapt(first)
    first.camera_opt_out("private")
    expected, version = first.probe(source.images[:8]), first.status()["version"]
    state = {name: tensor.clone() for name, tensor in first._adaptation.adapter.state().items()}
    first.close(WAIT)
    second = judged(serve())
    assert second.status()["version"] == version and torch.equal(second.probe(source.images[:8]), expected)
    for name, tensor in second._adaptation.adapter.state().items():  # the optimiser's memory too
        assert torch.equal(tensor, state[name]), name
    events = {event["kind"]: event["text"] for event in second.status()["events"]}
    assert [event["kind"] for event in second.status()["events"]].count("accepted") == 3
    assert f"from version {version} of" in events["started"]
    assert (
        f"version {version} of {files(tmp_path)[-1].name} answers: no worse than the source model" in events["restored"]
    )
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
    second = judged(serve())
    assert second.status()["version"] == version and torch.equal(second.probe(source.images[:8]), expected)
    (problem,) = errors(second)
    assert newest.name in problem and "passed over for an older state" in problem and str(tmp_path) not in problem


def test_when_all_files_are_damaged_the_source_model_answers(source, serve, tmp_path):
    first = serve()
    adapt(first, 1)
    first.close(WAIT)
    for path in files(tmp_path):
        path.write_bytes(path.read_bytes()[:1000])
    second = judged(serve())
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
    second = judged(serve(history=2))
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
    cure = "start with `method` 'cafe' to go on from it, or choose another folder"
    with pytest.raises(ValueError, match=f"is a state of 'cafe', but this is 'tent'; {cure}"):
        other.start()
    other.close(WAIT)
    stranger = cafe.create("infomax", cafe.split_classifier(make_network(seed=5)))
    stranger.name = "cafe"
    service = Service(stranger, Settings(state=tmp_path / "state"), None)
    with pytest.raises(ValueError, match="does not belong to this classifier"):
        service.start()
    service.close(WAIT)
    events = serve(options={"lr": 0.5}).status()["events"]
    assert any("adapted with other options" in event["text"] for event in events)


def test_values_that_are_not_finite_are_never_taken_up(source, serve, tmp_path):
    first = serve()
    adapt(first, 1)
    first.save()
    version = first.status()["version"]
    adapt(first, 1)
    good = first._snapshots.good
    first._snapshots.good = {n: t * torch.nan if t.is_floating_point() else t for n, t in good.items()}
    first.close(WAIT)
    second = judged(serve())
    assert second.status()["version"] == version
    assert "NaN or infinite; passed over for an older state" in errors(second)[0]


def saved_twice(serve):
    """A folder with two states, the second of which a test may spoil; the first one's version, and its answers."""
    first = serve()
    adapt(first, 1)
    first.save()
    version = first.status()["version"]
    adapt(first, 1)
    first.close(WAIT)
    return version


def spoil(path, change):
    """Changes a saved state, and gives it the checksum of what it has become."""
    tensors, meta = storage.read(path, KIND, FORMAT)
    storage.write(path, KIND, FORMAT, *change(tensors, meta))


def with_meta(**changes):
    return lambda tensors, meta: (tensors, {k: v for k, v in (meta | changes).items() if v is not ...})


def with_event(**changes):
    def change(tensors, meta):
        event = {name: value for name, value in (meta["events"][-1] | changes).items() if value is not ...}
        return tensors, meta | {"events": [*meta["events"], event]}

    return change


BROKEN = {
    "no version": (with_meta(version=...), "expected `version` to be a whole number, but got None"),
    "version is a text": (with_meta(version="x"), "expected `version` to be a whole number, but got 'x'"),
    "version below 0": (with_meta(version=-5), "expected `version` to be between 0 and 1000000000000, but got -5"),
    "version too large": (with_meta(version=10**30, highest=10**30), "expected `version` to be between 0 and"),
    "version is true": (with_meta(version=True), "expected `version` to be a whole number, but got True"),
    "version above the highest": (with_meta(version=9), "expected `version` to be at most `highest` = "),
    "no highest": (with_meta(highest=...), "expected `highest` to be a whole number, but got None"),
    "events are no list": (with_meta(events={}), "expected `events` to be a list"),
    "an event is no table": (with_meta(events=[7]), "expected an event to be a table of names and values, but got int"),
    "an event without an id": (with_event(id=...), "expected `id` to be a whole number, but got None"),
    "an event of NaN": (with_event(time="soon"), "expected `time` to be a number, but got 'soon'"),
    "no adapter": (with_meta(adapter=...), "expected `adapter` to be a table of names and values, but got NoneType"),
    "an adapter without weights": (
        with_meta(adapter={"method": "cafe", "config": {}, "counters": {}, "classifier": {"weights": []}}),
        "expected `classifier` to name the weights of a classifier",
    ),
    "an adapter of nothing": (with_meta(adapter={}), "expected `method` to be a text, but got None"),
    "opted out is a text": (with_meta(opted_out="gate"), "expected `opted_out` to be a list"),
    "opted out holds a number": (with_meta(opted_out=[3]), "expected a camera's name of 1 to 256 characters"),
    "metadata is a list": (lambda tensors, meta: (tensors, [meta]), "expected the metadata to be a table of names"),
    "metadata is null": (lambda tensors, meta: (tensors, None), "but got NoneType"),
    "weights 1,000 times too large": (
        lambda tensors, meta: ({n: 1000 * t if t.is_floating_point() else t for n, t in tensors.items()}, meta),
        "times as large as in the source model",
    ),
    "a tensor is missing": (
        lambda tensors, meta: ({n: t for n, t in tensors.items() if n != min(tensors)}, meta),
        "the state has no `",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_whole_file_with_broken_content_is_passed_over_with_the_reason(serve, tmp_path, broken):
    version = saved_twice(serve)
    change, reason = BROKEN[broken]
    spoil(files(tmp_path)[-1], change)
    service = judged(serve())
    assert service.status()["version"] == version
    (problem,) = errors(service)
    assert reason in problem and files(tmp_path)[-1].name in problem and str(tmp_path) not in problem
    adapt(service, 1)
    assert service.status()["version"] > version


def test_check_says_which_state_a_start_would_use_and_which_it_would_pass_over(serve, tmp_path):
    version = saved_twice(serve)
    spoil(files(tmp_path)[-1], with_meta(version="x"))
    service = serve(start=False, state=None)
    said = service.check_state(tmp_path / "state")
    older, newest = files(tmp_path)
    assert said.startswith(f"continues with version {version} of {older.name}; passed over: {newest.name}: expected")


def collapsed(tensors, meta):
    """Weights of an ordinary size, with which the model always gives the same answer."""
    last = max(name for name in tensors if name.startswith("classifier.") and name.endswith(".weight"))
    return {name: torch.zeros_like(t) if name == last else t for name, t in tensors.items()}, meta


def test_restored_state_answers_only_after_it_was_judged(source, serve, tmp_path):
    version = saved_twice(serve)
    spoil(files(tmp_path)[-1], collapsed)
    service = serve(stats=source.needs["stats"])
    images = source.images[: FIRST_IMAGES - 1]
    answers = service.answer(images, ["gate"] * len(images), [False] * len(images))
    assert answers.version == 0 and torch.equal(answers.labels, source.classifier(images).argmax(1))
    assert [event["kind"] for event in service.status()["events"]][-1] == "restoring"
    answers = service.answer(source.images[:8], ["gate"] * 8, [False] * 8)  # the last of them decides
    assert answers.version == version  # the older one: the newest has collapsed
    (problem,) = errors(service)
    assert "its alignment loss is" in problem and "times that of the source model" in problem
    assert problem.endswith("passed over for an older state")


def test_end_before_the_restored_state_was_judged_loses_nothing(serve, tmp_path):
    first = serve()
    adapt(first, 2)
    version = first.status()["version"]
    first.close(WAIT)
    names = [path.name for path in files(tmp_path)]
    second = serve()
    second.save()
    second.close(WAIT)
    assert [path.name for path in files(tmp_path)] == names
    assert judged(serve()).status()["version"] == version


def test_without_the_judge_a_restored_state_answers_at_once(serve):
    first = serve()
    adapt(first, 1)
    first.close(WAIT)
    assert serve(judge=False).status()["version"] == 1


@pytest.mark.parametrize("act", ["reset", "rollback"])
def test_operator_decides_before_the_judge_does(serve, tmp_path, act):
    first = serve()
    adapt(first, 2)
    first.close(WAIT)
    second = serve()
    second.reset() if act == "reset" else second.rollback(2)
    assert judged(second).status()["version"] == (0 if act == "reset" else 2)


def test_files_are_numbered_beyond_eight_digits(serve, tmp_path):
    first = serve()
    adapt(first, 1)
    first.close(WAIT)
    (only,) = files(tmp_path)
    only.rename(only.with_name("snapshot-99999999.safetensors"))
    for expected in (2, 3):
        service = judged(serve())
        adapt(service, 1)
        assert service.status()["version"] == expected
        service.close(WAIT)
    names = {path.name for path in files(tmp_path)}
    assert names == {f"snapshot-{number}.safetensors" for number in ("99999999", "100000000", "100000001")}
    assert judged(serve()).status()["version"] == 3


def test_clients_are_never_told_where_things_are(serve, tmp_path):
    folder = tmp_path / "a folder of ours" / "state"
    service = serve(state=folder)
    adapt(service, 1)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(ValueError, match=r"^cannot save: FileNotFoundError$"):
        service.save()
    service._recover(OSError(2, "No such file or directory", str(tmp_path / "x" / "y.safetensors")))
    assert "y.safetensors" in errors(service)[-1]
    assert str(tmp_path) not in str(service.status())


def test_kill_in_the_middle_of_saving_leaves_a_good_state(tmp_path):
    """kill -9, again and again, of a process that does nothing but save; what is left is whole, and only goes up."""
    program = textwrap.dedent(
        """
        import sys, torch
        from pathlib import Path
        from cafe_tta.serve.store import AdapterMeta, Store
        adapter = AdapterMeta("none", {}, {"weights": {}}, {})
        store = Store(Path(sys.argv[1]), limit=3)
        saved = next(store.readable(), None)
        version = 0 if saved is None else saved.meta.version
        print("ready", flush=True)
        while True:
            version += 1
            meta = {"version": version, "highest": version, "adapter": adapter, "events": [], "opted_out": []}
            store.write({"weights": torch.full((300_000,), float(version))}, meta)
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
        assert saved.meta.version >= last and torch.equal(
            saved.tensors["weights"], torch.full((300_000,), float(saved.meta.version))
        )
        last = saved.meta.version
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
