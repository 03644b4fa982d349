"""Server reflection, v1 and v1alpha. grpcio ships v1alpha only; v1 is the same on the wire under another name."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

_V1_FILE = "grpc/reflection/v1/reflection.proto"
_V1_SERVICE = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serves reflection for these services and for reflection itself."""
    _describe_v1()
    names = [*service_names, _V1_SERVICE, reflection.SERVICE_NAME]
    servicer = reflection.aio.ReflectionServicer(names)
    for name in (_V1_SERVICE, reflection.SERVICE_NAME):
        handler = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        methods = {"ServerReflectionInfo": handler}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, methods)])


def _describe_v1() -> None:
    """Makes the v1 file known to the descriptor pool, so that the v1 service can be described too."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_V1_FILE)
    except KeyError:
        alpha = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
        pool.AddSerializedFile(_as_v1(alpha).SerializeToString())


def _as_v1(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    file.name, file.package = _V1_FILE, "grpc.reflection.v1"
    for message in file.message_type:
        for field in message.field:
            if field.HasField("type_name"):
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
            method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    return file
