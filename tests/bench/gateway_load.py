"""Loads on a gateway: streams that last, chats one after the other, and streams that are given up. Knows no gateway."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from bench.http_stream import HttpPool
from bench.serve_client import BenchFailed

_PATH = "/v1/chat/completions"
_CHAT = {"model": "storyteller-7m", "messages": [{"role": "user", "content": "Tell me a story about a dog."}]}
_FIRST_SECONDS = 60.0  # for every stream to have begun
_ANSWER_SECONDS = 60.0
_SETTLE_SECONDS = 0.5


class StreamReader(asyncio.Protocol):
    """Sends a request, and notes when each part of its answer came and how many events were complete by then."""

    def __init__(self, request: bytes, reads: bool = True) -> None:
        self._request = request
        self._reads = reads
        self._first = asyncio.Event()  # an event came, or none will
        self.sent_at = 0.0
        self.arrivals = array("d")
        self.totals = array("I")  # events, of each arrival
        self.num_events = 0
        self.ended = asyncio.Event()  # the whole answer is there, or the connection is not

    async def first(self) -> float:
        """Seconds from the request to the answer's first event. Raises BenchFailed."""
        try:
            async with asyncio.timeout(_FIRST_SECONDS):
                await self._first.wait()
        except TimeoutError:
            raise BenchFailed(f"no event of a stream within {_FIRST_SECONDS:.0f} s") from None
        if not self.num_events:
            raise BenchFailed("a stream ended before its first event")
        return self.arrivals[0] - self.sent_at

    def close(self) -> None:
        """Gives the stream up."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.sent_at = time.perf_counter()
        self._transport.write(self._request)
        if not self._reads:
            self._transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        events = data.count(b"\n\n")
        if not events:
            return
        self.num_events += events
        self.arrivals.append(time.perf_counter())
        self.totals.append(self.num_events)
        self._first.set()
        if data.endswith(b"0\r\n\r\n"):
            self.ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()
        self._first.set()


@dataclass(frozen=True, slots=True)
class Streamed:
    """What came of many streams between two moments."""

    num_tokens: int
    seconds: float
    cpu_seconds: float
    delays: Sequence[float]  # seconds from the worker's frame to the client, of every token


def chat(**fields: Any) -> bytes:
    """The body of a small chat."""
    return json.dumps(_CHAT | fields).encode()


def http_request(body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """The body as a POST."""
    return HttpPool("http://127.0.0.1:1", dict(headers or {})).request("POST", _PATH, body)


async def open_stream(port: int, body: bytes, reads: bool = True) -> StreamReader:
    """A stream of its own connection."""
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: StreamReader(http_request(body), reads), "127.0.0.1", port)
    return reader


async def run_streams(
    port: int, bodies: Sequence[bytes], seconds: float, cpu: Callable[[], float], due: Due | None = None
) -> Streamed:
    """Opens all streams, lets them begin, and watches them for `seconds`."""
    readers = [await open_stream(port, body) for body in bodies]
    try:
        await asyncio.gather(*(reader.first() for reader in readers))
        await asyncio.sleep(_SETTLE_SECONDS)
        begin, begin_cpu = time.perf_counter(), cpu()
        before = [reader.num_events for reader in readers]
        await asyncio.sleep(seconds)
        end, end_cpu = time.perf_counter(), cpu()
        num_tokens = sum(reader.num_events for reader in readers) - sum(before)
    finally:
        for reader in readers:
            reader.close()
    await asyncio.sleep(_SETTLE_SECONDS)
    delays = [] if due is None else [delay for one, reader in enumerate(readers) for delay in due(one, reader, begin)]
    return Streamed(num_tokens, end - begin, end_cpu - begin_cpu, delays)


Due = Callable[[int, StreamReader, float], Sequence[float]]  # delays of a stream's tokens after a moment


def delays_after(reader: StreamReader, begin: float, sent_at: Sequence[float], first_step: int) -> list[float]:
    """Seconds from each token's step to its arrival. The first event of a chat is its role, not a token."""
    delays: list[float] = []
    before = 1
    for arrival, total in zip(reader.arrivals, reader.totals, strict=True):
        if arrival >= begin:
            delays += [arrival - sent_at[first_step + token - 1] for token in range(before, total)]
        before = total
    return delays


async def run_chats(port: int, body: bytes, num_clients: int, seconds: float) -> tuple[int, float]:
    """Chats answered, and the seconds it took: each client sends its next one when the last is answered."""
    begin = time.perf_counter()
    pools = [HttpPool(f"http://127.0.0.1:{port}", {}) for _ in range(num_clients)]

    async def ask(pool: HttpPool) -> int:
        count = 0
        while time.perf_counter() < begin + seconds:
            status, answer = await pool.fetch("POST", _PATH, body, _ANSWER_SECONDS)
            if status != 200:
                raise BenchFailed(f"a chat was answered with {status}: {answer[:200]!r}")
            count += 1
        pool.close()
        return count

    counts = await asyncio.gather(*(ask(pool) for pool in pools))
    return sum(counts), time.perf_counter() - begin


async def cancel_streams(port: int, body: bytes, count: int, in_flight: int) -> None:
    """Opens streams and gives each up at its first event."""
    left = iter(range(count))

    async def one_after_the_other() -> None:
        for _ in left:
            reader = await open_stream(port, body)
            await reader.first()
            reader.close()

    await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
    await asyncio.sleep(_SETTLE_SECONDS)
