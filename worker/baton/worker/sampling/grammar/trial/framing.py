"""Frames between the engine and a trial: a length in four bytes, then the data."""

from __future__ import annotations

import socket

_LENGTH_BYTES = 4


def send_sized(sock: socket.socket, data: bytes) -> None:
    """Sends one frame."""
    sock.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def receive_sized(sock: socket.socket) -> bytes:
    """Receives one frame. Raises EOFError if the peer is gone."""
    length = int.from_bytes(_receive(sock, _LENGTH_BYTES), "little")
    return _receive(sock, length)


def _receive(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = sock.recv(min(length - len(data), 1 << 20))
        if not part:
            raise EOFError("the peer closed the connection")
        data += part
    return bytes(data)
