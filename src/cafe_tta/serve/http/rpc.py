"""The Open Inference Protocol's gRPC service, beside HTTP: the same model, queue, limits and errors."""

import logging
import re
import struct
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from cafe_tta._version import __version__
from cafe_tta.serve.events import request_id
from cafe_tta.serve.http.app import EXTENSIONS, App
from cafe_tta.serve.http.body import Lease
from cafe_tta.serve.http.inference import QUICK
from cafe_tta.serve.http.middleware import REQUEST_ID, ServeError
from cafe_tta.serve.http.protocol import (
    VERSION,
    InferRequest,
    RequestedOutput,
    Result,
    Signature,
    answer_parameters,
    output_tensor,
    read_request,
)
from cafe_tta.serve.http.rpc_messages import PACKAGE, message

log = logging.getLogger(__name__)

SERVICE = f"{PACKAGE}.GRPCInferenceService"
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
Handler = Callable[[Any, Any], Awaitable[Any]]


async def start(app: App) -> tuple[grpc.aio.Server, int]:
    """A running gRPC server on the event loop of the HTTP server, and its port."""
    settings = app.settings
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", settings.max_grpc_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a port in use is an error
        ],
        maximum_concurrent_rpcs=settings.max_pending_bytes // settings.max_grpc_bytes,
    )
    service = Service(app)
    handlers = {name: _handler(name, getattr(service, _snake(name))) for name in METHODS}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        port = server.add_insecure_port(f"{host}:{settings.grpc_port}")
    except RuntimeError:
        raise ValueError(
            f"cannot listen on {settings.host} port {settings.grpc_port}; choose another `grpc_port`"
        ) from None
    await server.start()
    return server, port


class Service:
    """The methods of the service; those of gRPC's names in snake case."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def server_live(self, request: Any, context: Any) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def server_ready(self, request: Any, context: Any) -> Any:
        return message("ServerReadyResponse")(ready=await _succeeds(self.app.require_ready()))

    async def model_ready(self, request: Any, context: Any) -> Any:
        inference = self.app.versioned(request.name, request.version or VERSION)
        return message("ModelReadyResponse")(ready=await _succeeds(inference.require_ready()))

    async def server_metadata(self, request: Any, context: Any) -> Any:
        return message("ServerMetadataResponse")(name="cafe-tta", version=__version__, extensions=EXTENSIONS)

    async def model_metadata(self, request: Any, context: Any) -> Any:
        known = self.app.versioned(request.name, request.version or VERSION).signature.metadata()
        return message("ModelMetadataResponse")(
            **{name: value for name, value in known.items() if name != "parameters"}
        )

    async def repository_index(self, request: Any, context: Any) -> Any:
        models = [model for model in await self.app.index() if model["state"] == "READY" or not request.ready]
        return message("RepositoryIndexResponse")(models=models)

    async def model_infer(self, request: Any, context: Any) -> Any:
        inference = self.app.model(request.model_name)
        with inference.counted() as count, Lease(inference.pending) as lease:
            inference.admit(request.model_version or VERSION)
            size = request.ByteSize()
            lease.grow_to(size)
            signature = inference.signature
            if size <= QUICK:
                parsed = read_message(request, signature)
            else:
                parsed = await inference.decode(lambda: read_message(request, signature))
            authorization = str(dict(context.invocation_metadata() or ()).get("authorization", ""))
            result = await inference.answer(parsed, authorization, lease, size, count.started)
            count.images = parsed.count
            return write_message(parsed, result, signature)


async def _succeeds(check: Awaitable[None]) -> bool:
    try:
        await check
    except ServeError:
        return False
    return True


METHODS = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "RepositoryIndex",
)


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _handler(name: str, handle: Handler) -> grpc.RpcMethodHandler:
    async def guarded(request: Any, context: Any) -> Any:
        """Gives the request an id, and answers errors as HTTP does, with gRPC's codes."""
        given = dict(context.invocation_metadata() or ()).get("x-request-id", "")
        own = given if isinstance(given, str) and re.fullmatch(REQUEST_ID, given, re.ASCII) else uuid.uuid4().hex[:16]
        request_id.set(own)
        context.set_trailing_metadata((("x-request-id", own),))
        try:
            return await handle(request, context)
        except ServeError as error:
            retry = () if error.retry_after is None else (("retry-after", str(error.retry_after)),)
            context.set_trailing_metadata((("x-request-id", own), *retry))
            await context.abort(CODES.get(error.status, grpc.StatusCode.INTERNAL), error.text)
        except Exception as error:
            log.exception("%s failed", name)
            text = f"internal error: {type(error).__name__}; the server's log says more"
            await context.abort(grpc.StatusCode.INTERNAL, text)

    return grpc.unary_unary_rpc_method_handler(
        guarded,
        request_deserializer=message(f"{name}Request").FromString,
        response_serializer=message(f"{name}Response").SerializeToString,
    )


# Messages as the protocol's JSON


def read_message(request: Any, signature: Signature) -> InferRequest:
    """The request in a message: the protocol's JSON has the same content, and the same checks."""
    if request.raw_input_contents and len(request.raw_input_contents) != len(request.inputs):
        raise ServeError(400, "expected one of raw_input_contents for each input")
    binary = request.raw_input_contents[0] if len(request.raw_input_contents) == 1 else None
    inputs = []
    for tensor in request.inputs:
        read, binary = _input(tensor, binary)
        inputs.append(read)
    outputs = [{"name": output.name, "parameters": _plain(output.parameters)} for output in request.outputs]
    parameters = _plain(request.parameters) | {"binary_data_output": True}
    content = {"id": request.id or None, "parameters": parameters, "inputs": inputs, "outputs": outputs}
    return read_request(content, memoryview(binary or b""), signature)


def _input(tensor: Any, binary: bytes | None) -> tuple[dict[str, Any], bytes | None]:
    """A tensor as JSON, and its bytes; typed contents are read as the numbers of JSON are."""
    read = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    parameters = _plain(tensor.parameters)
    if binary is None and tensor.datatype == "BYTES":
        files = tensor.contents.bytes_contents
        binary = b"".join(struct.pack("<I", len(file)) + file for file in files)
    if binary is not None:
        return read | {"parameters": parameters | {"binary_data_size": len(binary)}}, binary
    typed = tensor.contents.uint_contents if tensor.datatype == "UINT8" else tensor.contents.fp32_contents
    data = list(typed)
    if tensor.datatype == "FP32" and not all(map(_is_finite, data)):
        raise ServeError(400, "expected finite numbers in fp32_contents, but got others")
    return read | {"parameters": parameters, "data": data}, None


def _is_finite(value: float) -> bool:
    return value - value == 0.0


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: (value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
    return {name: getattr(value, chosen) for name, (value, chosen) in values.items() if chosen is not None}


def write_message(request: InferRequest, result: Result, signature: Signature) -> Any:
    """The answer to a request as a message; its tensors are raw bytes."""
    response = message("ModelInferResponse")(
        model_name=signature.name,
        model_version=VERSION,
        id=request.id or "",
        parameters=_typed(answer_parameters(result)),
    )
    for wanted in request.outputs:
        raw = RequestedOutput(wanted.name, binary=True, classification=wanted.classification)
        described, blob = output_tensor(raw, result, signature)
        response.outputs.add(**{name: described[name] for name in ("name", "datatype", "shape")})
        response.raw_output_contents.append(blob)
    return response


def _typed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    return {name: message("InferParameter")(**{kinds[type(value)]: value}) for name, value in parameters.items()}
