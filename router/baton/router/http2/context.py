"""What a servicer is given beside the request: the part of grpc.aio.ServicerContext that servicers here use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc

from baton.router.http2.stream import Stream

Metadata = Sequence[tuple[str, str | bytes]]


class Aborted(Exception):
    """A servicer ended its call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Metadata) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.metadata = metadata


class CallContext:
    """One call."""

    def __init__(
        self, stream: Stream, write: Callable[[Any], Awaitable[None]], peer: str, time_left: Callable[[], float | None]
    ) -> None:
        self._stream = stream
        self._write = write
        self._peer = peer
        self._time_left = time_left

    async def write(self, message: Any) -> None:
        """Sends a response of a stream."""
        await self._write(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """Ends the call. Always raises."""
        raise Aborted(code, details, trailing_metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        """Generated code calls it before it raises NotImplementedError, which says the same."""

    def set_details(self, details: str) -> None:
        """As set_code."""

    def invocation_metadata(self) -> Metadata:
        """The request's headers but for HTTP/2's own."""
        return tuple((name, value) for name, value in self._stream.fields.items() if not name.startswith(":"))

    def peer(self) -> str:
        """Where the client is."""
        return self._peer

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline. None: there is none."""
        return self._time_left()

    def cancelled(self) -> bool:
        """Whether nobody waits any more."""
        return self._stream.closed_here
