"""Sockets for KV: dials, listens, and reads whole frames with deadlines."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from pathlib import Path

from baton.rpc.errors import Unavailable
from baton.worker.transfer.wire.tls import TlsSocket

Connection = socket.socket | TlsSocket

MAX_BUFFERS = 1024  # the kernel's limit for one call (IOV_MAX)

_WANTED_BYTES = 4 << 20
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))  # detects a lost host in 25 s


def dial(host: str, port: int, connect_seconds: float, send_seconds: float) -> socket.socket:
    """Connects, with a limit for every later read and write. Raises OSError if there is no connection in time."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        _enlarge(sock, socket.SO_SNDBUF, Path("/proc/sys/net/core/wmem_max"))
        tune(sock)
        sock.settimeout(connect_seconds)
        sock.connect(address)
        sock.settimeout(send_seconds)
    except OSError:
        sock.close()
        raise
    return sock


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises Unavailable with the address."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _enlarge(listener, socket.SO_RCVBUF, Path("/proc/sys/net/core/rmem_max"))
        listener.bind((bare, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on transfer_listen={host}:{port}: {error.strerror or error}") from error
    return listener


def tune(sock: Connection) -> None:
    """Sends frames without a delay, and ends the connection if the peer's host is lost.

    With Nagle's algorithm a frame would wait for the acknowledgement of the last one, up to 40 ms.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def limit_receives(sock: Connection, seconds: float) -> None:
    """Makes blocking reads raise BlockingIOError after `seconds` without a byte."""
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))


def receive_exactly(sock: Connection, num_bytes: int) -> bytearray:
    """Reads `num_bytes`. Raises ConnectionError at an earlier end, and the errors of the socket's limits."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise ConnectionError("the peer ended the connection")
        view = view[count:]
    return data


def send_all(sock: Connection, buffers: list[memoryview], seconds: float) -> None:
    """Sends all buffers. Raises TimeoutError if the peer does not accept them in time."""
    deadline = time.monotonic() + seconds
    first = 0
    while first < len(buffers):
        count = sock.sendmsg(buffers[first : first + MAX_BUFFERS])
        first = skip(buffers, first, count)
        if first < len(buffers) and time.monotonic() >= deadline:
            raise TimeoutError(f"the peer did not take a piece in {seconds:g} s")


def skip(buffers: list[memoryview], first: int, num_bytes: int) -> int:
    """Skips bytes from `first` on. Returns the index of the next buffer; replaces a partly skipped one by its rest."""
    while num_bytes:
        buffer = buffers[first]
        if num_bytes < buffer.nbytes:
            buffers[first] = buffer[num_bytes:]
            return first
        num_bytes -= buffer.nbytes
        first += 1
    return first


def readable(sock: Connection, seconds: float) -> bool:
    """Returns whether a read would return at once: with bytes, or at the end of the stream."""
    if isinstance(sock, TlsSocket) and sock.buffered:
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(seconds * 1000))


def wait_for_peers_end(sock: Connection) -> None:
    """Returns when the peer sends no more, or the connection is shut down. Does not wake for data."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)  # includes errors and the hang-up of both ends
    poll.poll()


def needs_new_key(sock: Connection) -> bool:
    """Returns whether an idle connection should be replaced, as its TLS key has encrypted much."""
    return isinstance(sock, TlsSocket) and sock.needs_new_key


def shut_down(sock: Connection, how: int = socket.SHUT_RDWR) -> None:
    """Shuts the socket down, which wakes blocked reads and writes. Idempotent."""
    with contextlib.suppress(OSError):
        sock.shutdown(how)


def _enlarge(sock: socket.socket, option: int, limit: Path) -> None:
    """Enlarges a socket buffer, unless the kernel's limit is lower: then its own tuning does better."""
    try:
        allowed = int(limit.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return
    if allowed >= _WANTED_BYTES:
        sock.setsockopt(socket.SOL_SOCKET, option, _WANTED_BYTES)
