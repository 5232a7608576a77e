"""The messages of the Open Inference Protocol's gRPC service, declared here once, without generated code.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_grpc.proto

They live in a pool of their own, so that a process may also import another package that declares them.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
_MODEL = {"name": "1 string", "version": "2 string"}
_TENSOR = {"name": "1 string", "datatype": "2 string", "shape": "3 int64*"}

# A field is its number, its type, and a * where it is repeated; a type with a dot is nested in its message. The fields
# after `oneof` exclude each other.
MESSAGES: Mapping[str, Mapping[str, str]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": "1 bool"},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": "1 bool"},
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": {"ready": "1 bool"},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": "1 string", "version": "2 string", "extensions": "3 string*"},
    "ModelMetadataRequest": _MODEL,
    "ModelMetadataResponse.TensorMetadata": _TENSOR,
    "ModelMetadataResponse": {
        "name": "1 string",
        "versions": "2 string*",
        "platform": "3 string",
        "inputs": "4 ModelMetadataResponse.TensorMetadata*",
        "outputs": "5 ModelMetadataResponse.TensorMetadata*",
    },
    "InferParameter": {
        "oneof": "parameter_choice",
        "bool_param": "1 bool",
        "int64_param": "2 int64",
        "string_param": "3 string",
        "double_param": "4 double",
        "uint64_param": "5 uint64",
    },
    "InferTensorContents": {
        "bool_contents": "1 bool*",
        "int_contents": "2 int32*",
        "int64_contents": "3 int64*",
        "uint_contents": "4 uint32*",
        "uint64_contents": "5 uint64*",
        "fp32_contents": "6 float*",
        "fp64_contents": "7 double*",
        "bytes_contents": "8 bytes*",
    },
    "ModelInferRequest.InferInputTensor": _TENSOR | {"parameters": "4 map", "contents": "5 InferTensorContents"},
    "ModelInferRequest.InferRequestedOutputTensor": {"name": "1 string", "parameters": "2 map"},
    "ModelInferRequest": {
        "model_name": "1 string",
        "model_version": "2 string",
        "id": "3 string",
        "parameters": "4 map",
        "inputs": "5 ModelInferRequest.InferInputTensor*",
        "outputs": "6 ModelInferRequest.InferRequestedOutputTensor*",
        "raw_input_contents": "7 bytes*",
    },
    "ModelInferResponse.InferOutputTensor": _TENSOR | {"parameters": "4 map", "contents": "5 InferTensorContents"},
    "ModelInferResponse": {
        "model_name": "1 string",
        "model_version": "2 string",
        "id": "3 string",
        "parameters": "4 map",
        "outputs": "5 ModelInferResponse.InferOutputTensor*",
        "raw_output_contents": "6 bytes*",
    },
    "RepositoryIndexRequest": {"repository_name": "1 string", "ready": "2 bool"},
    "RepositoryIndexResponse.ModelIndex": {
        "name": "1 string",
        "version": "2 string",
        "state": "3 string",
        "reason": "4 string",
    },
    "RepositoryIndexResponse": {"models": "1 RepositoryIndexResponse.ModelIndex*"},
}


def _declared() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="cafe_tta/open_inference.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, Any] = {}
    for name in sorted(MESSAGES, key=lambda name: name.count(".")):  # a message before those that are nested in it
        outer, _, inner = name.rpartition(".")
        made[name] = (made[outer].nested_type if outer else file.message_type).add(name=inner or name)
        for field, declared in MESSAGES[name].items():
            if field == "oneof":
                made[name].oneof_decl.add(name=declared)
            else:
                _add_field(made[name], name, field, declared, "oneof" in MESSAGES[name])
    return file


def _add_field(message: Any, owner: str, name: str, declared: str, exclusive: bool) -> None:
    number, kind = declared.split()
    proto = descriptor_pb2.FieldDescriptorProto
    repeated, kind = kind.endswith("*") or kind == "map", kind.rstrip("*")
    label = proto.LABEL_REPEATED if repeated else proto.LABEL_OPTIONAL
    field = message.field.add(name=name, number=int(number), label=label)
    if kind == "map":
        kind = f"{owner}.{_add_map_entry(message, name)}"
    if kind[0].isupper():
        field.type, field.type_name = proto.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = proto.Type.Value(f"TYPE_{kind.upper()}")
    if exclusive:
        field.oneof_index = 0


def _add_map_entry(message: Any, name: str) -> str:
    """What a map from names to parameters is made of, as protoc has it."""
    entry = message.nested_type.add(name=f"{name.title()}Entry")
    entry.options.map_entry = True
    _add_field(entry, "", "key", "1 string", False)
    _add_field(entry, "", "value", "2 InferParameter", False)
    return str(entry.name)


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_declared())


def message(name: str) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
