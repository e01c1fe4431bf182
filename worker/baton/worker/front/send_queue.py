"""The unsent messages of one gRPC stream: bounded, and merged when the reader lags. Knows no contents."""

from __future__ import annotations

import asyncio
from collections import deque

from baton.rpc.errors import NoCapacity, ServiceError

# A reader this far behind is disconnected: about 1 M tokens.
MAX_BUFFERED_BYTES = 4 << 20
# Some thousand tokens: urgent messages wait until the reader has read them.
_MAX_MERGED_BYTES = 16 << 10


class SendQueue:
    """One task pushes, one task takes, on the same event loop."""

    def __init__(self, max_bytes: int = MAX_BUFFERED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._messages: deque[tuple[bytes, bool]] = deque()
        self._ahead: deque[bytes] = deque()
        self._num_bytes = 0
        self._closed = False
        self._error: ServiceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, message: bytes, mergeable: bool = False, ahead: bool = False, may_wait: bool = False) -> None:
        """Adds a message. The bytes of mergeable messages may be concatenated.

        `ahead`: mergeable, and may overtake all queued messages. `may_wait`: until the next message, or the end.
        """
        if self._closed:
            return
        if ahead:
            self._ahead.append(message)
        else:
            self._messages.append((message, mergeable))
        self._num_bytes += len(message)
        if self._num_bytes > self._max_bytes:
            self._messages.clear()
            self._ahead.clear()
            self.close(NoCapacity(f"the stream was closed: its reader was more than {self._max_bytes} bytes behind"))
        elif not may_wait:
            self._wake()

    def close(self, error: ServiceError | None = None) -> None:
        """Refuses more messages. Queued ones can still be taken. Idempotent: the first error counts."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._wake()

    @property
    def closed(self) -> bool:
        """Whether new messages are dropped."""
        return self._closed

    async def take(self) -> bytes | None:
        """Returns the next message, or several merged. None: the end. Raises the error that closed the queue."""
        while not (self._messages or self._ahead):
            if self._closed:
                if self._error is not None:
                    raise self._error
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._ahead:
            message, mergeable = b"".join(self._ahead), True
            self._ahead.clear()
        else:
            message, mergeable = self._messages.popleft()
        if mergeable and self._messages:
            message = self._merged(message)
        self._num_bytes -= len(message)
        return message

    def _merged(self, message: bytes) -> bytes:
        parts, size = [message], len(message)
        while self._messages and self._messages[0][1] and size < _MAX_MERGED_BYTES:
            part, _ = self._messages.popleft()
            parts.append(part)
            size += len(part)
        return b"".join(parts)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
