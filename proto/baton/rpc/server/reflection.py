"""Server reflection in both of its versions: grpc.reflection.v1, and the v1alpha of older clients.

The two differ in their package's name alone, so one servicer answers both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = reflection.SERVICE_NAME
METHOD = "ServerReflectionInfo"

# A larger request is answered as one that asks for nothing: names are short, and any client may send many.
MAX_REQUEST_BYTES = 4096

_FILE = "grpc/reflection/v1/reflection.proto"
_PACKAGE, _ALPHA_PACKAGE = "grpc.reflection.v1", "grpc.reflection.v1alpha"


def add_reflection(server: grpc.aio.Server, services: Collection[str]) -> None:
    """Adds reflection for these services, by their full names, and for reflection itself."""
    servicer = reflection.aio.ReflectionServicer([*services, V1, V1ALPHA], pool=_Pools())
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=_parse,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, {METHOD: handler}) for name in (V1, V1ALPHA))
    )


def _parse(data: bytes) -> Any:
    return reflection_pb2.ServerReflectionRequest.FromString(data if len(data) <= MAX_REQUEST_BYTES else b"")


class _Pools:
    """The process's descriptors and those of reflection v1, under DescriptorPool's names."""

    def __init__(self) -> None:
        self._all = (descriptor_pool.Default(), _v1_descriptors())

    def FindFileByName(self, name: str) -> Any:  # noqa: N802
        return self._first(lambda pool: pool.FindFileByName(name))

    def FindFileContainingSymbol(self, name: str) -> Any:  # noqa: N802
        return self._first(lambda pool: pool.FindFileContainingSymbol(name))

    def FindMessageTypeByName(self, name: str) -> Any:  # noqa: N802
        return self._first(lambda pool: pool.FindMessageTypeByName(name))

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:  # noqa: N802
        return message.file.pool.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:  # noqa: N802
        return message.file.pool.FindAllExtensions(message)

    def _first(self, find: Callable[[DescriptorPool], Any]) -> Any:
        """Returns what the first pool that has it finds. Raises KeyError."""
        *others, last = self._all
        for pool in others:
            try:
                return find(pool)
            except KeyError:
                continue
        return find(last)


def _v1_descriptors() -> DescriptorPool:
    """Returns a pool with the .proto of v1, which no Python package has: that of v1alpha, renamed."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = _FILE, _PACKAGE
    file.ClearField("options")  # packages of generated Java and Go
    typed = [field for message in file.message_type for field in message.field if field.type_name]
    for field in typed:
        field.type_name = field.type_name.replace(_ALPHA_PACKAGE, _PACKAGE)
    for method in (method for service in file.service for method in service.method):
        method.input_type = method.input_type.replace(_ALPHA_PACKAGE, _PACKAGE)
        method.output_type = method.output_type.replace(_ALPHA_PACKAGE, _PACKAGE)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool
