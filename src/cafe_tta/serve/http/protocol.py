"""The Open Inference Protocol v2, with binary tensors: requests as images, results as bytes.

https://github.com/kserve/open-inference-protocol and Triton's extensions binary_data and classification.
"""

import base64
import binascii
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cafe_tta.data.folder import decode_image
from cafe_tta.data.imageset import UnreadableImage
from cafe_tta.models import Preprocessing
from cafe_tta.serve.cameras import LONGEST_NAME
from cafe_tta.serve.http.middleware import ServeError, bad_request
from cafe_tta.serve.service import Service

INPUT = "images"
OUTPUTS = ("logits", "label", "probability")  # all of them, where a request does not choose
ON_DEMAND = ("class_name",)
VERSION = "1"  # of the served model; the version of its adapted weights is in the answer's parameters
CAMERA = "default"
MAX_ID = 1024  # characters

FORMATS = ("JPEG", "PNG")
LARGEST = 1e6  # of preprocessed values: beyond it, networks overflow
Content = bytes | memoryview
Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
_ITEM_SIZES = {"UINT8": 1, "FP32": 4}


@dataclass(frozen=True)
class Signature:
    """The served model, and what its requests may be."""

    name: str
    num_classes: int
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None = None
    max_images: int = 128
    max_json_bytes: int = 16 * 2**20
    device: torch.device | str = "cpu"  # where the model is

    @classmethod
    def of(cls, service: Service, preprocessing: Preprocessing) -> "Signature":
        """The signature of a service, with the limits of its settings."""
        settings = service.settings
        return cls(
            service.name,
            service.num_classes,
            preprocessing,
            service.class_names,
            max_images=settings.max_batch_size,
            max_json_bytes=min(settings.max_json_bytes, settings.max_body_bytes),
            device=service.device,
        )

    def metadata(self) -> dict[str, Any]:
        """The answer to `GET /v2/models/NAME`."""
        size = self.preprocessing.size
        outputs = [
            {"name": "logits", "datatype": "FP32", "shape": [-1, self.num_classes]},
            {"name": "label", "datatype": "INT64", "shape": [-1]},
            {"name": "probability", "datatype": "FP32", "shape": [-1]},
            {"name": "class_name", "datatype": "BYTES", "shape": [-1]},
        ]
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": "cafe_tta_pytorch",
            "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, -1, -1, 3]}],
            "outputs": outputs,
            "parameters": {
                "classes": list(self.class_names()),
                "image_size": size,
                "max_images": self.max_images,
                "also_accepted": [
                    {"name": INPUT, "datatype": "FP32", "shape": [-1, 3, size, size]},
                    {"name": INPUT, "datatype": "BYTES", "shape": [-1]},
                ],
            },
        }

    @property
    def image_bytes(self) -> int:
        """Memory of an image while it waits."""
        return 4 * 3 * self.preprocessing.size**2

    def class_names(self) -> Sequence[str]:
        return self.classes or [str(number) for number in range(self.num_classes)]


@dataclass(frozen=True)
class RequestedOutput:
    name: str
    binary: bool
    classification: int = 0  # number of best classes to name, instead of all numbers


@dataclass(frozen=True)
class InferRequest:
    """A request that is well formed. Its images may still turn out to be unreadable."""

    id: str | None
    pixels: Pixels | None  # uint8 (N, H, W, 3) or float32 (N, 3, S, S)
    files: tuple[Content, ...]  # or JPEG and PNG files
    count: int
    camera: str
    adapt: bool
    timeout: float | None  # seconds in the queue
    outputs: tuple[RequestedOutput, ...]


@dataclass(frozen=True)
class Result:
    """The model's answers to the images of a request."""

    logits: npt.NDArray[np.float32]  # (n, C)
    label: npt.NDArray[np.int64]  # (n,)
    probability: npt.NDArray[np.float32]  # (n,)
    version: int
    drift: float | None
    adapting: bool


# Requests


def parse(body: bytearray, header_length: str | None, signature: Signature) -> InferRequest:
    """The request in a body; `header_length` is the header `Inference-Header-Content-Length`."""
    length = len(body)
    if header_length is not None:
        number = header_length.isascii() and header_length.isdigit() and len(header_length) < 20
        if not number or int(header_length) > len(body):
            raise bad_request(
                "expected Inference-Header-Content-Length to be the number of bytes of the JSON part, at most the "
                f"{len(body)} of the body, but got {header_length[:40]!r}"
            )
        length = int(header_length)
    if length > signature.max_json_bytes:
        raise ServeError(
            413,
            f"expected at most {signature.max_json_bytes} bytes of JSON, but got {length}; "
            "send the images as binary data: a hundredth of the work",
        )
    request = _json_object(bytes(memoryview(body)[:length]))
    return read_request(request, memoryview(body)[length:], signature)


def read_request(request: Mapping[str, Any], binary: memoryview, signature: Signature) -> InferRequest:
    """The request in parsed JSON, and in the bytes that follow it."""
    parameters = mapping(request.get("parameters"), "parameters")
    tensor = _only_input(request.get("inputs"))
    pixels, files, count = read_input(tensor, binary, signature.preprocessing.size, signature.max_images)
    outputs = _outputs(request, parameters, signature)
    return _request(request.get("id"), pixels, files, count, parameters, outputs)


def with_files(
    files: tuple[Content, ...], parameters: Mapping[str, Any], outputs: tuple[RequestedOutput, ...]
) -> InferRequest:
    """A request with images that are files; the parameters may hold its id."""
    return _request(parameters.get("id"), None, files, len(files), parameters, outputs)


def _request(
    request_id: Any,
    pixels: Pixels | None,
    files: tuple[Content, ...],
    count: int,
    parameters: Mapping[str, Any],
    outputs: tuple[RequestedOutput, ...],
) -> InferRequest:
    known = None if request_id is None else _text(request_id, "id", MAX_ID)
    camera = _text(parameters.get("camera", CAMERA), "the parameter camera", LONGEST_NAME)
    if not camera or not camera.isprintable():
        raise bad_request(f"expected the parameter camera to be a name, but got {camera!r}")
    adapt = parameters.get("adapt", True)
    if not isinstance(adapt, bool):
        raise bad_request(f"expected the parameter adapt to be true or false, but got {shown(adapt)}")
    return InferRequest(known, pixels, files, count, camera, adapt, _timeout(parameters), outputs)


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise bad_request("expected a JSON object, but its lists are nested too deeply") from None
    except ValueError as error:  # also UnicodeDecodeError
        raise bad_request(f"expected a JSON object, but it cannot be read: {error}"[:300]) from None
    if not isinstance(content, dict):
        raise bad_request(f"expected a JSON object with `inputs`, but got {shown(content)}")
    return content


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number; images must be finite")


def _only_input(inputs: Any) -> Mapping[str, Any]:
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        what = f"{len(inputs)} of them" if isinstance(inputs, list) else shown(inputs)
        raise bad_request(f"expected `inputs` to be a list of one input, {INPUT!r}, but got {what}")
    if inputs[0].get("name") != INPUT:
        raise bad_request(f"expected the input {INPUT!r}, but got {shown(inputs[0].get('name'))}")
    return inputs[0]


def _timeout(parameters: Mapping[str, Any]) -> float | None:
    timeout = parameters.get("timeout")
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 0:
        raise bad_request(f"expected the parameter timeout to be microseconds, a whole number, but got {timeout!r}")
    return min(timeout, 10**12) / 1e6 or None  # 0, as Triton has it: no time-out of its own


def _outputs(
    request: Mapping[str, Any], parameters: Mapping[str, Any], signature: Signature
) -> tuple[RequestedOutput, ...]:
    binary = parameters.get("binary_data_output", False)
    if not isinstance(binary, bool):
        raise bad_request(f"expected binary_data_output to be true or false, but got {shown(binary)}")
    outputs = request.get("outputs")
    if outputs is None or outputs == []:
        return tuple(RequestedOutput(name, binary) for name in OUTPUTS)
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise bad_request(f"expected `outputs` to be a list of objects with a `name`, but got {shown(outputs)}")
    chosen = []
    for output in outputs:
        name = output.get("name")
        known = (*OUTPUTS, *ON_DEMAND)
        if name not in known:
            raise bad_request(f"no output {shown(name)}; choose from: {', '.join(known)}")
        own = mapping(output.get("parameters"), f"parameters of the output {name}")
        wanted, classes = own.get("binary_data", binary), own.get("classification", 0)
        if not isinstance(wanted, bool):
            raise bad_request(f"expected binary_data to be true or false, but got {shown(wanted)}")
        if type(classes) is not int or classes < 0 or (classes and name not in ("logits", "probability")):
            raise bad_request("expected classification to be a number of classes, of the output logits or probability")
        chosen.append(RequestedOutput(name, wanted, min(classes, signature.num_classes)))
    names = [output.name for output in chosen]
    if len(set(names)) != len(names):
        raise bad_request(f"expected every output once, but got {', '.join(names)}"[:300])
    return tuple(chosen)


def _text(value: Any, what: str, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise bad_request(f"expected {what} to be a text of at most {longest} characters, but got {shown(value)}")
    return value


# The data of an input: numbers or files, in JSON or in the bytes that follow it


def read_input(
    tensor: Mapping[str, Any], binary: memoryview, side: int, most: int
) -> tuple[Pixels | None, tuple[Content, ...], int]:
    """The images of an input, as pixels or as files, and their number. Preprocessed images must be `side` wide."""
    datatype, shape = tensor.get("datatype"), _shape(tensor.get("shape"))
    _check_shape(datatype, shape, side, most)
    parameters = mapping(tensor.get("parameters"), "parameters of the input")
    size = parameters.get("binary_data_size")
    if "shared_memory_region" in parameters:
        raise bad_request("shared memory is not supported; send the images in the body")
    if size is None:
        if len(binary):
            raise bad_request(f"{len(binary)} bytes follow the JSON part, but the input has no binary_data_size")
        if "data" not in tensor:
            raise bad_request("the input has neither `data` nor the parameter binary_data_size")
    elif isinstance(size, bool) or not isinstance(size, int) or size != len(binary):
        raise bad_request(
            f"expected binary_data_size to be the number of bytes after the JSON part, {len(binary)}, "
            f"but got {shown(size)}"
        )
    elif "data" in tensor:
        raise bad_request("expected `data` or binary_data_size, but got both")
    count = shape[0]
    if datatype == "BYTES":
        if size is None:
            return None, _json_files(tensor["data"], count), count
        return None, _binary_files(binary, count), count
    if size is None:
        return _json_pixels(tensor["data"], str(datatype), shape), (), count
    wanted = math.prod(shape) * _ITEM_SIZES[str(datatype)]
    if wanted != size:
        raise bad_request(f"{datatype} of shape {shape} takes {wanted} bytes, but binary_data_size is {size}")
    return np.frombuffer(binary, np.uint8 if datatype == "UINT8" else "<f4").reshape(shape), (), count


def _shape(shape: Any) -> list[int]:
    if not isinstance(shape, list) or not all(type(side) is int and 0 <= side < 2**31 for side in shape):
        raise bad_request(f"expected `shape` to be a list of whole numbers, but got {shown(shape)}")
    return shape


def _check_shape(datatype: Any, shape: list[int], side: int, most: int) -> None:
    if datatype == "UINT8":
        good = len(shape) == 4 and shape[3] == 3 and 0 not in shape[1:]
    elif datatype == "FP32":
        good = len(shape) == 4 and shape[1:] == [3, side, side]
    else:
        good = datatype == "BYTES" and (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1))
    if not good:
        raise bad_request(f"expected {_expected(side)}, but got {shown(datatype)} of shape {shown(shape)}")
    if not 1 <= shape[0] <= most:
        raise bad_request(f"expected 1 to {most} images a request (max_batch_size), but got {shape[0]}")


def _json_pixels(data: Any, datatype: str, shape: list[int]) -> Pixels:
    if not isinstance(data, list):
        raise bad_request(f"expected `data` to be a list of numbers, but got {shown(data)}")
    try:
        values = np.asarray(data)
    except (ValueError, OverflowError, TypeError):
        raise bad_request("expected `data` to be a list of numbers, or lists of equal lengths") from None
    if values.dtype.kind not in ("iu" if datatype == "UINT8" else "iuf"):
        wanted = "whole numbers from 0 to 255" if datatype == "UINT8" else "numbers"
        raise bad_request(f"expected `data` of {datatype} to be {wanted}, but got others")
    if values.size != math.prod(shape) or (values.ndim > 1 and list(values.shape) != shape):
        raise bad_request(f"expected {math.prod(shape)} values for shape {shape}, but got {list(values.shape)}")
    if datatype == "UINT8":
        if values.min() < 0 or values.max() > 255:
            raise bad_request("expected `data` of UINT8 to be whole numbers from 0 to 255, but got others")
        return values.astype(np.uint8).reshape(shape)
    with np.errstate(over="ignore"):  # becomes infinite, and is refused as such
        return values.astype(np.float32).reshape(shape)


def _json_files(data: Any, count: int) -> tuple[bytes, ...]:
    if not isinstance(data, list) or len(data) != count or not all(isinstance(text, str) for text in data):
        raise bad_request(f"expected `data` of BYTES to be a list of {count} texts in base64, but got {shown(data)}")
    try:
        return tuple(base64.b64decode(text, validate=True) for text in data)
    except (binascii.Error, ValueError):
        raise bad_request("expected `data` of BYTES to be JPEG or PNG files in base64, but it is not base64") from None


def _binary_files(binary: memoryview, count: int) -> tuple[memoryview, ...]:
    files, offset = [], 0
    for number in range(count):
        if offset + 4 > len(binary):
            break
        (length,) = struct.unpack_from("<I", binary, offset)
        offset += 4
        if offset + length > len(binary):
            raise bad_request(f"element {number} of the BYTES says it has {length} bytes, but fewer follow")
        files.append(binary[offset : offset + length])
        offset += length
    if len(files) != count or offset != len(binary):
        raise bad_request(
            f"expected {count} elements of BYTES, each a length in 4 bytes and then that many bytes, but the data "
            f"{'end too early' if len(files) != count else 'go on after them'}"
        )
    return tuple(files)


def _expected(side: int) -> str:
    return (
        f"UINT8 pixels of shape [n, height, width, 3], FP32 of shape [n, 3, {side}, {side}] (preprocessed), "
        "or BYTES of shape [n] (JPEG or PNG files)"
    )


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_request(f"expected the {what} to be an object, but got {shown(value)}")
    return value


def shown(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


# Images as the classifier wants them: slow work, for threads beside the event loop


def prepare(request: InferRequest, preprocessing: Preprocessing, max_pixels: int) -> Tensor:
    """The images of a request, decoded and preprocessed: float32 (n, 3, S, S)."""
    if request.pixels is None:
        return _decoded(request.files, preprocessing, max_pixels)
    pixels = request.pixels
    if pixels.dtype == np.uint8:
        height, width = pixels.shape[1:3]
        if height * width > max_pixels:
            raise bad_request(f"expected images of at most {max_pixels:,} pixels, but got {width} x {height}")
        return preprocessing(pixels)
    largest = np.abs(pixels).max()
    if not largest <= LARGEST:  # also where it is NaN
        what = "NaN or infinite ones" if not np.isfinite(largest) else f"{largest:g}"
        raise bad_request(f"expected finite, preprocessed values, at most {LARGEST:g}, but got {what}")
    if not pixels.flags.aligned or not pixels.flags.writeable or pixels.dtype != np.float32:
        pixels = np.array(pixels, np.float32)  # the JSON part before them may have any length
    return torch.from_numpy(pixels)


def _decoded(files: tuple[Content, ...], preprocessing: Preprocessing, max_pixels: int) -> Tensor:
    size = preprocessing.size
    images = torch.empty(len(files), 3, size, size)
    for number, content in enumerate(files):  # one after the other: only one is ever held in its full size
        try:
            image = decode_image(content, max_pixels, FORMATS)
        except UnreadableImage as error:
            raise bad_request(f"image {number} is no JPEG or PNG that can be read: {error}") from None
        images[number] = preprocessing(image[None])[0]
    return images


# Replies


def reply(request: InferRequest, result: Result, signature: Signature) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON part where binary data follow it."""
    parameters = answer_parameters(result)
    outputs, blobs = [], []
    for wanted in request.outputs:
        described, blob = output_tensor(wanted, result, signature)
        outputs.append(described)
        if blob is not None:
            blobs.append(blob)
    body: dict[str, Any] = {"model_name": signature.name, "model_version": VERSION}
    if request.id is not None:
        body["id"] = request.id
    header = json.dumps(body | {"parameters": parameters, "outputs": outputs}).encode()
    return b"".join((header, *blobs)), len(header) if blobs else None


def answer_parameters(result: Result) -> dict[str, Any]:
    parameters: dict[str, Any] = {"model_version": result.version, "adapting": result.adapting}
    return parameters if result.drift is None else parameters | {"drift": result.drift}


def output_tensor(wanted: RequestedOutput, result: Result, signature: Signature) -> tuple[dict[str, Any], bytes | None]:
    if wanted.name == "class_name" or wanted.classification:
        texts, shape = _texts(wanted, result, signature)
        described: dict[str, Any] = {"name": wanted.name, "datatype": "BYTES", "shape": shape}
        if not wanted.binary:
            return described | {"data": texts}, None
        blob = b"".join(struct.pack("<I", len(text)) + text for text in (text.encode() for text in texts))
    else:
        values: npt.NDArray[Any] = getattr(result, wanted.name)
        kind = "INT64" if values.dtype == np.int64 else "FP32"
        described = {"name": wanted.name, "datatype": kind, "shape": list(values.shape)}
        if not wanted.binary:
            return described | {"data": values.ravel().tolist()}, None
        blob = np.ascontiguousarray(values, "<i8" if kind == "INT64" else "<f4").tobytes()
    return described | {"parameters": {"binary_data_size": len(blob)}}, blob


def _texts(wanted: RequestedOutput, result: Result, signature: Signature) -> tuple[list[str], list[int]]:
    """Names of classes, or Triton's `value:number:name` of the best ones."""
    names: Sequence[str] = signature.class_names()
    if wanted.name == "class_name":
        return [names[label] for label in result.label], [len(result.label)]
    scores = result.logits if wanted.name == "logits" else probabilities(result.logits)
    best = np.argsort(-scores, axis=1, kind="stable")[:, : wanted.classification]
    texts = [f"{scores[row, k]:f}:{k}:{names[k]}" for row, classes in enumerate(best) for k in classes]
    return texts, list(best.shape)


def probabilities(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Softmax over the classes."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: npt.NDArray[np.float32] = powers / powers.sum(axis=1, keepdims=True)
    return shares
