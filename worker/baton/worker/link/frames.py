"""Frames between a worker's gRPC front and its engine, over a socket pair. Knows their kinds, not their contents."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, cast

_HEADER = struct.Struct("<IIB")  # payload bytes, channel, kind
_READ_BYTES = 1 << 18
# With more unsent output than this, the engine waits for the front.
_MAX_PENDING_BYTES = 8 << 20
_CLOSE_SECONDS = 1.0


class Kind(enum.IntEnum):
    """The kind of a frame. Within a kind, the channel numbers one stream or one call."""

    # front to engine
    START = 1  # JSON: the configuration; the first frame
    STOP = 2  # ends the loop
    GENERATE_OPEN = 3
    GENERATE = 4  # GenerateStreamRequest one way; GenerateStreamResponse the other, possibly with multi-token columns
    GENERATE_CLOSE = 5
    CALL = 6  # method number, then the request of a ControlService method
    PUBLISH_OPEN = 7  # a kvstore replica is ready for the engine's hello
    PUBLISH_CLOSE = 8
    SNAPSHOT_WANTED = 9
    GENERATE_HASHED = 10  # GENERATE after its prompts as the front read them, see prompts
    # engine to front
    READY = 20  # WatchStateResponse: the first state
    FAILED = 21  # google.rpc.Status: why the engine failed
    GENERATE_PLAIN = 22  # GenerateStreamResponse without logprobs: those of one engine may be concatenated
    REPLY = 23  # the response of a call
    REFUSAL = 24  # google.rpc.Status: the error of a call
    STATE = 25  # WatchStateResponse
    PUBLISH = 26  # PublishRequest
    LOG = 27  # JSON: a log record
    SPAN = 28  # JSON: a completed span
    GENERATE_FIRST = 29  # as GENERATE_PLAIN, for requests of which nothing was sent before; may overtake
    GENERATE_LATER = 30  # as GENERATE_PLAIN; the front sends it with the stream's next message or its end
    # both ways: prefill streams from other workers to this one
    PREFILL_OPEN = 40
    PREFILL = 41  # PrefillStreamRequest in, PrefillStreamResponse out
    PREFILL_CLOSE = 42  # google.rpc.Status, or empty
    PREFILL_HASHED = 43  # PREFILL in, after its prompt as the front read it
    # both ways: prefill streams from this worker to others
    PEER_OPEN = 50  # UTF-8: the address
    PEER = 51  # PrefillStreamRequest out, PrefillStreamResponse in
    PEER_CLOSE = 52  # UTF-8: the reason


class Frame(NamedTuple):
    """One message."""

    kind: int
    channel: int
    payload: bytes


class LinkClosed(Exception):
    """The other end of the link is closed."""


def encode_frame(kind: int, channel: int, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), channel, kind) + payload


class FrameParser:
    """Splits a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = _HEADER.size

    def feed(self, data: bytes) -> list[Frame]:
        """Returns the frames that `data` completes."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        available, start = len(buffer), 0
        if available < self._wanted:
            return frames
        while available - start >= _HEADER.size:
            size, channel, kind = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + size
            if end > available:
                self._wanted = end - start
                break
            frames.append(Frame(kind, channel, bytes(buffer[start + _HEADER.size : end])))
            start = end
        else:
            self._wanted = _HEADER.size
        del buffer[:start]
        return frames


class EngineLink:
    """The engine's end of the link: blocking, for one thread. Only `post` and `wake` are for any thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._parser = FrameParser()
        self._outgoing: list[bytes] = []
        self._unsent = memoryview(b"")  # whole frames, except the first
        self._lock = threading.Lock()  # guards _unsent and writes to the socket
        self._wake_lock = threading.Lock()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._poll = select.poll()
        self._poll.register(self._wake_reader, select.POLLIN)
        self._poll.register(sock, select.POLLIN)

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Queues a frame for the next flush."""
        self._outgoing.append(_HEADER.pack(len(payload), channel, kind))
        self._outgoing.append(payload)

    def post(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Sends a frame at once from any thread, even while the engine thread computes.

        Drops it if the front is gone.
        """
        with contextlib.suppress(LinkClosed), self._lock:
            if self._sock.fileno() >= 0:
                self._unsent = memoryview(b"".join((self._unsent, encode_frame(kind, channel, payload))))
                self._write()
        if self._unsent:
            self.wake()  # the engine thread sends the rest

    def wake(self) -> None:
        """Ends a wait in `receive`, now or the next one. Thread-safe."""
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # full: a wake-up is pending
            if self._wake_writer >= 0:
                os.write(self._wake_writer, b"\0")

    def flush(self) -> None:
        """Writes queued frames. Waits only if the front is megabytes behind."""
        if self._outgoing or self._unsent:
            outgoing, self._outgoing = self._outgoing, []
            with self._lock:
                self._unsent = memoryview(b"".join((self._unsent, *outgoing)))
                self._write()
                while len(self._unsent) > _MAX_PENDING_BYTES:
                    self._wait_writable(None)
                    self._write()

    def receive(self, timeout: float | None, flush: bool = True) -> list[Frame]:
        """Flushes, waits for frames, a wake-up or the timeout, and returns the received frames.

        Raises LinkClosed when the front is gone.
        """
        if flush:
            self.flush()
        self._poll.modify(self._sock, select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN)
        ready = self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        frames: list[Frame] = []
        for descriptor, events in ready:
            if descriptor == self._wake_reader:
                os.read(self._wake_reader, 4096)
            elif events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                frames = self._read()
        return frames

    def close(self) -> None:
        """Sends queued frames while the front reads them, for a limited time, then closes. Idempotent."""
        if self._sock.fileno() < 0:
            return
        with contextlib.suppress(LinkClosed):
            self.flush()
        with self._lock:
            with contextlib.suppress(LinkClosed):
                deadline = time.monotonic() + _CLOSE_SECONDS
                while self._unsent and time.monotonic() < deadline:
                    self._wait_writable(_CLOSE_SECONDS)
                    self._write()
            self._sock.close()
        with self._wake_lock:
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            self._wake_writer = -1

    def _wait_writable(self, seconds: float | None) -> None:
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        writable.poll(None if seconds is None else seconds * 1000)

    def _read(self) -> list[Frame]:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not data:
            raise LinkClosed("end of stream")
        return self._parser.feed(data)

    def _write(self) -> None:
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                self._unsent = memoryview(b"")
                raise LinkClosed(str(error)) from error
            self._unsent = self._unsent[sent:]


class FrontLink(asyncio.Protocol):
    """The front's end of the link, on an event loop. Frames of one turn of the loop are sent in one write."""

    def __init__(self, on_frame: Callable[[Frame], None], on_closed: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._parser = FrameParser()
        self._outgoing: list[bytes] = []
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.WriteTransport | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(
        cls, sock: socket.socket, on_frame: Callable[[Frame], None], on_closed: Callable[[], None]
    ) -> FrontLink:
        """Creates a link over `sock`, which it owns."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(on_frame, on_closed), sock=sock)
        return link

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Queues a frame. Drops it after the link has closed."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(_HEADER.pack(len(payload), channel, kind))
        self._outgoing.append(payload)

    async def writable(self) -> None:
        """Returns once the engine has received most of what was sent."""
        await self._writable.wait()

    def close(self) -> None:
        """Closes the link; the engine sees the end of the stream."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._parser.feed(data):
            self._on_frame(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._writable.set()
        self._on_closed()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._transport is not None:
            self._transport.write(b"".join(outgoing))
