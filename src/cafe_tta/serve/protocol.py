"""The Open Inference Protocol v2, with binary tensors: requests as arrays, answers as bytes. No web framework here.

https://github.com/kserve/open-inference-protocol and Triton's extensions binary_data and classification.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cafe_tta.models import Preprocessing
from cafe_tta.serve.cameras import LONGEST_NAME
from cafe_tta.serve.errors import ServeError, bad_request
from cafe_tta.serve.tensors import Content, Pixels, mapping, read_input, shown

INPUT = "images"
OUTPUTS = ("logits", "label", "probability")  # all of them, where a request does not choose
ON_DEMAND = ("class_name",)
VERSION = "1"  # of the served model; the states that it adapts to are told in the answer's parameters
CAMERA = "default"
MAX_ID = 1024  # characters


@dataclass(frozen=True)
class Signature:
    """What is served, and what its requests may be."""

    name: str
    num_classes: int
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None = None
    max_images: int = 128
    max_json_bytes: int = 16 * 2**20
    device: torch.device | str = "cpu"  # where the model is

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

    @property
    def image_bytes(self) -> int:
        """What an image takes while it waits."""
        return 4 * 3 * self.preprocessing.size**2

    def class_names(self) -> Sequence[str]:
        return self.classes or [str(number) for number in range(self.num_classes)]


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
    files: tuple[Content, ...]  # or JPEG and PNG files
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
    parameters = mapping(request.get("parameters"), "parameters")
    request_id = _text(request.get("id"), "id", MAX_ID) if request.get("id") is not None else None
    tensor = _only_input(request.get("inputs"))
    pixels, files, count = read_input(
        tensor, memoryview(body)[length:], signature.preprocessing.size, signature.max_images
    )
    camera = parameters.get("camera", CAMERA)
    camera = _text(camera, "the parameter camera", LONGEST_NAME)
    if not camera or not camera.isprintable():
        raise bad_request(f"expected the parameter camera to be a name, but got {camera!r}")
    adapt = parameters.get("adapt", True)
    if not isinstance(adapt, bool):
        raise bad_request(f"expected the parameter adapt to be true or false, but got {shown(adapt)}")
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
        raise bad_request(f"expected a JSON object with `inputs`, but got {shown(found)}")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number; images must be finite")


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
