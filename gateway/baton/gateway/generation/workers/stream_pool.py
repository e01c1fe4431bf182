"""The streams of this gateway process to all workers: opened when needed, closed when idle or silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from baton.gateway.generation.workers.silence_limit import SilenceLimits
from baton.gateway.generation.workers.stream import WorkerStream
from baton.gateway.metrics.counters import GenerationCounters
from baton.rpc.channel import Dial, OpenChannel
from baton.v1 import types_pb2

_SWEEP_SECONDS = 1.0
_TICKS_PER_SILENCE = 6
_MAX_TICK = 1.5  # A tick longer than this multiple shows that this process is delayed, and perhaps its machine.
_AVOID_SECONDS = 3.0  # the time a router needs to detect a lost worker
_PLAIN = Dial()


class WorkerStreams:
    """Keeps one stream per worker for the lifetime of an `async with`."""

    def __init__(
        self,
        counters: GenerationCounters,
        idle_seconds: float = 60.0,
        stall_seconds: float = 120.0,
        silence_seconds: float = 0.3,  # 0: unlimited
        dial: OpenChannel = _PLAIN,
        open_stream: Callable[..., WorkerStream] = WorkerStream,  # takes the arguments of WorkerStream
    ) -> None:
        self._counters = counters
        self._open_stream = open_stream
        self._dial = dial
        self._idle_seconds = idle_seconds
        self._stall_seconds = stall_seconds
        self._tick_seconds = silence_seconds / _TICKS_PER_SILENCE
        self._avoided_since: dict[str, float] = {}  # time of the loss by worker
        self._silence_limits = SilenceLimits()
        self._epochs: dict[str, int] = {}  # epoch of the last stream by worker
        self._streams: dict[tuple[str, str], WorkerStream] = {}
        self._helpers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._helpers = [asyncio.create_task(self._sweep())]
        if self._tick_seconds:
            self._helpers.append(asyncio.create_task(self._count_silence()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for helper in self._helpers:
            helper.cancel()
        for stream in list(self._streams.values()):
            await stream.close()

    @property
    def num_active(self) -> int:
        """Returns the number of requests on all streams."""
        return sum(stream.num_active for stream in self._streams.values())

    def get(self, endpoint: types_pb2.Endpoint) -> WorkerStream:
        """Returns the stream to a worker, opened if there is none."""
        key = (endpoint.worker_id, endpoint.address)
        stream = self._streams.get(key)
        if stream is None or stream.ended:
            silence_factor = self._silence_limits.of(endpoint.worker_id, endpoint.epoch, time.monotonic())
            stream = self._open_stream(
                endpoint.worker_id,
                endpoint.address,
                self._remove,
                self._counters,
                self._dial,
                self._avoid,
                silence_factor,
            )
            self._streams[key] = stream
            self._epochs[endpoint.worker_id] = endpoint.epoch
        return stream

    def avoided(self) -> list[str]:
        """Returns workers that were recently silent, stalled or unreachable, which routers may not know yet."""
        if self._avoided_since:
            oldest = time.monotonic() - _AVOID_SECONDS
            self._avoided_since = {worker_id: at for worker_id, at in self._avoided_since.items() if at > oldest}
        return list(self._avoided_since)

    def _avoid(self, stream: WorkerStream) -> None:
        self._avoided_since[stream.worker_id] = time.monotonic()

    def _remove(self, stream: WorkerStream) -> None:
        key = (stream.worker_id, stream.address)
        if stream.is_silent and stream.has_received:
            self._silence_limits.lost(stream.worker_id, self._epochs[stream.worker_id], time.monotonic())
        if stream.is_silent or stream.was_never_reached:
            self._avoided_since[stream.worker_id] = time.monotonic()
        if self._streams.get(key) is stream:
            del self._streams[key]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                quiet = now - stream.last_used
                if stream.num_active == 0 and quiet > self._idle_seconds:
                    stream.fail("the stream was idle")
                elif stream.num_active > 0 and quiet > self._stall_seconds:
                    stream.fail(f"no frame for {quiet:.0f} s")

    async def _count_silence(self) -> None:
        """Counts the streams' silence in ticks; a late tick does not count."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(self._tick_seconds)
            if loop.time() - began < _MAX_TICK * self._tick_seconds:
                for stream in list(self._streams.values()):
                    stream.tick()
