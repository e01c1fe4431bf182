"""A byte on a socket that signals the end of a raw copy, for copies that do not notify the receiver."""

from __future__ import annotations

import socket
from typing import Any


class Words:
    """The receiving end."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.told: Any = self._listener.getsockname()
        self._sock: socket.socket | None = None

    def receive(self) -> None:
        """Waits for the byte."""
        if self._sock is None:
            self._sock, _ = self._listener.accept()
        self._sock.recv(1)

    def close(self) -> None:
        """Closes the socket."""
        self._listener.close()
        if self._sock is not None:
            self._sock.close()


class WordsSender:
    """The sending end."""

    def __init__(self, told: Any) -> None:
        self._sock = socket.create_connection(told)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> None:
        """Sends the byte."""
        self._sock.sendall(b"\1")

    def close(self) -> None:
        """Closes the socket."""
        self._sock.close()
