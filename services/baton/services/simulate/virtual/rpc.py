"""gRPC streams between parts of one simulation: messages as bytes, delays, and links that fail.

A link can be stalled (a partition: what is sent arrives when it heals), cut (both ends see the end), or have a tap that
drops, repeats or reorders messages, which real streams do not; the protocols above must notice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import grpc

from baton.rpc.errors import ServiceError
from baton.v1 import index_pb2

_DELAY_SECONDS = 0.0005

Tap = Callable[[bytes], list[bytes]]


class IndexServer(Protocol):
    """A kvstore's servicer."""

    def publish(self, requests: AsyncIterator[index_pb2.PublishRequest], context: Any) -> AsyncIterator[Any]:
        """Serves IndexService.Publish."""

    def watch(self, request: index_pb2.WatchRequest, context: Any) -> AsyncIterator[bytes]:
        """Serves IndexService.Watch."""


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """Returns the error that a call raises."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class Pipe:
    """One direction of a stream."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._messages: deque[bytes] = deque()
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()

    def send(self, message: bytes) -> None:
        """Sends a message: it arrives after the link's delay, or when the link heals."""
        for one in self._link.tap(message) if self._link.tap is not None else (message,):
            self._link.carry(partial(self._arrive, one))

    def end(self, error: BaseException) -> None:
        """Ends the stream after the messages sent before."""
        self._link.carry(lambda: self._fail(error))

    def cut(self, error: BaseException) -> None:
        """Ends the stream at once."""
        self._messages.clear()
        self._fail(error)

    async def receive(self) -> bytes:
        """Returns the next message. Raises the error with which the stream ended."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()

    def _arrive(self, message: bytes) -> None:
        if self._error is None:
            self._messages.append(message)
            self._arrived.set()

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self._arrived.set()


@dataclass
class Link:
    """The way between one client and the kvstore."""

    is_stalled: bool = False
    tap: Tap | None = None  # of what the client is sent, or sends
    calls: list[_Call] = field(default_factory=list)  # calls whose end has not reached the server
    _held: list[Callable[[], None]] = field(default_factory=list)
    _in_transit: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)  # by arrival, in order

    def carry(self, deliver: Callable[[], None]) -> None:
        """Delivers after the delay. Messages wait while the link is stalled."""
        if self.is_stalled:
            self._held.append(deliver)
        else:
            loop = asyncio.get_running_loop()
            self._in_transit.append((loop.time() + _DELAY_SECONDS, deliver))
            if len(self._in_transit) == 1:
                loop.call_at(self._in_transit[0][0], self._arrive)

    def heal(self) -> None:
        """Delivers the messages that waited."""
        self.is_stalled = False
        held, self._held = self._held, []
        for deliver in held:
            self.carry(deliver)

    def _arrive(self) -> None:
        """Delivers in order, which a loop does not ensure for callbacks due at the same time."""
        loop = asyncio.get_running_loop()
        while self._in_transit and self._in_transit[0][0] <= loop.time():
            self._in_transit.popleft()[1]()
        if self._in_transit:
            loop.call_at(self._in_transit[0][0], self._arrive)

    def cut(self) -> None:
        """Ends every stream at both ends. Messages that waited are lost."""
        self._held.clear()
        for call in list(self.calls):
            call.break_off(rpc_error(grpc.StatusCode.UNAVAILABLE, "the connection was cut"))


class _Context:
    """The part of a call's context that servicers use."""

    def peer(self) -> str:
        return "simulated"


class _Call:
    """One stream, as its client sees it."""

    def __init__(self, link: Link, server: IndexServer | None) -> None:
        self.link = link
        self.to_server, self.to_client = Pipe(link), Pipe(link)
        self.server_task: asyncio.Task[None] | None = None
        self._server = server
        link.calls.append(self)

    async def wait_for_connection(self) -> None:
        """Returns when the server is there."""
        while self.link.is_stalled:  # noqa: ASYNC110 - as often as a client would dial
            await asyncio.sleep(0.05)
        if self._server is None:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "connection refused")

    def break_off(self, error: BaseException) -> None:
        """Ends the stream for both."""
        self.to_client.cut(error)
        self._end_server()

    def cancel(self) -> bool:
        """Cancels the call. The server is notified over the link, or when the link is cut."""
        self.to_client.cut(asyncio.CancelledError())
        self.link.carry(self._end_server)
        return True

    def serve(self, responses: AsyncIterator[bytes]) -> None:
        """Runs the server's side."""
        self.server_task = asyncio.get_running_loop().create_task(self._serve(responses))

    def _end_server(self) -> None:
        if self in self.link.calls:
            self.link.calls.remove(self)
        # Once: what a second cancellation interrupts would never end.
        if self.server_task is not None and not self.server_task.cancelling():
            self.server_task.cancel()

    async def _serve(self, responses: AsyncIterator[bytes]) -> None:
        try:
            async for response in responses:
                self.to_client.send(response)
            self.to_client.end(_End())
        except ServiceError as error:
            self.to_client.end(rpc_error(error.code, error.message))
        finally:
            await cast(Any, responses).aclose()


class _End(Exception):
    """The server ended the stream well."""


class PublishCall(_Call):
    """IndexService.Publish, from a worker."""

    async def wait_for_connection(self) -> None:
        await super().wait_for_connection()
        assert self._server is not None, "it was there a moment ago"
        self.serve(self._responses(self._server))

    async def write(self, message: bytes) -> None:
        """Sends a PublishRequest."""
        self.to_server.send(message)

    async def __aiter__(self) -> AsyncIterator[index_pb2.PublishResponse]:
        while True:
            try:
                message = await self.to_client.receive()
            except _End:
                return
            yield index_pb2.PublishResponse.FromString(message)

    async def _responses(self, server: IndexServer) -> AsyncIterator[bytes]:
        async for response in server.publish(self._requests(), _Context()):
            yield response.SerializeToString()

    async def _requests(self) -> AsyncIterator[index_pb2.PublishRequest]:
        while True:
            yield index_pb2.PublishRequest.FromString(await self.to_server.receive())


class WatchCall(_Call):
    """IndexService.Watch, from a router."""

    def __init__(self, link: Link, server: IndexServer | None, request: bytes) -> None:
        super().__init__(link, server)
        self._request = request
        self._is_begun = False

    async def read(self) -> Any:
        """Returns the next WatchResponse, or grpc.aio.EOF."""
        if not self._is_begun:
            await self.wait_for_connection()
            assert self._server is not None, "it was there a moment ago"
            self._is_begun = True
            request = index_pb2.WatchRequest.FromString(self._request)
            self.serve(self._server.watch(request, _Context()))
        try:
            return index_pb2.WatchResponse.FromString(await self.to_client.receive())
        except _End:
            return grpc.aio.EOF


class VirtualChannel:
    """A client's channel to the kvstore, of which `server` is the one that is up now."""

    def __init__(self, link: Link, server: IndexServer | None) -> None:
        self._link = link
        self._server = server
        self._calls: list[_Call] = []

    async def __aenter__(self) -> VirtualChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        for call in self._calls:
            if call in self._link.calls:
                call.cancel()

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], PublishCall]:
        """Returns Publish, the only stream-stream call in use."""

        def begin(*more: Any) -> PublishCall:
            call = PublishCall(self._link, self._server)
            self._calls.append(call)
            return call

        return begin

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[[Any], WatchCall]:
        """Returns Watch, the only unary-stream call in use."""

        def begin(request: Any, **more: Any) -> WatchCall:
            call = WatchCall(self._link, self._server, request.SerializeToString())
            self._calls.append(call)
            return call

        return begin
