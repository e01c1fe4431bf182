"""Loads on any gateway: single streams, consecutive chats, and streams that clients cancel."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, cast

from baton.services.bench.datasets.source import BenchFailed
from baton.services.bench.serve.http_stream import HttpPool

PATH = "/v1/chat/completions"
_CHAT = {"model": "storyteller-7m", "messages": [{"role": "user", "content": "Tell me a story about a dog."}]}
_FIRST_SECONDS = 60.0  # until every stream has begun
_ANSWER_SECONDS = 120.0
_SETTLE_SECONDS = 0.5


class StreamReader(asyncio.Protocol):
    """Sends a request. Records the times of the first event and of the end."""

    def __init__(self, request: bytes, reads: bool = True) -> None:
        self._request = request
        self._reads = reads
        self._first = asyncio.Event()  # the first event or the end was received
        self._sent_at = 0.0
        self._first_at = 0.0  # 0: not yet
        self.ended = asyncio.Event()  # the whole answer was received, or the connection was lost

    async def first(self) -> float:
        """Returns the seconds from the request to the first event. Raises BenchFailed."""
        try:
            async with asyncio.timeout(_FIRST_SECONDS):
                await self._first.wait()
        except TimeoutError:
            raise BenchFailed(f"no event of a stream within {_FIRST_SECONDS:.0f} s") from None
        if not self._first_at:
            raise BenchFailed("a stream ended before its first event")
        return self._first_at - self._sent_at

    def close(self) -> None:
        """Cancels the stream."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)
        if not self._reads:
            self._transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if not self._first_at and b"\n\n" in data:
            self._first_at = time.perf_counter()
            self._first.set()
        if data.endswith(b"0\r\n\r\n"):
            self.ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()
        self._first.set()


def chat(**fields: Any) -> bytes:
    """Returns the body of a small chat."""
    return json.dumps(_CHAT | fields).encode()


def http_request(body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Returns a POST of the body."""
    return HttpPool("http://127.0.0.1:1", dict(headers or {})).request("POST", PATH, body)


async def open_stream(port: int, body: bytes, reads: bool = True) -> StreamReader:
    """Opens a stream on a new connection."""
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: StreamReader(http_request(body), reads), "127.0.0.1", port)
    return reader


async def run_chats(port: int, body: bytes, num_clients: int, seconds: float) -> tuple[int, float]:
    """Runs chats in a closed loop. Returns the number of answers, and the seconds."""
    begin = time.perf_counter()
    pools = [HttpPool(f"http://127.0.0.1:{port}", {}) for _ in range(num_clients)]

    async def ask(pool: HttpPool) -> int:
        count = 0
        while time.perf_counter() < begin + seconds:
            try:
                status, answer = await pool.fetch("POST", PATH, body, _ANSWER_SECONDS)
            except TimeoutError:
                raise BenchFailed(f"a chat on port {port} had no answer in {_ANSWER_SECONDS:.0f} s") from None
            if status != 200:
                raise BenchFailed(f"a chat was answered with {status}: {answer[:200]!r}")
            count += 1
        pool.close()
        return count

    counts = await asyncio.gather(*(ask(pool) for pool in pools))
    return sum(counts), time.perf_counter() - begin


async def cancel_streams(port: int, body: bytes, count: int, in_flight: int) -> None:
    """Opens streams and cancels each at its first event."""
    left = iter(range(count))

    async def one_after_the_other() -> None:
        for _ in left:
            reader = await open_stream(port, body)
            await reader.first()
            reader.close()

    await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
    await asyncio.sleep(_SETTLE_SECONDS)
