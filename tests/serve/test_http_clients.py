"""Plain clients: files and forms, the examples of the docs as they are printed, and the description of the server."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.http as triton

from .http_server import PATIENCE, Server, digits, png, shared_files, until

PAGE = Path(__file__).parents[2] / "docs" / "serving" / "clients.md"
INFER = "/v2/models/digits/infer"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return shared_files(tmp_path_factory)


@pytest.fixture(scope="module")
def server(files):
    options = (
        "--name",
        "digits",
        "--grpc-port",
        "0",
        "--max-batch-size",
        "8",
        "--max-image-pixels",
        "4096",
        "--max-body-bytes",
        "200000",
    )
    with Server("--model", files.model, "--stats", files.stats, "--no-adapt", *options) as server:
        yield server.until_ready()


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def outputs(answer) -> dict:
    assert answer.status_code == 200, answer.text
    return {output["name"]: output["data"] for output in answer.json()["outputs"]}


def cameras(client) -> list[str]:
    return [camera["camera"] for camera in client.get("/api/status").json()["cameras"]]


@pytest.mark.parametrize(("format", "kind"), [("PNG", "image/png"), ("JPEG", "image/jpeg; charset=binary")])
def test_body_that_is_an_image_file_is_answered(client, files, format, kind):
    pixels = digits(1)[0]
    options = {"quality": 100, "subsampling": 0} if format == "JPEG" else {}
    answer = client.post(
        INFER, params={"camera": "gate 1", "id": "a", "adapt": "false"}, content=png(pixels, format, **options),
        headers={"Content-Type": kind},
    )  # fmt: skip
    found = outputs(answer)
    assert answer.json()["id"] == "a" and answer.json()["parameters"]["adapting"] is False
    expected = files.logits(pixels[None])
    np.testing.assert_allclose([found["logits"]], expected, atol=1e-3 if format == "PNG" else 0.05)
    if format == "PNG":
        assert found["label"] == expected.argmax(1).tolist() and found["class_name"] == [str(found["label"][0])]
    until(lambda: "gate 1" in cameras(client), "the camera of the address")


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "application/octet-stream"])
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_image_file_is_recognised_without_its_content_type(client, kind, format):
    content, headers = png(digits(1)[0], format), {} if kind is None else {"Content-Type": kind}
    expected = outputs(client.post(INFER, content=content, headers={"Content-Type": f"image/{format.lower()}"}))
    answer = client.post(INFER, params={"camera": "untyped"}, content=content, headers=headers)
    assert outputs(answer) == expected
    until(lambda: "untyped" in cameras(client), "the camera of the address")


def test_form_with_several_files_is_answered_in_their_order(client, files):
    pixels = digits(5)
    parts = [("images", (f"{i}.png", png(image), "image/png")) for i, image in enumerate(pixels)]
    answer = client.post(INFER, files=parts, data={"camera": "form", "adapt": "false"})
    np.testing.assert_allclose(np.reshape(outputs(answer)["logits"], (5, 10)), files.logits(pixels), atol=1e-3)
    until(lambda: "form" in cameras(client), "the camera of the form")


def test_file_that_looks_like_a_boundary_is_read_whole(client, files):
    """Bytes after the end of a PNG file are allowed; here they are all but the boundary."""
    content = png(digits(1)[0]) + b"\r\n--edg\r\n--Edge\r\n\r\n--edg"
    body = b'preamble\r\n--edge\r\ncontent-disposition: form-data; name="x"; filename="a"\r\n\r\n' + content
    body += b'\r\n--edge\r\nContent-Disposition: form-data; name="camera"\r\n\r\nodd\r\n--edge--\r\nepilogue'
    answer = client.post(INFER, content=body, headers={"Content-Type": 'multipart/form-data; boundary="edge"'})
    np.testing.assert_allclose([outputs(answer)["logits"]], files.logits(digits(1)), atol=1e-3)


def form(*parts: tuple[str, bytes], end: bytes = b"--edge--\r\n") -> bytes:
    return b"".join(f"--edge\r\n{head}\r\n\r\n".encode() + content + b"\r\n" for head, content in parts) + end


FILE = 'Content-Disposition: form-data; name="images"; filename="a.png"'
CAMERA = 'Content-Disposition: form-data; name="camera"'
GOOD = png(np.zeros((8, 8, 3), np.uint8))
EDGE = "multipart/form-data; boundary=edge"


@pytest.mark.parametrize(
    ("content", "kind", "status", "text"),
    [
        (b"GIF89a", "image/gif", 415, 'expected image/jpeg or image/png, but got "image/gif"'),
        (b"", "image/png", 400, "image 0 is no JPEG or PNG that can be read: it is empty"),
        (b"no image", "image/png", 400, "image 0 is no JPEG or PNG that can be read"),
        (png(np.zeros((65, 64, 3), np.uint8)), "image/png", 400, "image 0 is no JPEG or PNG that can be read"),
        (bytes(200_001), "image/png", 413, "max_body_bytes"),
        (b"--edge--\r\n", EDGE, 400, "expected 1 to 8 images a request (max_batch_size), but got 0"),
        (form(*[(FILE, GOOD)] * 9), EDGE, 400, "expected 1 to 8 images a request (max_batch_size), but got 9"),
        (form(*[(FILE, GOOD)] * 99), EDGE, 400, "expected a form of at most 12 parts, but got more"),
        (form((FILE, GOOD), end=b""), EDGE, 400, "a part of it has no header or no end"),
        (b"--edge\r\nno header", EDGE, 400, "a part of it has no header or no end"),
        (b"nothing", EDGE, 400, "its boundary is nowhere in the body"),
        (b"", "multipart/form-data", 400, "with a boundary of 1 to 70 characters"),
        (form((FILE, GOOD), (CAMERA, b"x" * 5000)), EDGE, 400, "to have at most 4096 bytes, but got 5000"),
        (form((FILE, GOOD), (CAMERA, b"\xff")), EDGE, 400, "expected the field camera to be a text in UTF-8"),
        (form((FILE, GOOD), (CAMERA.replace("camera", "adapt"), b"maybe")), EDGE, 400, 'or false, but got "maybe"'),
        (form((FILE, GOOD), (CAMERA.replace("camera", "timeout"), b"-1")), EDGE, 400, "timeout to be microseconds"),
        (form((CAMERA.replace("camera", "colour"), b"red")), EDGE, 400, 'no field "colour"; choose from: camera'),
    ],
)  # fmt: skip
def test_wrong_file_or_form_is_told_what_was_expected(client, content, kind, status, text):
    answer = client.post(INFER, content=content, headers={"Content-Type": kind})
    assert answer.status_code == status and text in answer.json()["error"], answer.text


def test_unknown_parameter_of_the_address_is_refused(client):
    answer = client.post(INFER, params={"cam": "x"}, content=GOOD, headers={"Content-Type": "image/png"})
    assert (answer.status_code, answer.json()) == (
        400, {"error": 'no parameter "cam"; choose from: camera, adapt, timeout, id'}
    )  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    pixels = digits(1)[0]
    (tmp_path / "digit.png").write_bytes(png(pixels))
    (tmp_path / "digit.jpg").write_bytes(png(pixels, "JPEG"))
    monkeypatch.chdir(tmp_path)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", blocks("bash"))
def test_curl_examples_of_the_docs_are_answered(server, here, block):
    script = block.replace("127.0.0.1:8080", server.address).replace("curl ", "curl -sS --fail ")
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert re.search(r'"class_name"|\[\'\d\'\]', done.stdout), done


@pytest.mark.parametrize("block", blocks("python"))
def test_python_examples_of_the_docs_are_answered(server, here, block, capsys):
    scope: dict = {}
    until(lambda: "over gRPC on" in server.log, "the gRPC port")
    grpc = re.search(r"over gRPC on (\S+)", server.log)[1]
    block = block.replace("127.0.0.1:8080", server.address).replace("127.0.0.1:8081", grpc)
    exec(compile(block, str(PAGE), "exec"), scope)
    assert re.search(r"model_version|int64_param", capsys.readouterr().out)
    if "client" in scope:
        scope["client"].close()


def test_examples_were_found():
    assert (len(blocks("bash")), len(blocks("python"))) == (2, 3)
    assert requests.__name__ in blocks("python")[0] and triton.__name__ in blocks("python")[1]


def test_repository_index_lists_the_model(server, client):
    expected = [{"name": "digits", "version": "1", "state": "READY", "reason": ""}]
    assert client.get("/v2/repository/index").json() == expected
    with triton.InferenceServerClient(server.address) as theirs:
        assert theirs.get_model_repository_index() == expected


def test_every_address_is_described_and_every_described_address_is_there(client):
    described = client.get("/openapi.json").json()
    assert described["openapi"].startswith("3.") and described["info"]["title"] == "cafe-tta"
    operations = [(method, path, o) for path, item in described["paths"].items() for method, o in item.items()]
    assert len({o["operationId"] for _, _, o in operations}) == len(operations) >= 20
    assert all(o["summary"] and "422" not in o["responses"] for _, _, o in operations)
    for method, path, operation in operations:
        named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert named == {name.partition(":")[0] for name in re.findall(r"\{(.*?)\}", path)}
        if path == "/api/events":
            continue  # never ends
        real = path.replace("{name}", "digits").replace("{version}", "1").replace("{action}", "pause")
        answer = client.request(method.upper(), real)
        assert answer.status_code not in (404, 405, 500), (method, path, answer.text)
    infer = described["paths"]["/v2/models/{name}/infer"]["post"]
    assert {"application/json", "image/jpeg", "image/png", "multipart/form-data"} <= infer["requestBody"][
        "content"
    ].keys()
