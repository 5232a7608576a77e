"""kill -9 at any moment: the server comes back with the last good state."""

import itertools
import threading

import httpx
import numpy as np

from .http_server import PATIENCE, Server, digits, infer, logits, shared_files, until


def test_after_kill_9_the_server_answers_with_the_last_good_state(tmp_path, tmp_path_factory):
    files = shared_files(tmp_path_factory)
    state = tmp_path / "state"
    settings = (
        "--model", files.model, "--stats", files.stats, "--state", state, "--save-every", "0.05", "--history", "1000",
        "--no-guard", "--no-gate", "--step-images", "16", "--held-images", "16", "--buffer-images", "64",
    )  # fmt: skip
    probe = digits(8)
    stop = threading.Event()
    wrong: list[str] = []

    def keep_sending(server: Server, camera: str) -> None:
        """Noisy digits, until the server is no more."""
        random = np.random.default_rng(0)
        with server.client() as client:
            for number in itertools.count():
                noisy = (digits(8) * 0.5 + random.integers(0, 128, (8, 32, 32, 3))).astype(np.uint8)
                try:
                    answer = infer(client, noisy, f"{camera}-{number}", camera=camera)
                except httpx.TransportError:
                    return
                if answer.status_code != 200 or answer.json()["id"] != f"{camera}-{number}":
                    wrong.append(answer.text)
                if stop.is_set():
                    return

    with Server(*settings) as server, server.until_ready().client() as client:
        senders = [threading.Thread(target=keep_sending, args=(server, f"camera-{i}")) for i in range(2)]
        for sender in senders:
            sender.start()
        try:
            until(lambda: client.get("/api/status").json()["version"] >= 2, "some steps")
            assert client.post("/api/pause").json()["ok"]
            assert client.post("/api/save").json()["ok"]
            saved = client.get("/api/status").json()["version"]
            answer = infer(client, probe, "probe", adapt=False)
            assert answer.json()["parameters"]["model_version"] == saved
            before = logits(answer)
            assert client.post("/api/resume").json()["ok"]
            until(lambda: client.get("/api/status").json()["version"] > saved + 1, "more steps")
        finally:
            server.kill()  # in the midst of answering, adapting and saving
            stop.set()
            for sender in senders:
                sender.join(PATIENCE)
    assert not wrong
    assert np.abs(before - files.logits(probe)).max() > 1e-3  # it had adapted

    with Server(*settings) as server, server.until_ready().client() as client:
        found = client.get("/api/status").json()["version"]  # at once: --no-guard
        assert found >= saved
        if found > saved:  # it was saved once more before the end came
            rolled_back = client.post("/api/rollback", json={"version": saved}).json()
            assert rolled_back == {"ok": True, "version": saved}
        again = infer(client, probe, "probe", adapt=False)
        assert server.stop() == 0
    assert again.json()["parameters"]["model_version"] == saved
    np.testing.assert_allclose(logits(again), before, atol=1e-5)
    assert "Traceback" not in server.log
