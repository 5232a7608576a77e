"""What the server refuses, and that it lives on: too much, too slow, too often, not allowed, not understood."""

import contextlib
import gzip
import json
import socket
import struct
import zlib

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .http_server import PATIENCE, Files, Server, digits, png, shared_files

INFER = "/v2/models/small/infer"
TOKEN = "a-token-of-some-length"
LIMIT = 256 * 1024


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return shared_files(tmp_path_factory)


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
    config = tmp_path_factory.mktemp("config") / "serve.toml"
    config.write_text(
        f"max_body_bytes = {LIMIT}\nmax_json_bytes = 65536\nmax_image_pixels = 10000\nbody_timeout_seconds = 1.5\n"
        "max_batch_size = 16\nport = 1\nstep_images = 32\nbuffer_images = 256\n"
    )
    environment = {"CAFE_TTA_SERVE_TOKEN": TOKEN, "CAFE_TTA_SERVE_MAX_QUEUE_SIZE": "64"}
    with Server("--config", config, "--model", files.model, "--stats", files.stats, env=environment) as server:
        yield server.until_ready()


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def binary(pixels: np.ndarray, **others: object) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "images", "datatype": "UINT8", "shape": list(pixels.shape)}
    tensor["parameters"] = {"binary_data_size": pixels.nbytes}
    header = json.dumps({"inputs": [tensor], **others}).encode()
    return header + pixels.tobytes(), {"Inference-Header-Content-Length": str(len(header))}


def pictures(*contents: bytes) -> tuple[bytes, dict[str, str]]:
    data = b"".join(struct.pack("<I", len(content)) + content for content in contents)
    tensor = {"name": "images", "datatype": "BYTES", "shape": [len(contents)]}
    header = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": len(data)}}]}).encode()
    return header + data, {"Inference-Header-Content-Length": str(len(header))}


def works(client: httpx.Client) -> bool:
    content, headers = binary(digits(1))
    return client.post(INFER, content=content, headers=headers).status_code == 200


def refusal(answer: httpx.Response) -> tuple[int, str]:
    assert list(answer.json()) == ["error"]
    return answer.status_code, answer.json()["error"]


def test_bodies_beyond_the_limit_are_refused_announced_or_not(client):
    status, text = refusal(client.post(INFER, content=b"x" * (LIMIT + 1)))
    assert (status, f"at most {LIMIT} bytes" in text) == (413, True)
    status, _ = refusal(client.post(INFER, content=(b"x" * 65536 for _ in range(8))))
    assert status == 413
    status, text = refusal(client.post(INFER, content=json.dumps({"inputs": [], "id": "x" * 65536})))
    assert (status, "binary" in text) == (413, True)
    assert works(client)


def test_a_bomb_is_never_unpacked(client, server):
    bomb = gzip.compress(bytes(2 * 10**8), 1)[: LIMIT - 1]  # a thousand times the limit
    headers = {"Content-Encoding": "gzip"}
    before = memory(server)
    for _ in range(3):
        status, text = refusal(client.post(INFER, content=bomb, headers=headers))
        assert (status, "after unpacking" in text) == (413, True)
    assert memory(server) - before < 50_000
    assert works(client)


def memory(server: Server) -> int:
    """The most that the process ever held, in kB."""
    with open(f"/proc/{server.process.pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(client, server):
    row = zlib.compress(bytes(30_000 // 8 + 1) * 4)
    huge = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 1, 0, 0, 0, 0))
    huge += chunk(b"IDAT", row) + chunk(b"IEND", b"")
    before = memory(server)
    for contents, text in (
        ((png(digits(1)[0]), huge), "image 1 is no JPEG or PNG that can be read: "),
        ((png(np.zeros((101, 100, 3), np.uint8)),), "100 x 101 pixels, but at most 10,000 are allowed"),
        ((b"",), "it is empty"),
        ((b"\xff\xd8\xff\xe0 not much of a JPEG",), "image 0 is no JPEG or PNG"),
        ((png(digits(1)[0], "JPEG")[:-200],), "image 0 is no JPEG or PNG"),
        ((png(digits(1)[0], "BMP"),), "not an image of a known format"),
    ):
        content, headers = pictures(*contents)
        status, found = refusal(client.post(INFER, content=content, headers=headers))
        assert (status, text in found) == (400, True), found
    content, headers = binary(np.zeros((1, 120, 100, 3), np.uint8))
    status, found = refusal(client.post(INFER, content=content, headers=headers))
    assert (status, found) == (400, "expected images of at most 10,000 pixels, but got 100 x 120")
    assert memory(server) - before < 50_000


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_a_slow_client_is_told_so_and_delays_nobody(client, server):
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as slow, socket.create_connection(
        (host, int(port)), PATIENCE
    ) as silent:  # fmt: skip
        slow.sendall(f"POST {INFER} HTTP/1.1\r\nHost: {server.address}\r\nContent-Length: 1000\r\n\r\n{{".encode())
        silent.sendall(b"POST /v2/models/small/in")
        for _ in range(20):
            assert works(client)
        answer = received(slow)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'{"error": "the body did not arrive within 1.5 s"}' in answer
        assert received(silent) == b""  # closed


def received(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def test_a_request_that_cannot_wait_is_refused(client):
    content, headers = binary(digits(1), parameters={"timeout": 1})
    status, text = refusal(client.post(INFER, content=content, headers=headers))
    assert (status, "no answer within the time-out" in text) == (504, True)
    content, headers = binary(digits(1), parameters={"timeout": 10**15})
    assert client.post(INFER, content=content, headers=headers).status_code == 200


def test_controls_need_the_token_and_answers_do_not(client):
    assert works(client)
    for headers, text in (
        ({}, "this needs the header Authorization: Bearer …"),
        ({"Authorization": "Bearer wrong-token-of-some-length"}, "the bearer token is wrong"),
        ({"Authorization": f"Basic {TOKEN}"}, "the bearer token is wrong"),
        ({"Authorization": "Bearer \xe9".encode("latin-1")}, "the bearer token is wrong"),
    ):
        answer = client.post("/api/pause", headers=headers)
        assert refusal(answer) == (401, text)
        assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/api/status").json()["state"] == "adapting"
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert client.post("/api/pause", headers=right).json() == {"ok": True, "version": 0}
    assert client.get("/api/status").json()["state"] == "paused"
    status, text = refusal(client.post("/api/pause", headers=right))
    assert (status, "paused already" in text) == (409, True)
    assert client.post("/api/resume", headers=right).json()["ok"]
    assert client.post("/api/reset", headers=right).json() == {"ok": True, "version": 0}
    for body in (b'{"version": "last"}', b"{", b'[{"version": 1}]'):
        assert client.post("/api/rollback", headers=right, content=body).status_code == 400
    assert refusal(client.post("/api/rollback", headers=right, json={"version": 987654}))[0] == 409


def test_an_operator_opts_a_camera_out_and_in_again(client):
    right = {"Authorization": f"Bearer {TOKEN}"}

    def adapting(name: str, first: int) -> bool:  # other images each time: repeated ones are not adapted to
        content, headers = binary(digits(64)[first : first + 4], parameters={"camera": name})
        return client.post(INFER, content=content, headers=headers).json()["parameters"]["adapting"]

    def opted_out(name: str) -> bool:
        return next(c["opted_out"] for c in client.get("/api/status").json()["cameras"] if c["camera"] == name)

    for name, address in (("private", "private"), ("west/gate 1", "west/gate%201")):
        url = f"/api/cameras/{address}"
        assert client.post(url, json={"adapt": False}).status_code == 401
        assert client.post(url, headers=right, json={"adapt": False}).json()["ok"]
        assert not adapting(name, 40) and opted_out(name)
        assert client.post(url, headers=right, json={"adapt": True}).json()["ok"]
        assert adapting(name, 50) and not opted_out(name)
    for body in (b"", b"no", b'{"adapt": 1}', b"[]", b'{"adapted": true}'):
        status, text = refusal(client.post("/api/cameras/private", headers=right, content=body))
        assert (status, 'expected {"adapt": true or false} or {"undo": true}, but' in text) == (400, True)
    assert refusal(client.post(f"/api/cameras/{'x' * 257}", headers=right, json={"adapt": False}))[0] == 409


def test_pages_of_other_sites_can_do_nothing(client):
    content, headers = binary(digits(1))
    for foreign in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        status, _ = refusal(client.post(INFER, content=content, headers=headers | foreign))
        assert status == 403
        assert client.post("/api/pause", headers=foreign).status_code == 403
    own = {"Origin": str(client.base_url).rstrip("/")}
    assert client.post(INFER, content=content, headers=headers | own).status_code == 200


def test_the_token_is_in_no_line_of_the_log(server):
    assert TOKEN not in server.log


# A thousand requests that are wrong in some way

numbers = st.one_of(st.integers(-5, 5), st.integers(), st.floats(), st.sampled_from([2**31, 10**400, 1e400, 32, 3072]))
leaves = st.one_of(
    st.none(), st.booleans(), numbers, st.text(max_size=8), st.sampled_from(["UINT8", "FP32", "BYTES", "images"])
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
places = st.sampled_from(
    ["", "id", "parameters", "outputs", "inputs", "inputs.name", "inputs.datatype", "inputs.shape", "inputs.data",
     "inputs.parameters", "parameters.camera", "parameters.adapt", "parameters.timeout",
     "parameters.binary_data_output", "inputs.parameters.binary_data_size", "outputs.name", "outputs.parameters",
     "outputs.parameters.classification"]
)  # fmt: skip


@st.composite
def changed_json(draw) -> tuple[bytes, dict[str, str]]:
    """A good request in which something else stands at one or two places."""
    request = {
        "id": "1",
        "parameters": {"camera": "fuzz"},
        "inputs": [{"name": "images", "datatype": "UINT8", "shape": [1, 2, 2, 3], "data": [7] * 12, "parameters": {}}],
        "outputs": [{"name": "logits", "parameters": {}}],
    }
    for place in draw(st.lists(places, min_size=1, max_size=2)):
        target = request
        *path, last = place.split(".")
        for step in path:
            found = target.get(step) if isinstance(target, dict) else None
            target = found[0] if isinstance(found, list) and found else found
        if isinstance(target, dict):
            target[last] = draw(values)
    return json.dumps(request).encode(), {}


@st.composite
def changed_binary(draw) -> tuple[bytes, dict[str, str]]:
    """A good request with binary data: cut, spoilt, or with another length in its header."""
    small = np.ascontiguousarray(digits(1)[:, ::4, ::4])
    good = draw(st.sampled_from([binary(small), pictures(png(small[0])), pictures(png(small[0], "JPEG"))]))
    content, headers = bytearray(good[0]), dict(good[1])
    for place, value in draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=20)):
        content[place] = value
    if draw(st.booleans()):
        del content[draw(st.integers(0, len(content))) :]
    if draw(st.booleans()):
        length = st.one_of(st.integers(-10, 5000).map(str), st.text("0123456789+-e.", max_size=12))
        headers["Inference-Header-Content-Length"] = draw(length)
    return bytes(content), headers


encodings = st.sampled_from(["gzip", "deflate", "br", "identity", "x-gzip, gzip"])
garbage = st.tuples(
    st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(gzip.compress), st.just(b"[" * 50_000)),
    st.one_of(st.just({}), encodings.map(lambda encoding: {"Content-Encoding": encoding})),
)


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(request=st.one_of(changed_json(), changed_json(), changed_binary(), garbage))
def test_malformed_requests_are_never_the_servers_failure(client, request):
    content, headers = request
    answer = client.post(INFER, content=content, headers=headers)
    expected = (200, 400, 413, 415, *((504,) if b'"timeout"' in content else ()))  # it may ask for too little time
    assert answer.status_code in expected, answer.text
    if answer.status_code != 200:
        assert list(answer.json()) == ["error"]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(line=st.binary(max_size=60), valid_start=st.booleans())
def test_what_is_no_http_harms_nobody(server, line, valid_start):
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        start = f"POST {INFER} HTTP/1.1\r\n".encode() if valid_start else b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(start + line + b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            answer = received(connection)
            assert not answer.startswith(b"HTTP/1.1 5")


def test_after_all_that_the_server_answers_rightly(client, server):
    assert works(client)
    assert client.get("/v2/health/ready").status_code == 200
    assert server.process.poll() is None
    assert "Traceback" not in server.log
    text = client.get("/metrics").text
    assert 'cafe_tta_requests_total{code="500",model="small"}' not in text
    assert 'cafe_tta_waiting_images{model="small"} 0.0' in text
