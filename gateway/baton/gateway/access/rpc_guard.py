"""Authentication for every public gRPC method except health, reflection and future methods included."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health

from baton.gateway.access.credential import keys_in_metadata
from baton.gateway.access.gate import Gate
from baton.gateway.access.identity import Identity, Scope
from baton.rpc.errors import ServiceError
from baton.rpc.server.server import Context

_OPEN_SERVICES = frozenset({health.SERVICE_NAME})
_REFLECTION = "grpc.reflection."


def identity_of(gate: Gate, context: Context) -> Identity:
    """Returns the identity of a call. Raises Unauthenticated, PermissionDenied."""
    return gate.identify(keys_in_metadata(context.invocation_metadata()), Scope.INFERENCE)


def is_open(service: str) -> bool:
    """Returns whether a gRPC service (full name) needs no key."""
    return service in _OPEN_SERVICES


def scope_of(service: str) -> Scope | None:
    """Returns the scope that a service requires; None: any valid key."""
    return None if service.startswith(_REFLECTION) else Scope.INFERENCE


class KeyGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid key. The outer interceptor turns the error into a status."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        service = handler_call_details.method.rpartition("/")[0].removeprefix("/")
        handler = await continuation(handler_call_details)
        if handler is None or is_open(service):
            return handler
        try:
            self._gate.identify(keys_in_metadata(handler_call_details.invocation_metadata), scope_of(service))
        except ServiceError as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: ServiceError) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a method of the same kind that raises the error."""
    codec = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }

    async def answer(_request: Any, _context: Context) -> Any:
        raise error

    async def stream(_request: Any, _context: Context) -> AsyncIterator[Any]:
        raise error
        yield

    kinds = {
        (False, False): (grpc.unary_unary_rpc_method_handler, answer),
        (False, True): (grpc.unary_stream_rpc_method_handler, stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, answer),
        (True, True): (grpc.stream_stream_rpc_method_handler, stream),
    }
    make, behavior = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behavior, **codec)
