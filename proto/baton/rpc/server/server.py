"""A gRPC server with health, reflection, and errors turned into statuses."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.rpc.channel import SERVER_OPTIONS
from baton.rpc.errors import InternalError, InvalidRequest, ServiceError, Unavailable, abort_with
from baton.rpc.identity.check import Check, IdentityCheck
from baton.rpc.server.field_count import MAX_FIELDS, UNCOUNTED_BYTES, TooManyFields, check_fields
from baton.rpc.server.reflection import add_reflection
from baton.rpc.tls.credentials import EdgeTls, Tls

_log = logging.getLogger(__name__)

_FIRST_MESSAGE_SECONDS = 1.0

# A name of grpc.health.v1 that is SERVING for as long as the process answers, whether it takes work or not.
LIVENESS = "liveness"

Servicer = Any  # any generated servicer
Context = grpc.aio.ServicerContext[Any, Any]


class Service(NamedTuple):
    """One gRPC service to offer."""

    name: str  # fully qualified, as in the .proto
    servicer: Servicer
    register: Callable[[Servicer, grpc.aio.Server], None]  # the generated add_..._to_server


class RpcServer:
    """A server for the lifetime of an `async with`; `port` is set inside it.

    Health is NOT_SERVING until `set_ready(True)`. A port in use raises Unavailable, naming the address and `field`, its
    setting. With Tls, clients present certificates, and the table of identities decides which calls they may make; with
    EdgeTls they present none. Errors that `interceptors` raise become statuses too. `options`: gRPC's own, in addition
    to those of every server.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[Service],
        grace_seconds: float = 2.0,
        field: str = "listen",
        tls: Tls | EdgeTls | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        options: Mapping[str, int] | None = None,
    ) -> None:
        self._options = tuple({**dict(SERVER_OPTIONS), **(options or {})}.items())
        self._interceptors = interceptors
        self._address = address
        self._field = field
        self._services = services
        self._grace_seconds = grace_seconds
        self._tls = tls
        self._health = health.aio.HealthServicer()
        self.port = 0

    async def __aenter__(self) -> Self:
        check = IdentityCheck(self._tls.identity.fleet, self._tls.refusals) if isinstance(self._tls, Tls) else None
        self._server = grpc.aio.server(interceptors=(_Interceptor(check), *self._interceptors), options=self._options)
        for service in self._services:
            service.register(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [service.name for service in self._services]
        add_reflection(self._server, [*names, health.SERVICE_NAME])
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(self._address)
            else:
                self.port = self._server.add_secure_port(self._address, self._tls.server_credentials())
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen on {self._field}={self._address}: is the port in use?", field=self._field
            ) from error
        await self.set_ready(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._grace_seconds)

    async def set_ready(self, ready: bool) -> None:
        """Sets whether grpc.health.v1 reports SERVING."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *(service.name for service in self._services)):
            await self._health.set(name, status)


class _Interceptor(grpc.aio.ServerInterceptor):
    """Checks the caller, if a check is given, and turns a ServiceError of a handler into its status.

    Other exceptions become INTERNAL and are logged.
    """

    def __init__(self, check: IdentityCheck | None) -> None:
        self._check = check
        # By method: as it was registered, which is one object for a server's life, and as it is served.
        self._served: dict[str, tuple[Any, grpc.RpcMethodHandler[Any, Any]]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        known = self._served.get(method)
        if known is None or known[0] is not handler:
            known = self._served[method] = handler, self._serving(handler, method)
        return known[1]

    def _serving(self, handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        check = self._check.of(method) if self._check is not None else None
        if handler.request_deserializer and not handler.request_streaming:
            handler = handler._replace(request_deserializer=_forgiving(handler.request_deserializer))
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary, method, check), **codec)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream, method, check), **codec)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(_unary(handler.stream_unary, method, check), **codec)
        return grpc.stream_stream_rpc_method_handler(_stream(handler.stream_stream, method, check), **codec)


class _Undecodable(NamedTuple):
    """Stands in for a request whose bytes are no such message: only a handler can answer with a status of ours."""

    reason: str


class _Large(NamedTuple):
    """Stands in for a large request, whose fields are counted beside the event loop before it is parsed."""

    data: bytes
    deserialize: Callable[[bytes], Any]
    message: Descriptor

    async def read(self) -> Any:
        try:
            await asyncio.to_thread(check_fields, self.data, self.message)
        except TooManyFields:
            return _Undecodable(f"it has more than {MAX_FIELDS} fields in all its messages")
        return self.deserialize(self.data)


def _forgiving(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    message = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    def decode(data: bytes) -> Any:
        if message is None or len(data) <= UNCOUNTED_BYTES:
            return parse(data)
        return _Large(data, parse, message)

    return decode


async def _checked(request: Any, context: Context, method: str, check: Check | None) -> Any:
    """Returns the request of a client that may call the method."""
    if check is not None:
        try:
            check(context)
        except ServiceError:
            await _read_first(request)
            raise
    if isinstance(request, _Large):
        request = await request.read()
    if isinstance(request, _Undecodable):
        raise InvalidRequest(f"the request of {method} cannot be decoded: {request.reason}")
    return request


async def _read_first(request: Any) -> None:
    """Reads the first message of a streaming client. If it arrived after the call ended, gRPC would lose the error."""
    if isinstance(request, AsyncIterator):
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(_FIRST_MESSAGE_SECONDS):
                await anext(request)


def _unary(behavior: Callable[..., Any], method: str, check: Check | None) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        try:
            request = await _checked(request, context, method, check)
            return await behavior(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError, NotImplementedError):
            raise
        except Exception as error:
            failure = _as_service_error(error, method)
        request = None
        return await abort_with(context, _without_frames(failure))

    return call


def _stream(behavior: Callable[..., Any], method: str, check: Check | None) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(behavior):  # one that writes to its context, as health's Watch
        return _unary(behavior, method, check)

    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            request = await _checked(request, context, method, check)
            async for response in behavior(request, context):
                yield response
            return
        except (asyncio.CancelledError, grpc.aio.AbortError, NotImplementedError):
            raise
        except Exception as error:
            failure = _as_service_error(error, method)
        request = None
        await abort_with(context, _without_frames(failure))

    return call


def _without_frames(error: ServiceError) -> ServiceError:
    """Returns the error without what it was raised from.

    A call keeps what aborted it, and that the frames it went through: what they hold would stay until the next
    garbage collection.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _as_service_error(error: Exception, method: str) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    _log.exception("unexpected error in %s", method)
    return InternalError(f"unexpected {type(error).__name__} in {method}; see the service's log")
