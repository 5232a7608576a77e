"""Servers that adapt as one: one leads, others follow; each of them is killed, and joins again."""

import asyncio
import re
import socket
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest

from cafe_tta.serve import build, load_settings
from cafe_tta.serve.http.app import App, create_app

from .http_server import PATIENCE, Files, Server, digits, infer, logits, make_files, pause, shared_files, until

TOKEN = "sesame-open-wide"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SMALL = (
    "--method", "cafe", "--no-gate", "--no-judge", "--step-images", "16", "--validation-images", "16",
    "--buffer-images", "256", "--adapt-share", "1", "--set", "normalisation=source", "--token", TOKEN,
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return shared_files(tmp_path_factory)


def serve(files: Files, *more: object) -> Server:
    return Server("--model", files.model, "--stats", files.stats, *SMALL, *more)


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)


def status(client: httpx.Client) -> dict:
    return client.get("/api/status").json()


def version(client: httpx.Client) -> int:
    return status(client)["version"]


def send_until(client: httpx.Client, condition, what: str) -> None:
    """Sends noise, always another, until something is so."""
    seeds = iter(range(10_000))

    def ask() -> bool:
        assert infer(client, noise(16, next(seeds)), "x", camera="noise").status_code == 200
        return condition()

    until(ask, what)


def same_answers(one: httpx.Client, other: httpx.Client) -> None:
    ours, theirs = (infer(client, digits(4), "x", adapt=False) for client in (one, other))
    assert ours.json()["parameters"]["model_version"] == theirs.json()["parameters"]["model_version"]
    np.testing.assert_allclose(logits(ours), logits(theirs), atol=1e-4)


class Sender:
    """A client that never stops asking; what went wrong, and how many answers there were."""

    def __init__(self, server: Server) -> None:
        self.stop = threading.Event()
        self.answered = 0
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._send, args=(server,))

    def _send(self, server: Server) -> None:
        with server.client() as client:
            while not self.stop.is_set():
                answer = infer(client, noise(4, self.answered), "x", camera="always")
                self.answered += answer.status_code == 200
                if answer.status_code != 200:
                    self.wrong.append(answer.text)

    def go_on(self) -> None:
        known = self.answered
        until(lambda: self.answered > known + 10, "answers")

    def __enter__(self) -> "Sender":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(PATIENCE)


def test_two_processes_adapt_as_one_and_outlive_each_other(files, tmp_path):
    state, kept, port = tmp_path / "state", tmp_path / "kept", free_port()
    follow_it = ("--leader", f"http://127.0.0.1:{port}")
    with serve(files, *follow_it, "--state", kept) as follower, follower.until_ready().client(headers=BEARER) as follow:
        check_alone(files, follow)
        with serve(files, "--port", port, "--state", state) as leader:
            with leader.until_ready().client(headers=BEARER) as lead:
                check_together(lead, follow)
                check_controls(lead, follow)
                # What the leader gives out after its last save is lost with it: the follower must not stay on it.
                saved = version(lead)
                assert saved >= 1 and lead.post("/api/save").json()["ok"]
                assert lead.post("/api/resume").json()["ok"]
                send_until(follow, lambda: version(follow) > saved, "a later version")
            with Sender(follower) as sender:
                sender.go_on()
                leader.kill()
                check_outlived(follower, follow, sender)
                assert version(follow) > saved
                restart = ("--port", port, "--state", state, "--no-adapt")  # so that its version stays
                with serve(files, *restart) as again, again.until_ready().client(headers=BEARER) as lead:
                    until(lambda: status(follow)["leader"]["away"] is None, "the follower joins again")
                    assert version(lead) == saved
                    until(lambda: version(follow) == saved, "the version that the leader has")
                    same_answers(lead, follow)
                    sender.go_on()
                    sender.stop.set()
                    events = [event["kind"] for event in status(follow)["events"]]
                    assert events.count("joined") == 2 and events.count("leader_lost") == 2
                    assert follow.post("/api/save").json()["ok"] and list(kept.glob("snapshot-*"))
                    follower.kill()
                    # A follower that was killed answers with the leader's present snapshot from its first answer on.
                    with serve(files, *follow_it) as second, second.until_ready().client() as other:
                        same_answers(other, lead)
                        assert version(other) == saved
        assert not sender.wrong
    assert "Traceback" not in follower.log + leader.log


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def check_alone(files: Files, follow: httpx.Client) -> None:
    """A follower that has not seen its leader yet answers with the source model, and says so."""
    assert status(follow)["state"] == "alone" and version(follow) == 0
    np.testing.assert_allclose(logits(infer(follow, digits(4), "x", adapt=False)), files.logits(digits(4)), atol=1e-4)
    assert 'cafe_tta_leader_up{model="small"} 0.0' in follow.get("/metrics").text


def check_together(lead: httpx.Client, follow: httpx.Client) -> None:
    """Images that the follower answers make the leader step, and both answer with what it made of them."""
    until(lambda: status(follow)["state"] == "following", "the leader")
    assert status(follow)["leader"]["away"] is None
    send_until(follow, lambda: version(lead) >= 2, "steps of the leader")
    assert [camera["camera"] for camera in status(lead)["cameras"]] == ["noise"]
    pause(lead)
    until(lambda: version(follow) == version(lead), "the same version")
    same_answers(lead, follow)
    # The follower counts a batch when the leader has confirmed it: for a moment the leader knows of more images.
    until(lambda: 0 < counted(lead) == status(follow)["leader"]["sent_images"], "both to count the same images")
    text = lead.get("/metrics").text
    assert 'cafe_tta_followers{model="small"} 1.0' in text and "cafe_tta_leader_up{" not in text
    assert 'cafe_tta_leader_up{model="small"} 1.0' in follow.get("/metrics").text
    assert follow.get("/api/snapshot").status_code == 409  # it leads nobody itself


def counted(lead: httpx.Client) -> int:
    """Images that the leader has from its only follower."""
    (known,) = status(lead)["followers"]
    return known["images"]


def check_controls(lead: httpx.Client, follow: httpx.Client) -> None:
    """Operators ask the leader, and the follower does as it does."""
    for action, body in (("reset", {}), ("rollback", {}), ("cameras/noise", {"adapt": False})):
        refused = follow.post(f"/api/{action}", json=body)
        assert refused.status_code == 409 and "ask its leader" in refused.json()["error"]
    assert lead.post("/api/rollback", json={"version": 1}).json()["ok"]
    until(lambda: version(follow) == 1, "the leader's way back")
    same_answers(lead, follow)
    assert lead.post("/api/cameras/noise", json={"adapt": False}).json()["ok"]
    until(
        lambda: [c["opted_out"] for c in status(follow)["cameras"] if c["camera"] == "noise"] == [True], "the opt-out"
    )
    assert lead.post("/api/cameras/noise", json={"adapt": True}).json()["ok"]
    until(lambda: [c["opted_out"] for c in status(follow)["cameras"] if c["camera"] == "noise"] == [False], "it")


def check_outlived(follower: Server, follow: httpx.Client, sender: "Sender") -> None:
    """A follower whose leader was killed goes on answering with its last snapshot, and says so."""
    until(lambda: status(follow)["state"] == "alone", "the follower notices")
    last = version(follow)
    sender.go_on()
    assert version(follow) == last
    assert "no answer" in status(follow)["leader"]["away"] and status(follow)["leader"]["unsent_images"] > 0
    assert 'cafe_tta_leader_up{model="small"} 0.0' in follow.get("/metrics").text
    assert re.search(r"leader_lost: the leader at \S+ is away: no answer", follower.log)


def test_leader_gives_nothing_without_the_token_and_nothing_to_those_of_another_model(files, tmp_path):
    with serve(files) as leader, leader.until_ready().client() as client:
        for answer in (
            client.get("/api/standing?follower=me"),
            client.get("/api/snapshot", headers={"Authorization": "Bearer wrong-token"}),
            client.post("/api/images?follower=me", content=b"x"),
        ):
            assert answer.status_code == 401, answer.text
        assert client.get("/api/standing?follower=me", headers=BEARER).json()["version"] == 0
        assert client.get("/api/standing?follower=a b", headers=BEARER).status_code == 400
        for content in (b"", b"x" * 100, client.get("/api/snapshot", headers=BEARER).content):
            answer = client.post("/api/images?follower=me", content=content, headers=BEARER)
            assert answer.status_code == 400, answer.text
        assert status(client)["images"] == 0
        send_until(client, lambda: version(client) >= 1, "a step")
        other = make_files(tmp_path, seed=2)
        with serve(other, "--leader", leader.url) as follower, follower.until_ready().client() as follow:
            assert status(follow)["state"] == "alone" and version(follow) == 0
            assert "does not belong to this classifier" in status(follow)["leader"]["away"]
            assert "give this server the settings of its leader" in status(follow)["leader"]["away"]
            np.testing.assert_allclose(logits(infer(follow, digits(4), "x")), other.logits(digits(4)), atol=1e-4)


def test_leader_without_a_token_has_no_followers(files):
    async def ask() -> httpx.Response:
        built = build(load_settings({"model": str(files.model), "source": [str(files.stats)]}))
        state = App([built])
        app = create_app(state)
        transport = httpx.ASGITransport(app)
        async with state.lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get("/api/snapshot", headers=BEARER)

    answer = asyncio.run(ask())
    assert answer.status_code == 403 and "followers need a token" in answer.json()["error"]


def test_cameras_that_a_follower_has_verified_are_trusted_by_the_leader(files, tmp_path: Path):
    tokens = tmp_path / "cameras.toml"
    tokens.write_text('gate = "token-of-gate"\n')
    cameras = ("--camera-tokens", tokens)
    with serve(files, *cameras) as leader, leader.until_ready().client() as lead:
        with serve(files, *cameras, "--leader", leader.url) as follower, follower.until_ready().client() as follow:
            answer = infer(follow, noise(16), "x", camera="gate")
            assert answer.status_code == 401
            infer(follow, noise(16, 1), "x", camera="someone")
            follow.headers["Authorization"] = "Bearer token-of-gate"
            assert infer(follow, noise(16, 2), "x", camera="gate").json()["parameters"]["adapting"]
            until(lambda: sum(camera["images"] for camera in status(lead)["cameras"]) == 32, "the images")
        trusted = {camera["camera"]: camera["trusted"] for camera in status(lead)["cameras"]}
        assert trusted == {"gate": True, "someone": False}
