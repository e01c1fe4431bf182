"""One HTTP/2 stream that carries one call: what came, what may be sent. Knows no handler."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

PREFIX_BYTES = 5  # of a gRPC message: a flag and its length


class BadMessage(Exception):
    """A message that cannot be taken: too large, compressed, or cut off."""


class Stream:
    """A call's two directions."""

    __slots__ = ("_buffer", "arrived", "closed_here", "closed_there", "fields", "id", "messages", "num_unacked",
                 "send_window", "started", "task", "wake_sender")  # fmt: skip

    def __init__(self, stream_id: int, fields: Mapping[str, str], send_window: int) -> None:
        self.id = stream_id
        self.fields = fields  # the request's headers
        self.send_window = send_window
        self.messages: deque[bytes] = deque()
        self.num_unacked = 0  # bytes received that count against the connection's window
        self.started = False  # response headers are out
        self.closed_here = False
        self.closed_there = False  # the client said all that it has to say
        self.task: asyncio.Task[None] | None = None
        self.arrived: asyncio.Event | None = None  # made by who waits
        self.wake_sender: asyncio.Event | None = None
        self._buffer = bytearray()

    def receive(self, data: bytes, ends: bool, max_message_bytes: int) -> None:
        """Takes a piece of the request. BadMessage."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= PREFIX_BYTES:
            length = int.from_bytes(buffer[1:PREFIX_BYTES], "big")
            if buffer[0]:
                raise BadMessage("the message is compressed; this server takes none")
            if length > max_message_bytes:
                raise BadMessage(f"the message has {length} bytes; at most {max_message_bytes} are taken")
            if len(buffer) < PREFIX_BYTES + length:
                break
            self.messages.append(bytes(buffer[PREFIX_BYTES : PREFIX_BYTES + length]))
            del buffer[: PREFIX_BYTES + length]
        if ends:
            self.closed_there = True
            if buffer:
                raise BadMessage("the last message is cut off")
        if self.arrived is not None:
            self.arrived.set()

    async def next_message(self) -> bytes | None:
        """The next one. None: there is none any more."""
        while not self.messages:
            if self.closed_there:
                return None
            self.arrived = asyncio.Event()
            await self.arrived.wait()
        return self.messages.popleft()
