"""Frames between the gateway and its helper processes: a length of eight bytes, little-endian, then so many bytes."""

from __future__ import annotations

import mmap
import socket
from typing import Any

from msgspec import msgpack

_LENGTH_BYTES = 8
_MAX_RECEIVED = 1 << 20  # per read
# A larger frame is received into pages of its own. They are provided while the system copies, without the interpreter's
# lock: those of a bytearray are all provided before, which holds the lock for 2 ms a megabyte.
_MAPPED_BYTES = 1 << 20


def send_frame(sock: socket.socket, *pieces: bytes | bytearray | memoryview) -> None:
    """Sends the pieces of one frame after their total length."""
    sock.sendall(sum(map(len, pieces)).to_bytes(_LENGTH_BYTES, "little"))
    for piece in pieces:
        sock.sendall(piece)


def receive_frame(sock: socket.socket) -> memoryview:
    """Returns one frame. Raises EOFError if the peer closed the connection."""
    length = bytearray(_LENGTH_BYTES)
    _receive_into(sock, memoryview(length))
    num_bytes = int.from_bytes(length, "little")
    frame = memoryview(mmap.mmap(-1, num_bytes) if num_bytes >= _MAPPED_BYTES else bytearray(num_bytes))
    _receive_into(sock, frame)
    return frame


def send_value(sock: socket.socket, value: Any) -> None:
    """Sends a msgspec Struct as one MessagePack frame."""
    send_frame(sock, msgpack.encode(value))


def _receive_into(sock: socket.socket, view: memoryview) -> None:
    begin = 0
    while begin < len(view):
        received = sock.recv_into(view[begin : begin + _MAX_RECEIVED])
        if not received:
            raise EOFError("the peer closed the connection")
        begin += received
