"""The streams to all workers that this gateway process talks to: opened when needed, closed when idle or stuck."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from baton.gateway.counters import GenerationCounters
from baton.gateway.worker_stream import WorkerStream
from baton.rpc.channel import Dial
from baton.v1 import types_pb2

_SWEEP_SECONDS = 1.0
_PLAIN = Dial()


class WorkerStreams:
    """One stream a worker, for the lifetime of an `async with`."""

    def __init__(
        self,
        counters: GenerationCounters,
        idle_seconds: float = 60.0,
        stall_seconds: float = 120.0,
        dial: Dial = _PLAIN,
    ) -> None:
        self._counters = counters
        self._dial = dial
        self._idle_seconds = idle_seconds
        self._stall_seconds = stall_seconds
        self._streams: dict[tuple[str, str], WorkerStream] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._sweeper = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for stream in list(self._streams.values()):
            await stream.close()

    @property
    def num_active(self) -> int:
        """Requests on all streams."""
        return sum(stream.num_active for stream in self._streams.values())

    def get(self, endpoint: types_pb2.Endpoint) -> WorkerStream:
        """The stream to a worker, opened now if there is none."""
        key = (endpoint.worker_id, endpoint.address)
        stream = self._streams.get(key)
        if stream is None or stream.ended:
            stream = WorkerStream(endpoint.worker_id, endpoint.address, self._forget, self._counters, self._dial)
            self._streams[key] = stream
        return stream

    def _forget(self, stream: WorkerStream) -> None:
        key = (stream.worker_id, stream.address)
        if self._streams.get(key) is stream:
            del self._streams[key]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                quiet = now - stream.last_used
                if stream.num_active == 0 and quiet > self._idle_seconds:
                    stream.fail("it was idle")
                elif stream.num_active > 0 and quiet > self._stall_seconds:
                    stream.fail(f"no frame for {quiet:.0f} s")
