"""The Open Inference Protocol, spoken by tritonclient as it is, and by hand."""

import base64
import gzip
import json
import zlib

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from .http_server import PATIENCE, PREPROCESSING, Files, Server, digits, png, shared_files

INFER = "/v2/models/small/infer"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return shared_files(tmp_path_factory)


@pytest.fixture(scope="module")
def server(files):
    with Server("--model", files.model, "--stats", files.stats, "--no-adapt") as server:
        yield server.until_ready()


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def tritonclient(server):
    with triton.InferenceServerClient(server.address, network_timeout=PATIENCE, connection_timeout=PATIENCE) as client:
        yield client


def tensor(pixels: np.ndarray, datatype: str = "UINT8", binary: bool = True) -> triton.InferInput:
    given = triton.InferInput("images", list(pixels.shape), datatype)
    given.set_data_from_numpy(pixels, binary_data=binary)
    return given


def ask(client: httpx.Client, inputs: list, **others: object) -> httpx.Response:
    return client.post(INFER, json={"inputs": inputs, **others})


def as_json(pixels: np.ndarray) -> dict:
    return {"name": "images", "datatype": "UINT8", "shape": list(pixels.shape), "data": pixels.ravel().tolist()}


def test_tritonclient_finds_all_that_it_asks_for(tritonclient):
    assert tritonclient.is_server_live()
    assert tritonclient.is_server_ready()
    assert tritonclient.is_model_ready("small")
    assert tritonclient.is_model_ready("small", "1")
    assert not tritonclient.is_model_ready("other")
    assert "binary_tensor_data" in tritonclient.get_server_metadata()["extensions"]
    metadata = tritonclient.get_model_metadata("small")
    assert metadata["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, -1, -1, 3]}]
    assert metadata["outputs"][0] == {"name": "logits", "datatype": "FP32", "shape": [-1, 10]}
    assert metadata["parameters"]["classes"] == list("0123456789")
    assert tritonclient.get_model_config("small")["max_batch_size"] == 128


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", ["UINT8", "FP32", "BYTES"])
@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
def test_tritonclient_sends_and_receives_every_kind_of_tensor(tritonclient, files, datatype, binary, packed):
    pixels = digits(5)
    if datatype == "UINT8":
        given = tensor(pixels, binary=binary)
    elif datatype == "FP32":
        given = tensor(PREPROCESSING(pixels).numpy(), "FP32", binary)
    else:
        contents = [png(image) for image in pixels]
        if not binary:
            contents = [base64.b64encode(content) for content in contents]
        given = tensor(np.array(contents, dtype=object), "BYTES", binary)
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("logits", "label", "class_name")]
    answer = tritonclient.infer(
        "small", [given], outputs=wanted, request_id="a-7", parameters={"camera": "gate-1", "adapt": False},
        request_compression_algorithm=packed, response_compression_algorithm=packed,
    )  # fmt: skip
    expected = files.logits(pixels)
    np.testing.assert_allclose(answer.as_numpy("logits"), expected, atol=1e-4)
    np.testing.assert_array_equal(answer.as_numpy("label"), expected.argmax(1))
    names = [name.decode() if isinstance(name, bytes) else name for name in answer.as_numpy("class_name")]
    assert names == [str(label) for label in expected.argmax(1)]
    response = answer.get_response()
    assert response["id"] == "a-7"
    assert response["parameters"]["model_version"] == 0
    assert response["parameters"]["adapting"] is False


def test_without_chosen_outputs_all_come_and_probabilities_are_softmax(tritonclient, files):
    pixels = digits(3)
    answer = tritonclient.infer("small", [tensor(pixels)], model_version="1")
    logits = files.logits(pixels)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(
        answer.as_numpy("probability"), (powers / powers.sum(1, keepdims=True)).max(1), atol=1e-4
    )
    assert {output["name"] for output in answer.get_response()["outputs"]} == {"logits", "label", "probability"}


def test_classification_tells_the_best_classes(tritonclient, files):
    pixels = digits(2)
    wanted = [triton.InferRequestedOutput("logits", class_count=3)]
    found = tritonclient.infer("small", [tensor(pixels)], outputs=wanted).as_numpy("logits")
    assert found.shape == (2, 3)
    value, number, name = found[1, 0].decode().split(":")
    logits = files.logits(pixels)[1]
    assert int(number) == logits.argmax()
    assert name == number
    assert float(value) == pytest.approx(logits.max(), abs=1e-4)


def test_asynchronous_requests_of_tritonclient_get_their_own_answers(server, files):
    pixels = digits(12)
    with triton.InferenceServerClient(server.address, concurrency=6, network_timeout=PATIENCE) as client:
        pending = [client.async_infer("small", [tensor(pixels[i : i + 1])], request_id=str(i)) for i in range(12)]
        answers = [one.get_result() for one in pending]
    assert [answer.get_response()["id"] for answer in answers] == [str(i) for i in range(12)]
    found = np.concatenate([answer.as_numpy("logits") for answer in answers])
    np.testing.assert_allclose(found, files.logits(pixels), atol=1e-4)


def test_images_of_any_size_are_fitted_and_turned_upright(client, files):
    large = np.kron(digits(1)[0], np.ones((3, 2, 1), np.uint8))  # 96 x 64
    exif = (
        b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06\x00\x00\x00\x00\x00\x00"
    )
    turned = png(np.rot90(large).copy(), "PNG", exif=exif)  # to be shown turned by a quarter, clockwise
    data = [base64.b64encode(content).decode() for content in (png(large), turned)]
    answer = ask(client, [{"name": "images", "datatype": "BYTES", "shape": [2], "data": data}]).json()
    logits = np.reshape(answer["outputs"][0]["data"], (2, 10))
    np.testing.assert_allclose(logits[0], files.logits(large[None])[0], atol=1e-4)
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)


def test_unaligned_and_odd_bodies_are_read_right(client, files):
    pixels = digits(2)
    values = PREPROCESSING(pixels).numpy()
    given = {"name": "images", "datatype": "FP32", "shape": [2, 3, 32, 32]}
    given["parameters"] = {"binary_data_size": values.nbytes}
    for padding in range(4):  # the JSON part shifts the numbers
        header = json.dumps({"inputs": [given]}).encode() + b" " * padding
        packed = gzip.compress(header) + gzip.compress(values.tobytes())  # two members are one body
        headers = {"Inference-Header-Content-Length": str(len(header)), "Content-Encoding": "gzip"}
        answer = client.post(INFER, content=packed, headers=headers)
        assert answer.status_code == 200, answer.text
        found = np.reshape(answer.json()["outputs"][0]["data"], (2, 10))
        np.testing.assert_allclose(found, files.logits(pixels), atol=1e-4)


def test_answers_are_packed_only_for_those_who_accept_it(client):
    given = [as_json(digits(20))]
    plain = client.post(INFER, json={"inputs": given}, headers={"Accept-Encoding": "identity, gzip;q=0"})
    packed = client.post(INFER, json={"inputs": given}, headers={"Accept-Encoding": "br, deflate"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "deflate"
    assert packed.json()["outputs"] == plain.json()["outputs"]


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"inputs": []}, 400, "a list of one input, 'images'"),
        ({"inputs": [{"name": "pictures"}]}, 400, "expected the input 'images', but got \"pictures\""),
        ({"shape": [1, 32, 32]}, 400, "expected UINT8 pixels of shape [n, height, width, 3]"),
        ({"datatype": "INT8"}, 400, 'but got "INT8" of shape'),
        ({"datatype": "FP32", "shape": [1, 3, 16, 16]}, 400, "FP32 of shape [n, 3, 32, 32]"),
        ({"shape": [0, 32, 32, 3], "data": []}, 400, "expected 1 to 128 images"),
        ({"shape": [129, 1, 1, 3], "data": [0] * 387}, 400, "expected 1 to 128 images"),
        ({"data": [0] * 5}, 400, "expected 3072 values"),
        ({"data": [256] * 3072}, 400, "whole numbers from 0 to 255"),
        ({"data": [1.5] * 3072}, 400, "whole numbers from 0 to 255"),
        ({"data": ["1"] * 3072}, 400, "whole numbers from 0 to 255"),
        ({"outputs": [{"name": "scores"}]}, 400, 'no output "scores"; choose from: logits, label'),
        ({"parameters": {"camera": 7}}, 400, "expected the parameter camera to be a text"),
        ({"parameters": {"adapt": "no"}}, 400, "expected the parameter adapt to be true or false"),
        ({"parameters": {"timeout": "soon"}}, 400, "expected the parameter timeout to be microseconds"),
        ({"id": 7}, 400, "expected id to be a text"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_told_what_was_expected(client, change, status, text):
    request = {"inputs": [as_json(digits(1))]}
    for key, value in change.items():
        (request if key in ("inputs", "outputs", "parameters", "id") else request["inputs"][0])[key] = value
    answer = client.post(INFER, json=request)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert text in answer.json()["error"]


def test_what_is_not_finite_is_refused(client):
    values = np.zeros((1, 3, 32, 32), np.float32)
    for bad, text in ((np.nan, "NaN or infinite"), (np.inf, "NaN or infinite"), (1e30, "at most 1e+06")):
        values[0, 1, 2, 3] = bad
        given = {"name": "images", "datatype": "FP32", "shape": [1, 3, 32, 32]}
        header = json.dumps({"inputs": [given | {"parameters": {"binary_data_size": values.nbytes}}]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(header))}
        answer = client.post(INFER, content=header + values.tobytes(), headers=headers)
        assert answer.status_code == 400
        assert text in answer.json()["error"]
    answer = client.post(INFER, content=json.dumps({"inputs": [given | {"data": [float("nan")] * 3072}]}))
    assert answer.status_code == 400
    assert "NaN is not a JSON number" in answer.json()["error"]


def test_what_is_not_there_is_404_and_every_error_is_an_error(client):
    for method, path, status in (
        ("POST", "/v2/models/other/infer", 404),
        ("POST", "/v2/models/small/versions/2/infer", 404),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/small/versions/9/ready", 404),
        ("GET", "/docs", 404),
        ("POST", "/api/explode", 404),
        ("GET", INFER, 405),
        ("POST", "/v2/health/live", 405),
    ):
        answer = client.request(method, path, content=b"{}" if method == "POST" else None)
        assert (answer.status_code, list(answer.json())) == (status, ["error"]), path


def test_every_answer_has_an_id_of_its_own_or_the_clients(client):
    given = client.get("/v2/health/live", headers={"X-Request-ID": "trace-1"}).headers["x-request-id"]
    odd = client.get("/v2/health/live", headers={"X-Request-ID": "a b\tc"}).headers["x-request-id"]
    assert given == "trace-1"
    assert len(odd) == 16


def test_metrics_are_read_by_prometheus_and_name_no_camera_of_few_images(client):
    ask(client, [as_json(digits(1))], parameters={"camera": "secret-place"})
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "secret-place" not in answer.text
    assert "_created" not in answer.text
    for line in (
        'cafe_tta_requests_total{code="200",model="small"}',
        "cafe_tta_batch_images_count",
        'cafe_tta_model_version{model="small"} 0.0',
    ):
        assert line in answer.text


def test_the_page_and_the_status_are_there(client):
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/favicon.ico").headers["content-type"].startswith("image/svg")
    status = client.get("/api/status").json()
    assert (status["name"], status["state"]) == ("small", "off")
    with client.stream("GET", "/api/events") as events:
        lines = events.iter_lines()
        assert next(lines) == "event: status"
        assert json.loads(next(lines).removeprefix("data: "))["name"] == "small"


def test_a_body_that_cannot_be_unpacked_is_the_clients_mistake(client):
    for content, text in ((b"no gzip", "cannot be unpacked"), (zlib.compress(b"x" * 999)[:-9], "ends too early")):
        answer = client.post(INFER, content=content, headers={"Content-Encoding": "gzip"})
        assert answer.status_code == 400
        assert text in answer.json()["error"]
    answer = client.post(INFER, content=b"{}", headers={"Content-Encoding": "br"})
    assert answer.status_code == 415
