"""The Open Inference Protocol v2, with binary tensors: requests as arrays, answers as bytes. No web framework here.

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

from cafe_tta.models import Preprocessing
from cafe_tta.serve.cameras import LONGEST_NAME
from cafe_tta.serve.errors import ServeError, bad_request

INPUT = "images"
OUTPUTS = ("logits", "label", "probability")  # all of them, where a request does not choose
ON_DEMAND = ("class_name",)
VERSION = "1"  # of the served model; the states that it adapts to are told in the answer's parameters
CAMERA = "default"
MAX_ID = 1024  # characters
_ITEM_SIZES = {"UINT8": 1, "FP32": 4}

Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.float32]


@dataclass(frozen=True)
class Signature:
    """What is served, and what its requests may be."""

    name: str
    num_classes: int
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None = None
    max_images: int = 128
    max_json_bytes: int = 16 * 2**20

    def metadata(self) -> dict[str, Any]:
        """As `GET /v2/models/NAME` tells."""
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

    def class_names(self) -> Sequence[str]:
        return self.classes or [str(number) for number in range(self.num_classes)]

    def expected(self) -> str:
        size = self.preprocessing.size
        return (
            f"UINT8 pixels of shape [n, height, width, 3], FP32 of shape [n, 3, {size}, {size}] (preprocessed), "
            "or BYTES of shape [n] (JPEG or PNG files)"
        )


@dataclass(frozen=True)
class RequestedOutput:
    name: str
    binary: bool
    classification: int = 0  # so many best classes instead of the numbers


@dataclass(frozen=True)
class InferRequest:
    """A request that is well formed. Its images may still turn out to be unreadable."""

    id: str | None
    pixels: Pixels | None  # uint8 (N, H, W, 3) or float32 (N, 3, S, S)
    files: tuple[bytes, ...]  # or JPEG and PNG files
    count: int
    camera: str
    adapt: bool
    timeout: float | None  # seconds in the queue
    outputs: tuple[RequestedOutput, ...]


@dataclass(frozen=True)
class Result:
    """What the model said about the images of a request."""

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
    parameters = _mapping(request.get("parameters"), "parameters")
    request_id = _text(request.get("id"), "id", MAX_ID) if request.get("id") is not None else None
    tensor = _only_input(request.get("inputs"))
    pixels, files, count = _read_input(tensor, memoryview(body)[length:], signature)
    camera = parameters.get("camera", CAMERA)
    camera = _text(camera, "the parameter camera", LONGEST_NAME)
    if not camera or not camera.isprintable():
        raise bad_request(f"expected the parameter camera to be a name, but got {camera!r}")
    adapt = parameters.get("adapt", True)
    if not isinstance(adapt, bool):
        raise bad_request(f"expected the parameter adapt to be true or false, but got {_shown(adapt)}")
    return InferRequest(
        request_id, pixels, files, count, camera, adapt, _timeout(parameters), _outputs(request, parameters, signature)
    )


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise bad_request("expected a JSON object, but its lists are nested too deeply") from None
    except ValueError as error:  # also UnicodeDecodeError
        raise bad_request(f"expected a JSON object, but it cannot be read: {error}"[:300]) from None
    if not isinstance(found, dict):
        raise bad_request(f"expected a JSON object with `inputs`, but got {_shown(found)}")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number; images must be finite")


def _only_input(inputs: Any) -> Mapping[str, Any]:
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        what = f"{len(inputs)} of them" if isinstance(inputs, list) else _shown(inputs)
        raise bad_request(f"expected `inputs` to be a list of one input, {INPUT!r}, but got {what}")
    if inputs[0].get("name") != INPUT:
        raise bad_request(f"expected the input {INPUT!r}, but got {_shown(inputs[0].get('name'))}")
    return inputs[0]


def _read_input(
    tensor: Mapping[str, Any], binary: memoryview, signature: Signature
) -> tuple[Pixels | None, tuple[bytes, ...], int]:
    datatype, shape = tensor.get("datatype"), _shape(tensor.get("shape"))
    _check_shape(datatype, shape, signature)
    parameters = _mapping(tensor.get("parameters"), "parameters of the input")
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
            f"but got {_shown(size)}"
        )
    elif "data" in tensor:
        raise bad_request("expected `data` or binary_data_size, but got both")
    count = shape[0]
    if datatype == "BYTES":
        files = _json_files(tensor["data"], count) if size is None else _binary_files(binary, count)
        return None, files, count
    if size is None:
        return _json_pixels(tensor["data"], str(datatype), shape), (), count
    wanted = math.prod(shape) * _ITEM_SIZES[str(datatype)]
    if wanted != size:
        raise bad_request(f"{datatype} of shape {shape} takes {wanted} bytes, but binary_data_size is {size}")
    return np.frombuffer(binary, np.uint8 if datatype == "UINT8" else "<f4").reshape(shape), (), count


def _shape(shape: Any) -> list[int]:
    if not isinstance(shape, list) or not all(type(side) is int and 0 <= side < 2**31 for side in shape):
        raise bad_request(f"expected `shape` to be a list of whole numbers, but got {_shown(shape)}")
    return shape


def _check_shape(datatype: Any, shape: list[int], signature: Signature) -> None:
    side = signature.preprocessing.size
    if datatype == "UINT8":
        good = len(shape) == 4 and shape[3] == 3 and 0 not in shape[1:]
    elif datatype == "FP32":
        good = len(shape) == 4 and shape[1:] == [3, side, side]
    else:
        good = datatype == "BYTES" and (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1))
    if not good:
        raise bad_request(f"expected {signature.expected()}, but got {_shown(datatype)} of shape {_shown(shape)}")
    if not 1 <= shape[0] <= signature.max_images:
        raise bad_request(f"expected 1 to {signature.max_images} images a request (max_batch_size), but got {shape[0]}")


def _json_pixels(data: Any, datatype: str, shape: list[int]) -> Pixels:
    if not isinstance(data, list):
        raise bad_request(f"expected `data` to be a list of numbers, but got {_shown(data)}")
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
        raise bad_request(f"expected `data` of BYTES to be a list of {count} texts in base64, but got {_shown(data)}")
    try:
        return tuple(base64.b64decode(text, validate=True) for text in data)
    except (binascii.Error, ValueError):
        raise bad_request("expected `data` of BYTES to be JPEG or PNG files in base64, but it is not base64") from None


def _binary_files(binary: memoryview, count: int) -> tuple[bytes, ...]:
    files, place = [], 0
    for number in range(count):
        if place + 4 > len(binary):
            break
        (length,) = struct.unpack_from("<I", binary, place)
        place += 4
        if place + length > len(binary):
            raise bad_request(f"element {number} of the BYTES says it has {length} bytes, but fewer follow")
        files.append(bytes(binary[place : place + length]))
        place += length
    if len(files) != count or place != len(binary):
        raise bad_request(
            f"expected {count} elements of BYTES, each a length of 4 bytes and so many bytes, but the data "
            f"{'end too early' if len(files) != count else 'go on after them'}"
        )
    return tuple(files)


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
        raise bad_request(f"expected binary_data_output to be true or false, but got {_shown(binary)}")
    outputs = request.get("outputs")
    if outputs is None or outputs == []:
        return tuple(RequestedOutput(name, binary) for name in OUTPUTS)
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise bad_request(f"expected `outputs` to be a list of objects with a `name`, but got {_shown(outputs)}")
    chosen = []
    for output in outputs:
        name = output.get("name")
        known = (*OUTPUTS, *ON_DEMAND)
        if name not in known:
            raise bad_request(f"no output {_shown(name)}; choose from: {', '.join(known)}")
        own = _mapping(output.get("parameters"), f"parameters of the output {name}")
        wanted, classes = own.get("binary_data", binary), own.get("classification", 0)
        if not isinstance(wanted, bool):
            raise bad_request(f"expected binary_data to be true or false, but got {_shown(wanted)}")
        if type(classes) is not int or classes < 0 or (classes and name not in ("logits", "probability")):
            raise bad_request("expected classification to be a number of classes, of the output logits or probability")
        chosen.append(RequestedOutput(name, wanted, min(classes, signature.num_classes)))
    names = [output.name for output in chosen]
    if len(set(names)) != len(names):
        raise bad_request(f"expected every output once, but got {', '.join(names)}"[:300])
    return tuple(chosen)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_request(f"expected the {what} to be an object, but got {_shown(value)}")
    return value


def _text(value: Any, what: str, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise bad_request(f"expected {what} to be a text of at most {longest} characters, but got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
