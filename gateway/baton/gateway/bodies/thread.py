"""The threads that parse and validate large requests, so that the event loop stays free. Knows no requests."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from baton.gateway.bodies.remote_reader import REMOTE_BYTES, RemoteReader
from baton.gateway.fairness.fair_threads import FairThreads

T = TypeVar("T")

# Parsing less takes less than a few milliseconds.
INLINE_BYTES = 32 << 10


class BodyThread:
    """One thread parses, since the event loop would wait for two of them; another waits for the reading process.

    `reader` is the reading process, or None to parse large bodies here too.
    """

    def __init__(self, reader: RemoteReader | None = None) -> None:
        self.reader = reader
        self._medium = FairThreads(1, "body")
        self._large = FairThreads(1, "large body")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def run(self, work: Callable[[], T], num_bytes: int, owner: str = "") -> T:
        """Runs `work` on a body of `num_bytes`: small ones at once, larger ones on a thread, with turns by owner."""
        if num_bytes <= INLINE_BYTES:
            return work()
        threads = self._medium if num_bytes <= REMOTE_BYTES else self._large
        return await threads.run(work, owner, num_bytes)

    def close(self) -> None:
        """Ends the threads and the process."""
        self._medium.close()
        self._large.close()
        if self.reader is not None:
            self.reader.close()
