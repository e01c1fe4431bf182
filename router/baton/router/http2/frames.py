"""HTTP/2 frames (RFC 9113): constants, and how the ones that a server sends are packed. Pure."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
MAX_FRAME_BYTES = 16384  # of payload, as long as nobody asks for more
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65535

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

SETTINGS_HEADER_TABLE_SIZE, SETTINGS_ENABLE_PUSH, SETTINGS_MAX_CONCURRENT_STREAMS = 1, 2, 3
SETTINGS_INITIAL_WINDOW_SIZE, SETTINGS_MAX_FRAME_SIZE, SETTINGS_MAX_HEADER_LIST_SIZE = 4, 5, 6

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, _, STREAM_CLOSED, FRAME_SIZE_ERROR = range(7)
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, _, ENHANCE_YOUR_CALM = range(7, 12)

_SETTING = struct.Struct(">HI")
_UINT32 = struct.Struct(">I")
_GOAWAY = struct.Struct(">II")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return (len(payload) << 48 | kind << 40 | flags << 32 | stream_id).to_bytes(HEADER_BYTES, "big") + payload


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(key, value) for key, value in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """What a SETTINGS frame says. ValueError: not whole."""
    if len(payload) % _SETTING.size:
        raise ValueError("a SETTINGS frame of broken length")
    return list(_SETTING.iter_unpack(payload))


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream_id, _UINT32.pack(increment))


def rst_stream(stream_id: int, error: int) -> bytes:
    """A RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, _UINT32.pack(error))


def goaway(last_stream_id: int, error: int, why: str = "") -> bytes:
    """A GOAWAY frame."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream_id, error) + why.encode())


def uint31(payload: bytes) -> int:
    """The 31 bits that a frame's first four bytes carry. ValueError: it has fewer."""
    if len(payload) < _UINT32.size:
        raise ValueError("a frame that is too short")
    return int(_UINT32.unpack_from(payload)[0]) & MAX_WINDOW
