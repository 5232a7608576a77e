"""The Open Inference Protocol over gRPC, spoken by tritonclient as it is; the same limits as over HTTP."""

import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from cafe_tta.serve.http.rpc import METHODS
from cafe_tta.serve.http.rpc_messages import MESSAGES, message

from .http_server import PREPROCESSING, Server, digits, png, shared_files, until


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return shared_files(tmp_path_factory)


@pytest.fixture(scope="module")
def server(files):
    options = ("--grpc-port", "0", "--max-batch-size", "8", "--max-grpc-bytes", "200000", "--no-adapt")
    with Server("--model", files.model, "--stats", files.stats, *options) as server:
        yield server.until_ready()


def address(server: Server) -> str:
    until(lambda: "over gRPC on" in server.log, "the gRPC port")
    found = re.search(r"serving \S+ over gRPC on (\S+)", server.log)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(address(server)) as client:
        yield client


def tensor(values: np.ndarray, datatype: str) -> triton.InferInput:
    given = triton.InferInput("images", list(values.shape), datatype)
    given.set_data_from_numpy(values)
    return given


def test_messages_are_those_of_tritonclient():
    """Every message and field that is declared here has the number, type and label that Triton's own has."""
    for name in MESSAGES:
        ours, theirs = message(name).DESCRIPTOR, service_pb2.DESCRIPTOR
        parts = name.split(".")
        theirs = theirs.message_types_by_name[parts[0]]
        for part in parts[1:]:
            theirs = theirs.nested_types_by_name[part]
        for field in ours.fields:
            other = theirs.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
            if field.message_type is not None:
                assert field.message_type.full_name == other.message_type.full_name
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert set(METHODS) <= set(service.methods_by_name)


def test_tritonclient_finds_all_that_it_asks_for(client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("small") and client.is_model_ready("small", "1")
    assert client.get_server_metadata().name == "cafe-tta"
    metadata = client.get_model_metadata("small", as_json=True)
    assert metadata["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": ["-1", "-1", "-1", "3"]}]
    assert [output["name"] for output in metadata["outputs"]] == ["logits", "label", "probability", "class_name"]
    (model,) = client.get_model_repository_index().models
    assert (model.name, model.version, model.state) == ("small", "1", "READY")


@pytest.mark.parametrize("datatype", ["UINT8", "FP32", "BYTES"])
@pytest.mark.parametrize("packed", [None, "gzip"])
def test_every_kind_of_tensor_is_answered(client, files, datatype, packed):
    pixels = digits(5)
    values = {
        "UINT8": pixels,
        "FP32": PREPROCESSING(pixels).numpy(),
        "BYTES": np.array([png(image) for image in pixels], object),
    }[datatype]
    answer = client.infer(
        "small", [tensor(values, datatype)], request_id="mine", parameters={"camera": "gate", "adapt": False},
        compression_algorithm=packed,
    )  # fmt: skip
    expected = files.logits(pixels)
    np.testing.assert_allclose(answer.as_numpy("logits"), expected, atol=1e-3)
    assert answer.as_numpy("label").tolist() == expected.argmax(1).tolist()
    response = answer.get_response()
    assert (response.id, response.model_name) == ("mine", "small")
    assert response.parameters["model_version"].int64_param == 0
    assert response.parameters["adapting"].bool_param is False


def test_typed_contents_are_read_too(server, files):
    """What clients other than tritonclient send: numbers in the message instead of raw bytes."""
    import grpc

    pixels = digits(2)
    request = message("ModelInferRequest")(model_name="small")
    request.inputs.add(name="images", datatype="UINT8", shape=pixels.shape).contents.uint_contents.extend(
        pixels.ravel()
    )
    floats = message("ModelInferRequest")(model_name="small")
    prepared = PREPROCESSING(pixels).numpy()
    floats.inputs.add(name="images", datatype="FP32", shape=prepared.shape).contents.fp32_contents.extend(
        prepared.ravel()
    )
    coded = message("ModelInferRequest")(model_name="small")
    coded.inputs.add(name="images", datatype="BYTES", shape=[2]).contents.bytes_contents.extend(map(png, pixels))
    with grpc.insecure_channel(address(server)) as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=lambda sent: sent.SerializeToString(),
            response_deserializer=message("ModelInferResponse").FromString,
        )
        for sent in (request, floats, coded):
            answer, call = infer.with_call(sent, metadata=(("x-request-id", "trace-7"),))
            logits = np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(answer.outputs[0].shape)
            np.testing.assert_allclose(logits, files.logits(pixels), atol=1e-3)
            assert ("x-request-id", "trace-7") in call.trailing_metadata()


def test_classification_and_names_of_classes(client, files):
    outputs = [triton.InferRequestedOutput("logits", class_count=2), triton.InferRequestedOutput("class_name")]
    answer = client.infer("small", [tensor(digits(2), "UINT8")], outputs=outputs)
    expected = files.logits(digits(2))
    best = [text.decode().split(":")[1] for text in answer.as_numpy("logits")[:, 0]]
    assert best == [str(label) for label in expected.argmax(1)]
    assert [name.decode() for name in answer.as_numpy("class_name")] == best


@pytest.mark.parametrize(
    ("values", "datatype", "model", "options", "code", "text"),
    [
        (np.zeros((1, 8, 8, 3), np.uint8), "UINT8", "other", {}, "NOT_FOUND", "no model 'other'"),
        (np.zeros((1, 8, 8, 3), np.uint8), "UINT8", "small", {"model_version": "2"}, "NOT_FOUND", "no version '2'"),
        (np.zeros((9, 8, 8, 3), np.uint8), "UINT8", "small", {}, "INVALID_ARGUMENT", "expected 1 to 8 images"),
        (np.zeros((1, 8, 8), np.uint8), "UINT8", "small", {}, "INVALID_ARGUMENT", "expected UINT8 pixels of shape"),
        (np.full((1, 3, 32, 32), np.nan, np.float32), "FP32", "small", {}, "INVALID_ARGUMENT", "expected finite"),
        (np.array([b"x"], object), "BYTES", "small", {}, "INVALID_ARGUMENT", "image 0 is no JPEG or PNG"),
        (np.zeros((8, 100, 100, 3), np.uint8), "UINT8", "small", {}, "RESOURCE_EXHAUSTED", "larger than max"),
        (np.zeros((8, 100, 100, 3), np.uint8), "UINT8", "small", {"compression_algorithm": "gzip"},
         "RESOURCE_EXHAUSTED", ""),  # a small bomb
        (np.zeros((1, 8, 8, 3), np.uint8), "UINT8", "small", {"parameters": {"camera": 7}}, "INVALID_ARGUMENT",
         "expected the parameter camera to be a text"),
        (np.zeros((1, 8, 8, 3), np.uint8), "UINT8", "small", {"timeout": 1}, "DEADLINE_EXCEEDED", ""),
    ],
)  # fmt: skip
def test_errors_have_codes_and_the_texts_of_http(client, values, datatype, model, options, code, text):
    with pytest.raises(InferenceServerException) as raised:
        client.infer(model, [tensor(values, datatype)], **options)
    assert raised.value.status() == f"StatusCode.{code}" and text.lower() in raised.value.message().lower()
    assert client.is_server_ready()


def test_requests_over_grpc_and_http_share_batches_metrics_and_cameras(server, client):
    def send(number: int) -> None:
        for _ in range(10):
            client.infer("small", [tensor(digits(1), "UINT8")], parameters={"camera": f"rpc-{number}"})

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    with server.client() as http:
        before = float(re.search(r'^cafe_tta_images_total\{model="small"\} (\S+)$', http.get("/metrics").text, re.M)[1])
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = float(re.search(r'^cafe_tta_images_total\{model="small"\} (\S+)$', http.get("/metrics").text, re.M)[1])
        assert after - before == 40
        names = {f"rpc-{number}" for number in range(4)}
        until(lambda: names <= {c["camera"] for c in http.get("/api/status").json()["cameras"]}, "their cameras")


def test_port_in_use_is_one_line(server, files):
    port = address(server).rpartition(":")[2]
    command = [sys.executable, "-m", "cafe_tta", "serve", "--model", files.model, "--source", files.stats]
    done = subprocess.run([*command, "--port", "0", "--grpc-port", port], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert (
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another `grpc_port`"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_signal_to_end_answers_what_was_let_in(files):
    with Server("--model", files.model, "--stats", files.stats, "--grpc-port", "0", "--no-adapt",
                "--max-queue-delay-microseconds", "1000000") as server:  # fmt: skip
        server.until_ready()
        with triton.InferenceServerClient(address(server)) as client:
            answers: list = []
            waiting = threading.Thread(
                target=lambda: answers.append(client.infer("small", [tensor(digits(1), "UINT8")]))
            )
            waiting.start()
            with server.client() as http:
                until(lambda: 'cafe_tta_waiting_images{model="small"} 1.0' in http.get("/metrics").text, "the request")
            assert server.stop() == 0
            waiting.join()
    np.testing.assert_allclose(answers[0].as_numpy("logits"), files.logits(digits(1)), atol=1e-3)
