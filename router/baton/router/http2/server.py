"""Serves generated servicers over HTTP/2: finds the method, runs it, and turns what it raises into a status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from baton.router.http2 import status
from baton.router.http2.connection import Connection
from baton.router.http2.context import Aborted, CallContext
from baton.router.http2.stream import BadMessage, Stream
from baton.rpc.address import split_address
from baton.rpc.errors import DeadlineExceeded, InternalError, InvalidRequest, NoCapacity, ServiceError, Unavailable
from baton.rpc.server import Service

_log = logging.getLogger(__name__)

Quick = Callable[[Any], Any]


class Http2Server:
    """A server for the lifetime of an `async with`; `port` is known inside it. The same surface as RpcServer's.

    `quick`: methods, by their full path, that answer at once. They are called without a task of their own, and take
    the request alone.
    Health is NOT_SERVING until `set_ready(True)`. A port in use raises Unavailable, naming the address.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[Service],
        grace_seconds: float = 2.0,
        quick: Mapping[str, Quick] | None = None,
        field: str = "listen",
    ) -> None:
        self._address = address
        self._field = field
        self._services = services
        self._grace_seconds = grace_seconds
        self._quick = quick or {}
        self._health = health.aio.HealthServicer()
        self._handlers: dict[str, Any] = {}
        self._connections: set[Connection] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        for service in self._services:
            service.register(service.servicer, self)  # type: ignore[arg-type]
        names = [service.name for service in self._services]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self)  # type: ignore[arg-type]
        told = [*names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(  # type: ignore[no-untyped-call]
            ReflectionServicer(told), self
        )
        host, port = split_address(self._address, self._field)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: Connection(self), host.strip("[]"), port, reuse_port=False, backlog=1024
            )
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {self._field}={self._address}: is the port in use?", field=self._field
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]
        await self.set_ready(False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._health.enter_graceful_shutdown()
        self._server.close()
        for connection in list(self._connections):
            connection.go_away()
        tasks = [one.task for connection in self._connections for one in connection.streams.values() if one.task]
        if tasks:
            await asyncio.wait(tasks, timeout=self._grace_seconds)
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()

    async def set_ready(self, ready: bool) -> None:
        """Tells grpc.health.v1 whether this process takes new work."""
        serving = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *(service.name for service in self._services)):
            await self._health.set(name, serving)

    # What generated code asks of a server.

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The same methods come by add_registered_method_handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """A service's methods."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    # What connections tell.

    def on_open(self, connection: Connection) -> None:
        """A client came."""
        self._connections.add(connection)

    def on_lost(self, connection: Connection) -> None:
        """A client is gone."""
        self._connections.discard(connection)

    def on_reset(self, stream: Stream) -> None:
        """Nobody waits for the call any more."""
        if stream.task is not None:
            stream.task.cancel()

    def on_bad_message(self, connection: Connection, stream: Stream, problem: BadMessage) -> None:
        """A message cannot be taken."""
        if stream.task is not None:
            stream.task.cancel()
        self._fail(connection, stream, NoCapacity(str(problem)))

    def on_message(self, connection: Connection, stream: Stream) -> None:
        """Begins a call as soon as it can be."""
        if stream.task is not None:
            return
        path = stream.fields.get(":path", "")
        handler = self._handlers.get(path)
        if handler is None or stream.fields.get(":method") != "POST":
            tail = status.trailers(grpc.StatusCode.UNIMPLEMENTED, f"no method {path}", alone=True)
            connection.finish(stream, b"", None, tail)
            return
        if not handler.request_streaming:
            if not stream.closed_there:
                return
            if len(stream.messages) != 1:
                self._fail(connection, stream, InvalidRequest(f"{path} takes one message, not {len(stream.messages)}"))
                return
            quick = self._quick.get(path)
            if quick is not None:
                self._answer(connection, stream, path, handler, quick)
                return
        stream.task = asyncio.get_running_loop().create_task(self._run(connection, stream, path, handler))

    # Calls.

    def _answer(self, connection: Connection, stream: Stream, path: str, handler: Any, quick: Quick) -> None:
        try:
            response = quick(_decoded(handler, stream.messages.popleft(), path))
            message = handler.response_serializer(response)
        except Exception as error:
            self._fail(connection, stream, _as_service_error(error, path))
        else:
            connection.finish(stream, status.RESPONSE_HEADERS, message, status.OK_TRAILERS)

    async def _run(self, connection: Connection, stream: Stream, path: str, handler: Any) -> None:
        loop = asyncio.get_running_loop()
        try:
            seconds = status.timeout_seconds(stream.fields.get("grpc-timeout", ""))
        except ValueError as error:
            self._fail(connection, stream, InvalidRequest(str(error)))
            return
        deadline = None if seconds is None else loop.time() + seconds

        async def write(message: Any) -> None:
            connection.begin(stream, status.RESPONSE_HEADERS)
            await connection.send(stream, handler.response_serializer(message))

        def time_left() -> float | None:
            return None if deadline is None else max(0.0, deadline - loop.time())

        context = CallContext(stream, write, connection.peer, time_left)
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._call(connection, stream, path, handler, context, write)
            except TimeoutError:
                raise DeadlineExceeded(f"{path} took longer than the caller's {seconds} s") from None
        except Aborted as aborted:
            tail = status.trailers(aborted.code, aborted.details, aborted.metadata, alone=not stream.started)
            connection.end(stream, tail)
        except Exception as error:
            self._fail(connection, stream, _as_service_error(error, path))

    async def _call(
        self,
        connection: Connection,
        stream: Stream,
        path: str,
        handler: Any,
        context: CallContext,
        write: Callable[[Any], Any],
    ) -> None:
        if handler.request_streaming:
            request: Any = _requests(stream, handler, path)
        else:
            request = _decoded(handler, stream.messages.popleft(), path)
        if not handler.response_streaming:
            behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary
            message = handler.response_serializer(await behavior(request, context))
            connection.begin(stream, status.RESPONSE_HEADERS)
            await connection.send(stream, message)
        else:
            behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
            responses = behavior(request, context)
            if hasattr(responses, "__aiter__"):
                async for response in responses:
                    await write(response)
            else:
                await responses
            connection.begin(stream, status.RESPONSE_HEADERS)
        connection.end(stream, status.OK_TRAILERS)

    def _fail(self, connection: Connection, stream: Stream, error: ServiceError) -> None:
        connection.end(stream, status.error_trailers(error, alone=not stream.started))


async def _requests(stream: Stream, handler: Any, path: str) -> AsyncIterator[Any]:
    while (data := await stream.next_message()) is not None:
        yield _decoded(handler, data, path)


def _decoded(handler: Any, data: bytes, path: str) -> Any:
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        raise InvalidRequest(f"the request of {path} cannot be decoded: {error}") from error


def _as_service_error(error: Exception, path: str) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, NotImplementedError):
        return _Unimplemented(f"{path} is not implemented")
    _log.exception("unexpected error in %s", path, exc_info=error)
    return InternalError(f"unexpected {type(error).__name__} in {path}; see the service's log")


class _Unimplemented(ServiceError):
    """A method that the servicer does not have."""

    code = grpc.StatusCode.UNIMPLEMENTED
