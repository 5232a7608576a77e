"""The data of an input: numbers or files, in JSON or in the bytes that follow it."""

import base64
import binascii
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cafe_tta.serve.errors import bad_request

Content = bytes | memoryview
Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
_ITEM_SIZES = {"UINT8": 1, "FP32": 4}


def read_input(
    tensor: Mapping[str, Any], binary: memoryview, side: int, most: int
) -> tuple[Pixels | None, tuple[Content, ...], int]:
    """The images of an input: pixels, or files; and how many. They are `side` wide where they are preprocessed."""
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
    files, place = [], 0
    for number in range(count):
        if place + 4 > len(binary):
            break
        (length,) = struct.unpack_from("<I", binary, place)
        place += 4
        if place + length > len(binary):
            raise bad_request(f"element {number} of the BYTES says it has {length} bytes, but fewer follow")
        files.append(binary[place : place + length])
        place += length
    if len(files) != count or place != len(binary):
        raise bad_request(
            f"expected {count} elements of BYTES, each a length of 4 bytes and so many bytes, but the data "
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
