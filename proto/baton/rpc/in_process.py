"""gRPC services within one event loop: stubs call servicers without a socket. Messages are serialized as on a wire."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import grpc
from grpc_status import rpc_status

from baton.rpc.errors import InternalError, ServiceError, Unsupported, status_of

_log = logging.getLogger(__name__)

_MAX_UNREAD = 16  # messages of a client's stream; its next write waits until one is read

Codec = Callable[[Any], Any]
Handler = Any  # grpc.RpcMethodHandler; its attributes have no types


class InProcessServer:
    """Holds the handlers of services. Generated `add_..._to_server` functions take it for a server."""

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Adds the handlers of a service."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Handler]) -> None:
        """Does nothing: the same handlers are added as generic ones."""

    def handler_of(self, method: str) -> Handler:
        """Returns the handler of `/package.Service/Method`. Raises Unsupported."""
        details = cast(grpc.HandlerCallDetails, SimpleNamespace(method=method, invocation_metadata=()))
        for service in self._handlers:
            handler = service.service(details)
            if handler is not None:
                return handler
        raise Unsupported(f"no service in this process has the method {method}")

    def connect(self) -> grpc.aio.Channel:
        """Returns a channel for stubs of the same event loop."""
        return cast(grpc.aio.Channel, _Channel(self))


class _Channel:
    """The part of grpc.aio.Channel that stubs and their callers use."""

    def __init__(self, server: InProcessServer) -> None:
        self._server = server
        self._streams: set[_Stream] = set()

    def unary_unary(
        self, method: str, request_serializer: Codec, response_deserializer: Codec, _registered_method: bool = False
    ) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, timeout: float | None = None) -> Any:
            handler = self._server.handler_of(method)
            context = _Context()
            try:
                async with asyncio.timeout(timeout):
                    message = _decoded(handler, request_serializer(request))
                    response = await handler.unary_unary(message, context)
            except TimeoutError:
                details = f"no answer in {timeout:g} s"
                raise _rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, details) from None
            except Exception as error:
                raise _translated(error, method) from error
            finally:
                context.end()
            return response_deserializer(_encoded(handler, response))

        return call

    def unary_stream(
        self, method: str, request_serializer: Codec, response_deserializer: Codec, _registered_method: bool = False
    ) -> Callable[..., _Stream]:
        def call(request: Any) -> _Stream:
            handler = self._server.handler_of(method)
            message = _decoded(handler, request_serializer(request))
            return self._stream(
                method, handler, request_serializer, response_deserializer, handler.unary_stream, message
            )

        return call

    def stream_stream(
        self, method: str, request_serializer: Codec, response_deserializer: Codec, _registered_method: bool = False
    ) -> Callable[..., _Stream]:
        def call() -> _Stream:
            handler = self._server.handler_of(method)
            return self._stream(method, handler, request_serializer, response_deserializer, handler.stream_stream, None)

        return call

    async def close(self) -> None:
        """Cancels the streams that have not ended."""
        for stream in list(self._streams):
            stream.cancel()

    def _stream(
        self, method: str, handler: Handler, encode: Codec, decode: Codec, behavior: Any, request: Any
    ) -> _Stream:
        stream = _Stream(method, handler, encode, decode, behavior, request)
        self._streams.add(stream)
        stream.context.add_done_callback(lambda _: self._streams.discard(stream))
        return stream


class _Context:
    """The part of grpc.aio.ServicerContext that handlers use."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], None]] = []
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        """Calls the callbacks. Idempotent."""
        callbacks, self._callbacks, self._ended = self._callbacks, [], True
        for callback in callbacks:
            callback(self)


class _Stream:
    """The part of grpc.aio.StreamStreamCall that clients use. Iterate over it once."""

    def __init__(
        self, method: str, handler: Handler, encode: Codec, decode: Codec, behavior: Any, request: Any
    ) -> None:
        self.context = _Context()
        self._method = method
        self._handler = handler
        self._encode = encode
        self._decode = decode
        self._behavior = behavior
        self._request = request  # None: the client writes requests
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_UNREAD)

    async def write(self, message: Any) -> None:
        """Sends a request. Raises InvalidStateError after the end."""
        if self.context.ended:
            raise asyncio.InvalidStateError("the call has ended")
        await self._requests.put(self._encode(message))

    async def done_writing(self) -> None:
        """Ends the client's requests."""
        await self._requests.put(None)

    def cancel(self) -> bool:
        """Ends the call. Returns whether it was running."""
        was_running = not self.context.ended
        self.context.end()
        return was_running

    async def __aiter__(self) -> AsyncIterator[Any]:
        source = self._written() if self._request is None else self._request
        try:
            async for response in self._behavior(source, self.context):
                yield self._decode(_encoded(self._handler, response))
        except Exception as error:
            raise _translated(error, self._method) from error
        finally:
            self.context.end()

    async def _written(self) -> AsyncIterator[Any]:
        while (message := await self._requests.get()) is not None:
            yield _decoded(self._handler, message)


def _decoded(handler: Handler, data: bytes) -> Any:
    decode = handler.request_deserializer
    return data if decode is None else decode(data)


def _encoded(handler: Handler, response: Any) -> bytes:
    encode = handler.response_serializer
    return response if encode is None else encode(response)  # type: ignore[no-any-return]


def _translated(error: Exception, method: str) -> grpc.aio.AioRpcError:
    """Returns the error that a client of a real server receives."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error
    if not isinstance(error, ServiceError):
        _log.exception("%s failed", method)
        error = InternalError(f"{method} failed: unexpected {type(error).__name__}")
    status = rpc_status.to_status(status_of(error))
    return _rpc_error(status.code, status.details, grpc.aio.Metadata(*status.trailing_metadata))


def _rpc_error(code: grpc.StatusCode, details: str, trailing: grpc.aio.Metadata | None = None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing or grpc.aio.Metadata(), details=details)
