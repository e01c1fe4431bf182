"""Reads many streams in a separate process. The kernel's timestamps are the arrival times of events.

Therefore the reader polls every few milliseconds, and its own delay is not measured. On two cores, a reader that woke
for each event would compete with the gateway. If several events of a stream are read at once, all have the
last one's time.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.gateway.rig import Server
from support.processes.child import Child, ChildFailed

from baton.services.bench.datasets.source import BenchFailed

_FIRST_SECONDS = 120.0  # until every stream has begun
_LAST_SECONDS = 60.0  # until the reader has started and responded
_SETTLE_SECONDS = 0.5
_OPENED_TOGETHER = 32  # with more at once, slow responses of the router would lead to refusals
_READ_BYTES = 64 << 10
_READ_SECONDS = 0.01  # between two rounds over all streams
_SO_TIMESTAMPNS = 35  # on Linux; not defined by Python
_TIMESPEC = struct.Struct("qq")


@dataclass
class Arrivals:
    """The arrival times of one stream's events, and the number of events until then."""

    times: array[float] = field(default_factory=lambda: array("d"))
    totals: array[int] = field(default_factory=lambda: array("I"))

    def delays(self, begin: float, sent_at: Sequence[float], first_step: int) -> Iterable[float]:
        """Returns the seconds from each token's step to its arrival. A chat's first event is its role, not a token."""
        before = 1
        for arrival, total in zip(self.times, self.totals, strict=True):
            if arrival >= begin:
                yield from (arrival - sent_at[first_step + token - 1] for token in range(before, total))
            before = total


@dataclass(frozen=True)
class Watched:
    """The measurements of all streams in one interval."""

    begin: float  # perf_counter
    seconds: float
    num_tokens: int
    cpu_seconds: float  # of the server
    streams: list[Arrivals]


async def watch_streams(server: Server, requests: Sequence[bytes], seconds: float) -> Watched:
    """Opens a stream for each request, waits until all have begun, and measures for `seconds`. Raises BenchFailed."""
    child = Child(_Reader)
    try:
        watched = await asyncio.to_thread(
            child.call,
            "watch",
            server.name,
            server.port,
            server.pid,
            requests,
            seconds,
            seconds=_FIRST_SECONDS + seconds + _LAST_SECONDS,
        )
    except ChildFailed as error:
        raise BenchFailed(f"cannot read the streams of {server.name}: {error}") from error
    finally:
        child.kill()
    assert isinstance(watched, Watched)
    await asyncio.sleep(_SETTLE_SECONDS)
    return watched


class _Reader:
    """The reader, in its own process."""

    def watch(self, name: str, port: int, pid: int, requests: Sequence[bytes], seconds: float) -> Watched:
        return _watch(Server(name, port, pid), requests, seconds)


def _watch(server: Server, requests: Sequence[bytes], seconds: float) -> Watched:
    streams: dict[int, _Stream] = {}
    poll = select.epoll()
    deadline = time.monotonic() + _FIRST_SECONDS
    for number, request in enumerate(requests, 1):
        stream = _Stream(server.port, request)
        poll.register(stream.connection.fileno(), select.EPOLLIN)
        streams[stream.connection.fileno()] = stream
        if number % _OPENED_TOGETHER == 0 or number == len(requests):
            _read(poll, streams, lambda: all(one.num_events for one in streams.values()) or time.monotonic() > deadline)
    if not all(one.num_events for one in streams.values()):
        raise BenchFailed(f"not every stream had an event within {_FIRST_SECONDS:.0f} s")
    begin = time.perf_counter() + _SETTLE_SECONDS
    _read(poll, streams, lambda: time.perf_counter() >= begin)
    before, cpu, begin = _num_events(streams), server.cpu_seconds(), time.perf_counter()
    _read(poll, streams, lambda: time.perf_counter() >= begin + seconds)
    num_tokens, cpu, end = _num_events(streams) - before, server.cpu_seconds() - cpu, time.perf_counter()
    return Watched(begin, end - begin, num_tokens, cpu, [one.arrivals for one in streams.values()])


class _Stream:
    """The stream of one client."""

    def __init__(self, port: int, request: bytes) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.connection.sendall(request)
        self.arrivals = Arrivals()
        self.num_events = 0

    def read(self, clock_offset: float) -> None:
        """Reads available data. `clock_offset` is the performance counter minus the system's clock."""
        data, ancillary, _, _ = self.connection.recvmsg(_READ_BYTES, socket.CMSG_SPACE(_TIMESPEC.size))
        if not data or data.endswith(b"}}"):
            raise BenchFailed(f"a stream ended early: {data[-300:]!r}")
        events = data.count(b"\n\n")
        if events:
            self.num_events += events
            self.arrivals.totals.append(self.num_events)
            self.arrivals.times.append(_stamp(ancillary) + clock_offset)


def _stamp(ancillary: Sequence[tuple[int, int, bytes]]) -> float:
    """Returns the arrival by the system's clock; the current time for first packets, which may have no timestamp."""
    if not ancillary:
        return time.time()
    whole, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
    return float(whole + nanoseconds / 1e9)


def _read(poll: select.epoll, streams: dict[int, _Stream], done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(_READ_SECONDS)
        clock_offset = time.perf_counter() - time.time()
        for number, _ in poll.poll(0, len(streams)):
            streams[number].read(clock_offset)


def _num_events(streams: dict[int, _Stream]) -> int:
    return sum(one.num_events for one in streams.values())
