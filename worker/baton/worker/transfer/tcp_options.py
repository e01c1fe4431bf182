"""Socket buffers for bulk data. Where the kernel allows less than we want, its own tuning does better than we can."""

from __future__ import annotations

import socket
from pathlib import Path

_WANTED_BYTES = 4 << 20


def enlarge_send_buffer(sock: socket.socket) -> None:
    """Before connecting."""
    _enlarge(sock, socket.SO_SNDBUF, Path("/proc/sys/net/core/wmem_max"))


def enlarge_receive_buffer(sock: socket.socket) -> None:
    """Before listening or connecting."""
    _enlarge(sock, socket.SO_RCVBUF, Path("/proc/sys/net/core/rmem_max"))


def _enlarge(sock: socket.socket, option: int, limit: Path) -> None:
    try:
        allowed = int(limit.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return
    if allowed >= _WANTED_BYTES:
        sock.setsockopt(socket.SOL_SOCKET, option, _WANTED_BYTES)
