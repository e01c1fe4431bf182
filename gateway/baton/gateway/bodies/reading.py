"""What passes between the gateway and the process that reads its large bodies."""

from __future__ import annotations

import socket
from typing import Any

from msgspec import Struct, msgpack

_LENGTH_BYTES = 8
_MAX_RECEIVED = 1 << 20  # at once


class Task(Struct, frozen=True):
    """One body, whose bytes follow in a frame of their own."""

    module: str  # of the request's type
    name: str
    strict: bool  # unknown keys are refused


class Reading(Struct, frozen=True):
    """What came of a body: a request, or what is wrong with it."""

    request: bytes = b""  # as MessagePack
    unknown: list[str] = []
    problem: str = ""
    field: str = ""
    representable: bool = True  # False: the request has values that MessagePack does not


def send_frame(sock: socket.socket, *pieces: bytes | bytearray) -> None:
    """Sends pieces of one frame behind their length."""
    sock.sendall(sum(map(len, pieces)).to_bytes(_LENGTH_BYTES, "little"))
    for piece in pieces:
        sock.sendall(piece)


def receive_frame(sock: socket.socket) -> bytearray:
    """Returns one frame. Raises EOFError where the peer closed the connection."""
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
