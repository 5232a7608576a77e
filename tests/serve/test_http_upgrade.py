"""Another model in place of the present one, while requests come in: none is lost, and the way back is open."""

import signal
import threading

import numpy as np
import pytest

from .http_server import PATIENCE, Server, digits, infer, logits, make_files, pause, shared_files, until

SMALL = {
    "name": "small", "method": "cafe", "gate": False, "step_images": 16, "validation_images": 16, "buffer_images": 256,
    "judge": False, "set": ["normalisation=source"],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return shared_files(tmp_path_factory), make_files(tmp_path_factory.mktemp("next"), seed=1)


def write(config, files, state, **more) -> None:
    values = {"model": str(files.model), "source": [str(files.stats)], "state": str(state)} | SMALL | more
    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for name, value in values.items()
    ]
    config.write_text("\n".join(lines))


class Senders:
    """Clients that never stop asking, each on one connection, and what they were answered."""

    def __init__(self, server: Server, count: int = 3) -> None:
        self.stop = threading.Event()
        self.answers: list[np.ndarray] = []
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._send, args=(server, number)) for number in range(count)]

    def _send(self, server: Server, number: int) -> None:
        pixels = digits(4)
        with server.client() as client:
            while not self.stop.is_set():
                answer = infer(client, pixels, "x", camera=f"camera-{number}", adapt=False)
                if answer.status_code == 200:
                    self.answers.append(logits(answer))
                else:
                    self.wrong.append(answer.text)

    def __enter__(self) -> "Senders":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)


def test_model_is_replaced_without_losing_a_request_and_back_again(models, tmp_path):
    old, new = models
    config, one, two = tmp_path / "serve.toml", tmp_path / "one", tmp_path / "two"
    write(config, old, one)
    noise = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3)).astype(np.uint8)
    with Server("--config", config) as server, server.until_ready().client() as client:
        for part in np.split(noise, 4):
            infer(client, part, "x", camera="noise")
        until(lambda: client.get("/api/status").json()["version"] >= 1, "a step")
        pause(client)
        adapted = logits(infer(client, digits(4), "x", adapt=False))
        with Senders(server) as senders:
            until(lambda: len(senders.answers) > 20, "answers")
            write(config, new, two)
            assert client.post("/api/reload").json() == {"ok": True, "version": 0}
            known = len(senders.answers)
            until(lambda: len(senders.answers) > known + 20, "answers of the new model")
        assert not senders.wrong
        expected = new.logits(digits(4))
        assert all(min(np.abs(a - adapted).max(), np.abs(a - expected).max()) < 1e-3 for a in senders.answers)
        np.testing.assert_allclose(senders.answers[-1], expected, atol=1e-4)
        np.testing.assert_allclose(senders.answers[0], adapted, atol=1e-4)
        assert list(one.glob("snapshot-*")) and two.is_dir()  # the old state is kept
        events = client.get("/api/status").json()["events"]
        assert any("answers instead of small" in event["text"] for event in events)
        write(config, old, one)  # back again: the old model goes on with its old state
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.log.count("serving small on") == 2, "the second reload")
        np.testing.assert_allclose(logits(infer(client, digits(4), "x", adapt=False)), adapted, atol=1e-4)
        assert client.get("/metrics").text.count("cafe_tta_images_total") == 3  # the counters went on: one series
        assert server.stop() == 0
    assert "Traceback" not in server.log


@pytest.mark.parametrize("mistake", ["no such model", "the state of another", "no such setting"])
def test_model_that_cannot_be_served_replaces_nothing(models, tmp_path, mistake):
    old, new = models
    config, state = tmp_path / "serve.toml", tmp_path / "state"
    write(config, old, state)
    with Server("--config", config) as server, server.until_ready().client() as client:
        if mistake == "no such model":
            write(config, old, state, model=str(tmp_path / "missing.safetensors"))
            expected = "missing.safetensors"
        elif mistake == "the state of another":
            write(config, new, state)
            expected = "is in use by another server; choose another folder for the state"
        else:
            write(config, new, state, stat="x")
            expected = "no setting 'stat' in serve.toml; did you mean 'stats'?"
        answer = client.post("/api/reload")
        assert answer.status_code == 409 and expected in answer.json()["error"], answer.text
        assert answer.json()["error"].startswith("cannot reload: ") and str(tmp_path) not in answer.text
        np.testing.assert_allclose(logits(infer(client, digits(4), "x", adapt=False)), old.logits(digits(4)), atol=1e-4)
        until(lambda: "error" in [e["kind"] for e in client.get("/api/status").json()["events"]], "an event")
        assert str(tmp_path) not in client.get("/api/status").text
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "the present model goes on answering" in server.log, "a line in the log")
        assert server.stop() == 0
    assert "Traceback" not in server.log
