"""Tokens of cameras over real sockets: a listed name needs its token, also over gRPC, and the list may change."""

import os
import re
import subprocess
import sys

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from .http_server import PATIENCE, Server, digits, infer, png, shared_files, until

GATE, YARD = "token-of-the-gate", "token-of-the-yard"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return shared_files(tmp_path_factory)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "cameras.toml"
    path.write_text(f'gate = "{GATE}"\nyard = ["old-token-yard", "{YARD}"]\n')
    return path


@pytest.fixture(scope="module")
def server(files, tokens):
    options = ("--camera-tokens", tokens, "--grpc-port", "0", "--no-gate", "--no-judge")
    with Server("--model", files.model, "--stats", files.stats, *options) as server:
        yield server.until_ready()


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def ask(client: httpx.Client, camera: str, token: str | None = None) -> httpx.Response:
    client.headers.pop("Authorization", None)
    if token is not None:
        client.headers["Authorization"] = f"Bearer {token}"
    return infer(client, digits(2), "x", camera=camera)


def cameras(client: httpx.Client) -> dict[str, dict]:
    return {camera["camera"]: camera for camera in client.get("/api/status").json()["cameras"]}


@pytest.mark.parametrize(
    ("token", "text"),
    [
        (None, 'the camera "gate" has a token: this needs the header Authorization: Bearer …'),
        (YARD, 'the camera "gate" has a token: its token is wrong'),
        ("x", 'the camera "gate" has a token: its token is wrong'),
        (GATE + "x", 'the camera "gate" has a token: its token is wrong'),
    ],
)
def test_listed_name_is_refused_without_its_token(client, token, text):
    answer = ask(client, "gate", token)
    assert (answer.status_code, answer.json()["error"]) == (401, text)
    assert answer.headers["www-authenticate"] == "Bearer"


def test_listed_name_with_its_token_is_trusted_and_others_are_not(client):
    for camera, token in (("gate", GATE), ("yard", "old-token-yard"), ("yard", YARD), ("stranger", None)):
        assert ask(client, camera, token).status_code == 200
    assert ask(client, "stranger", GATE).status_code == 200  # a token of another name makes nobody trusted
    until(lambda: {"gate", "yard", "stranger"} <= cameras(client).keys(), "the cameras")
    assert [cameras(client)[name]["trusted"] for name in ("gate", "yard", "stranger")] == [True, True, False]


def test_token_is_asked_for_over_every_way_in(client, server):
    image = {"content": png(digits(1)[0]), "headers": {"Content-Type": "image/png"}, "params": {"camera": "gate"}}
    assert client.post("/v2/models/small/infer", **image).status_code == 401
    form = {"files": {"images": ("a.png", png(digits(1)[0]))}, "data": {"camera": "gate"}}
    assert client.post("/v2/models/small/infer", **form).status_code == 401
    assert client.post("/v2/models/small/infer", **form, headers={"Authorization": f"bearer {GATE}"}).status_code == 200
    until(lambda: "over gRPC on" in server.log, "the gRPC port")
    images = triton.InferInput("images", [1, 32, 32, 3], "UINT8")
    images.set_data_from_numpy(digits(1))
    with triton.InferenceServerClient(re.search(r"over gRPC on (\S+)", server.log)[1]) as theirs:
        with pytest.raises(InferenceServerException, match="has a token") as raised:
            theirs.infer("small", [images], parameters={"camera": "gate"})
        assert raised.value.status() == "StatusCode.UNAUTHENTICATED"
        theirs.infer("small", [images], parameters={"camera": "gate"}, headers={"authorization": f"Bearer {GATE}"})


def test_changed_list_is_in_force_without_a_restart(client, server, tokens):
    before = tokens.read_text()
    try:
        tokens.write_text(before + 'late = "token-of-the-late"\n')
        until(lambda: ask(client, "late").status_code == 401, "the new name")
        assert ask(client, "late", "token-of-the-late").status_code == 200
        tokens.write_text("broken =")
        said = "the tokens of cameras stay as they were"
        until(lambda: ask(client, "x").status_code == 200 and said in server.log, "the complaint")
        assert ask(client, "late").status_code == 401 and ask(client, "gate", GATE).status_code == 200
    finally:
        tokens.write_text(before)
        os.utime(tokens)
    until(lambda: ask(client, "late").status_code == 200, "the name that is free again")


def test_no_token_is_in_the_log_or_the_status(client, server):
    for text in (server.log, client.get("/api/status").text, client.get("/metrics").text):
        assert not any(token in text for token in (GATE, YARD, "old-token-yard", "token-of-the-late"))


def test_unknown_cameras_can_be_refused(files, tokens):
    options = ("--camera-tokens", tokens, "--unknown-cameras", "refuse", "--no-adapt")
    arguments = ("--model", files.model, "--stats", files.stats, *options)
    with Server(*arguments) as server, server.until_ready().client() as client:
        answer = ask(client, "stranger")
        assert (answer.status_code, answer.json()["error"]) == (
            401, 'no camera "stranger" is known here, and others are refused (unknown_cameras)'
        )  # fmt: skip
        assert ask(client, "gate", GATE).status_code == 200


def test_missing_list_is_one_line(files, tmp_path):
    command = [sys.executable, "-m", "cafe_tta", "serve", "--model", files.model, "--source", files.stats]
    for more in ((), ("--check",)):
        done = subprocess.run(
            [*command, "--port", "0", "--camera-tokens", tmp_path / "none.toml", *more],
            capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 2 and "error: cannot read the tokens of cameras: " in done.stderr, done
        assert "Traceback" not in done.stderr


def test_camera_is_undone_and_a_stall_is_shown(files, tmp_path):
    """An operator sees that nothing comes of adapting, looks at the steps, and undoes the camera."""
    options = (
        "--method", "cafe", "--no-gate", "--no-judge", "--step-images", "16", "--validation-images", "16",
        "--buffer-images", "256", "--set", "normalisation=source",
    )  # fmt: skip
    random = np.random.default_rng(0)
    arguments = ("--model", files.model, "--stats", files.stats, *options)
    with Server(*arguments) as server, server.until_ready().client() as client:
        for _ in range(40):
            noise = random.integers(0, 256, (32, 32, 32, 3)).astype(np.uint8)
            infer(client, noise, "x", camera="bad")
            if client.get("/api/status").json()["version"]:
                break
        until(lambda: client.get("/api/status").json()["version"] >= 1, "a step")
        accepted = [e for e in client.get("/api/status").json()["events"] if e["kind"] == "accepted"]
        assert accepted[-1]["cameras"] == {"bad": 16}
        answer = client.post("/api/cameras/bad", json={"undo": True})
        assert answer.json() == {"ok": True, "version": 0}
        bad = cameras(client)["bad"]
        assert bad["opted_out"] and bad["contributed"] == 0
        for wrong in ({"undo": False}, {"undo": 1}, {}):
            error = client.post("/api/cameras/bad", json=wrong).json()["error"]
            assert error.startswith('expected {"adapt": true or false} or {"undo": true}, but got')
        for _ in range(9):  # all that comes is opted out: 288 images, of which no step can be made
            infer(client, random.integers(0, 256, (32, 32, 32, 3)).astype(np.uint8), "x", camera="bad")
        until(lambda: client.get("/api/status").json()["stalled"] is not None, "the stall")
        assert 'cafe_tta_stalled{model="small"} 1.0' in client.get("/metrics").text
        assert "warning cafe_tta.serve.events request=- stalled: no step was taken for" in server.log
