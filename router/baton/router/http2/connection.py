"""One HTTP/2 connection of a server: frames in, frames out, flow control both ways. Knows no method of any service."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, cast

import hpack

from baton.router.http2 import frames
from baton.router.http2.frames import frame
from baton.router.http2.stream import BadMessage, Stream

_log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
_STREAM_WINDOW = MAX_MESSAGE_BYTES + 65536
_WINDOW = 64 << 20  # of the connection: bytes of calls that are not answered yet
_ACK_BYTES = 1 << 20  # window that is given back in one piece
_MAX_STREAMS = 1000
_MAX_HEADER_BYTES = 16384
_MAX_RESETS = 2000  # that a client may send beyond the calls it lets end
_HEADER_CACHE = 64
_SILENCE_SECONDS = 20.0  # after which a client is asked whether it lives; after twice as long it does not

_SETTINGS = frames.settings(
    {
        frames.SETTINGS_MAX_CONCURRENT_STREAMS: _MAX_STREAMS,
        frames.SETTINGS_INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
        frames.SETTINGS_MAX_HEADER_LIST_SIZE: _MAX_HEADER_BYTES,
    }
)


class Calls(Protocol):
    """What a connection tells of its calls."""

    def on_message(self, connection: Connection, stream: Stream) -> None:
        """A call has a message more, or all of them (`closed_there`)."""

    def on_bad_message(self, connection: Connection, stream: Stream, problem: BadMessage) -> None:
        """A message cannot be taken."""

    def on_reset(self, stream: Stream) -> None:
        """Nobody waits for the call any more."""

    def on_open(self, connection: Connection) -> None:
        """A client came."""

    def on_lost(self, connection: Connection) -> None:
        """The client is gone, and its calls with it."""


class ConnectionFault(Exception):
    """The client broke the protocol; the connection ends."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Connection(asyncio.Protocol):
    """Takes what a client sends; answers are written by whoever serves the calls."""

    def __init__(self, calls: Calls) -> None:
        self.streams: dict[int, Stream] = {}
        self._calls = calls
        self._buffer = bytearray()
        self._decoder = hpack.Decoder(max_header_list_size=_MAX_HEADER_BYTES)
        self._known_blocks: dict[bytes, dict[str, str]] = {}
        self._has_preface = False
        self._headers: tuple[int, bool, bytearray] | None = None  # stream, whether it ends it, block so far
        self._last_stream_id = 0
        self._num_resets = 0
        self._to_ack = 0
        self._send_window = frames.DEFAULT_WINDOW
        self._initial_send_window = frames.DEFAULT_WINDOW
        self._max_frame_bytes = frames.MAX_FRAME_BYTES
        self._writable = asyncio.Event()
        self._writable.set()
        self._closing = False
        self._gathered: list[bytes] | None = None  # what goes out when all frames at hand are read
        self._heard = self._asked = False
        self._watch: asyncio.TimerHandle | None = None

    # What asyncio tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_SETTINGS + frames.window_update(0, _WINDOW - frames.DEFAULT_WINDOW))
        self._watch = asyncio.get_running_loop().call_later(_SILENCE_SECONDS, self._check_silence)
        self._calls.on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        if self._watch is not None:
            self._watch.cancel()
        self._closing = True
        self._writable.set()
        for stream in list(self.streams.values()):
            self._drop(stream)
        self._calls.on_lost(self)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Any piece of the stream of frames."""
        self._heard = True
        self._buffer += data
        self._gathered = []
        try:
            self._read_frames()
        except ConnectionFault as fault:
            self._fail(fault.code, str(fault))
        except ValueError as error:
            self._fail(frames.FRAME_SIZE_ERROR, str(error))
        except hpack.HPACKError as error:
            self._fail(frames.COMPRESSION_ERROR, f"headers cannot be read: {error}")
        finally:
            self._flush()

    # What whoever serves the calls asks.

    @property
    def peer(self) -> str:
        """Where the client is."""
        address = self._transport.get_extra_info("peername") or ("", 0)
        return f"{address[0]}:{address[1]}"

    def finish(self, stream: Stream, head: bytes, message: bytes | None, tail: bytes) -> None:
        """Ends a call whose answer is at most one message, in one write where the client's windows allow it."""
        size = 0 if message is None else len(message) + 5
        if size > min(self._send_window, stream.send_window, self._max_frame_bytes):
            stream.task = asyncio.get_running_loop().create_task(
                self._finish_slowly(stream, head, message or b"", tail)
            )
            return
        if message is None:
            out = frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream.id, head + tail)
        else:
            self._send_window -= size
            out = b"".join(
                (
                    frame(frames.HEADERS, frames.END_HEADERS, stream.id, head),
                    frame(frames.DATA, 0, stream.id, b"\x00" + len(message).to_bytes(4, "big") + message),
                    frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream.id, tail),
                )
            )
        self._write_end(stream, out)

    def begin(self, stream: Stream, head: bytes) -> None:
        """Sends the response's headers, once."""
        if not stream.started and not stream.closed_here:
            stream.started = True
            self._write(frame(frames.HEADERS, frames.END_HEADERS, stream.id, head))

    async def send(self, stream: Stream, message: bytes) -> None:
        """Sends a message as the client's windows allow it."""
        data = b"\x00" + len(message).to_bytes(4, "big") + message
        while data and not stream.closed_here:
            await self._writable.wait()
            room = min(self._send_window, stream.send_window, self._max_frame_bytes)
            if room <= 0:
                stream.wake_sender = asyncio.Event()
                await stream.wake_sender.wait()
                continue
            piece, data = data[:room], data[room:]
            self._send_window -= len(piece)
            stream.send_window -= len(piece)
            self._write(frame(frames.DATA, 0, stream.id, piece))

    def end(self, stream: Stream, tail: bytes) -> None:
        """Sends the trailers."""
        if not stream.closed_here:
            flags = frames.END_HEADERS | frames.END_STREAM
            self._write_end(stream, frame(frames.HEADERS, flags, stream.id, tail))

    def go_away(self) -> None:
        """Takes no new calls; running ones may end."""
        if not self._closing:
            self._closing = True
            self._write(frames.goaway(self._last_stream_id, frames.NO_ERROR))
            if not self.streams:
                self._close()

    def abort(self) -> None:
        """Ends the connection now."""
        self._transport.abort()

    # Frames in.

    def _read_frames(self) -> None:
        buffer, start = self._buffer, 0
        if not self._has_preface:
            if not frames.PREFACE.startswith(buffer[: len(frames.PREFACE)]):
                raise ConnectionFault(frames.PROTOCOL_ERROR, "not HTTP/2")
            if len(buffer) < len(frames.PREFACE):
                return
            self._has_preface, start = True, len(frames.PREFACE)
        while len(buffer) - start >= frames.HEADER_BYTES:
            length = int.from_bytes(buffer[start : start + 3], "big")
            if length > frames.MAX_FRAME_BYTES:
                raise ConnectionFault(frames.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = start + frames.HEADER_BYTES + length
            if len(buffer) < end:
                break
            stream_id = int.from_bytes(buffer[start + 5 : start + 9], "big") & frames.MAX_WINDOW
            payload = bytes(buffer[start + frames.HEADER_BYTES : end])
            self._take(buffer[start + 3], buffer[start + 4], stream_id, payload)
            start = end
        del buffer[:start]

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._headers is not None and (kind, stream_id) != (frames.CONTINUATION, self._headers[0]):
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a header block is interrupted")
        if kind == frames.DATA:
            self._take_data(flags, stream_id, payload)
        elif kind == frames.HEADERS:
            self._take_headers(flags, stream_id, payload)
        elif kind == frames.CONTINUATION:
            self._take_continuation(flags, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._take_window(stream_id, frames.uint31(payload))
        elif kind == frames.RST_STREAM:
            self._take_reset(stream_id)
        elif kind == frames.SETTINGS:
            self._take_settings(flags, payload)
        elif kind == frames.PING:
            if not flags & frames.ACK:
                self._write(frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "clients push nothing")

    def _take_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = _unpadded(flags, payload)
        if flags & frames.HAS_PRIORITY:
            block = block[5:]
        ends = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._open(stream_id, ends, block)
        else:
            self._headers = stream_id, ends, bytearray(block)

    def _take_continuation(self, flags: int, payload: bytes) -> None:
        if self._headers is None:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a continuation of nothing")
        stream_id, ends, block = self._headers
        block += payload
        if len(block) > _MAX_HEADER_BYTES:
            raise ConnectionFault(frames.ENHANCE_YOUR_CALM, f"headers of more than {_MAX_HEADER_BYTES} bytes")
        if flags & frames.END_HEADERS:
            self._headers = None
            self._open(stream_id, ends, bytes(block))

    def _open(self, stream_id: int, ends: bool, block: bytes) -> None:
        # Always decoded, whatever becomes of it: the client's table and ours must stay the same.
        fields = self._fields(block)
        known = self.streams.get(stream_id)
        if known is not None:
            self._receive(known, b"", ends)  # trailers: nobody sends any
            return
        if not stream_id % 2 or stream_id <= self._last_stream_id:
            raise ConnectionFault(frames.PROTOCOL_ERROR, f"stream {stream_id} was used before, or is not a client's")
        if self._closing or len(self.streams) >= _MAX_STREAMS:
            self._write(frames.rst_stream(stream_id, frames.REFUSED_STREAM))
            return
        self._last_stream_id = stream_id
        stream = self.streams[stream_id] = Stream(stream_id, fields, self._initial_send_window)
        if ends:
            self._receive(stream, b"", True)

    def _fields(self, block: bytes) -> dict[str, str]:
        """Decodes headers. A client repeats itself: a block of indices alone means the same until its table changes."""
        known = self._known_blocks.get(block)
        if known is not None:
            return known
        fields = {str(name): str(value) for name, value in self._decoder.decode(block)}
        if not block or min(block) < 0x80:
            self._known_blocks.clear()
        elif len(self._known_blocks) < _HEADER_CACHE:
            self._known_blocks[block] = fields
        return fields

    def _take_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self._last_stream_id:
                raise ConnectionFault(frames.PROTOCOL_ERROR, f"data for stream {stream_id}, which is idle")
            self._acknowledge(len(payload))
            return
        stream.num_unacked += len(payload)
        if stream.num_unacked > _STREAM_WINDOW:
            raise ConnectionFault(frames.FLOW_CONTROL_ERROR, "more data than the window allows")
        self._receive(stream, _unpadded(flags, payload), bool(flags & frames.END_STREAM))

    def _receive(self, stream: Stream, data: bytes, ends: bool) -> None:
        try:
            stream.receive(data, ends, MAX_MESSAGE_BYTES)
        except BadMessage as problem:
            self._calls.on_bad_message(self, stream, problem)
        else:
            if ends or stream.messages:
                self._calls.on_message(self, stream)

    def _take_window(self, stream_id: int, increment: int) -> None:
        if stream_id:
            stream = self.streams.get(stream_id)
            if stream is not None:
                stream.send_window += increment
                _wake(stream)
            return
        self._send_window += increment
        if self._send_window > frames.MAX_WINDOW or not increment:
            raise ConnectionFault(frames.FLOW_CONTROL_ERROR, f"a window of {self._send_window} bytes")
        for stream in self.streams.values():
            _wake(stream)

    def _take_reset(self, stream_id: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._num_resets += 1
            if self._num_resets > _MAX_RESETS:
                raise ConnectionFault(frames.ENHANCE_YOUR_CALM, "too many calls are reset")
            self._drop(stream)

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            return
        for key, value in frames.read_settings(payload):
            if key == frames.SETTINGS_INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    raise ConnectionFault(frames.FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
                change, self._initial_send_window = value - self._initial_send_window, value
                for stream in self.streams.values():
                    stream.send_window += change
                    _wake(stream)
            elif key == frames.SETTINGS_MAX_FRAME_SIZE:
                self._max_frame_bytes = min(max(value, frames.MAX_FRAME_BYTES), 1 << 20)
        self._write(frame(frames.SETTINGS, frames.ACK, 0))

    # Frames out.

    async def _finish_slowly(self, stream: Stream, head: bytes, message: bytes, tail: bytes) -> None:
        self.begin(stream, head)
        await self.send(stream, message)
        self.end(stream, tail)

    def _write_end(self, stream: Stream, out: bytes) -> None:
        if not stream.closed_there:
            out += frames.rst_stream(stream.id, frames.NO_ERROR)
        self._forget(stream)
        self._write(out)
        if self._num_resets:
            self._num_resets -= 1
        if self._closing and not self.streams:
            self._close()

    def _write(self, data: bytes) -> None:
        """Sends, or gathers while frames are read: one system call for all that they bring about."""
        if self._gathered is not None:
            self._gathered.append(data)
        elif not self._transport.is_closing():
            self._transport.write(data)

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered and not self._transport.is_closing():
            self._transport.write(b"".join(gathered))

    def _close(self) -> None:
        self._flush()
        self._transport.close()

    def _forget(self, stream: Stream) -> None:
        stream.closed_here = True
        self.streams.pop(stream.id, None)
        self._acknowledge(stream.num_unacked)

    def _acknowledge(self, num_bytes: int) -> None:
        """Gives window back."""
        self._to_ack += num_bytes
        if self._to_ack >= _ACK_BYTES:
            self._write(frames.window_update(0, self._to_ack))
            self._to_ack = 0

    def _drop(self, stream: Stream) -> None:
        self._forget(stream)
        _wake(stream)
        self._calls.on_reset(stream)

    def _fail(self, code: int, why: str) -> None:
        _log.info("a client's connection ends: %s", why)
        self._write(frames.goaway(self._last_stream_id, code, why))
        self._close()
        self._buffer.clear()

    def _check_silence(self) -> None:
        if not self._heard and self._asked:
            self.abort()
            return
        self._asked = not self._heard
        if self._asked:
            self._write(frame(frames.PING, 0, 0, bytes(8)))
        self._heard = False
        self._watch = asyncio.get_running_loop().call_later(_SILENCE_SECONDS, self._check_silence)


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & frames.PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(frames.PROTOCOL_ERROR, "more padding than data")
    return payload[1 : len(payload) - payload[0]]


def _wake(stream: Stream) -> None:
    if stream.wake_sender is not None:
        stream.wake_sender.set()
