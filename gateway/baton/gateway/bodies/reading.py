"""The messages between the gateway and the process that parses its large bodies."""

from __future__ import annotations

import socket
from typing import Any

from msgspec import Struct, msgpack

_LENGTH_BYTES = 8
_MAX_RECEIVED = 1 << 20  # per read


class Task(Struct, frozen=True):
    """A body to parse; its bytes follow in another frame."""

    module: str  # of the request's type
    name: str
    strict: bool  # whether unknown keys are refused


class Reading(Struct, frozen=True):
    """The result for a body: a request, or a problem."""

    request: bytes = b""  # as MessagePack
    unknown: list[str] = []
    problem: str = ""
    field: str = ""
    representable: bool = True  # False: the request has values that MessagePack cannot represent


def send_frame(sock: socket.socket, *pieces: bytes | bytearray) -> None:
    """Sends the pieces of one frame after their total length."""
    sock.sendall(sum(map(len, pieces)).to_bytes(_LENGTH_BYTES, "little"))
    for piece in pieces:
        sock.sendall(piece)


def receive_frame(sock: socket.socket) -> bytearray:
    """Returns one frame. Raises EOFError if the peer closed the connection."""
    length = int.from_bytes(_receive(sock, _LENGTH_BYTES), "little")
    return _receive(sock, length)


def send_value(sock: socket.socket, value: Any) -> None:
    """Sends a Task or a Reading."""
    send_frame(sock, msgpack.encode(value))


def _receive(sock: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    begin = 0
    while begin < length:
        received = sock.recv_into(view[begin : begin + _MAX_RECEIVED])
        if not received:
            raise EOFError("the peer closed the connection")
        begin += received
    return data
