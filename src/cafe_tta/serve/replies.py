"""The model's answers as the bodies of the Open Inference Protocol."""

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cafe_tta.serve.protocol import VERSION, InferRequest, RequestedOutput, Result, Signature


def reply(request: InferRequest, result: Result, signature: Signature) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON part where binary data follow it."""
    parameters: dict[str, Any] = {"model_version": result.version, "adapting": result.adapting}
    if result.drift is not None:
        parameters["drift"] = result.drift
    outputs, blobs = [], []
    for wanted in request.outputs:
        described, blob = _output(wanted, result, signature)
        outputs.append(described)
        if blob is not None:
            blobs.append(blob)
    body: dict[str, Any] = {"model_name": signature.name, "model_version": VERSION}
    if request.id is not None:
        body["id"] = request.id
    header = json.dumps(body | {"parameters": parameters, "outputs": outputs}).encode()
    return b"".join((header, *blobs)), len(header) if blobs else None


def _output(wanted: RequestedOutput, result: Result, signature: Signature) -> tuple[dict[str, Any], bytes | None]:
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
