"""A TLS connection with the interface of a socket, for KV.

Python's SSLSocket cannot gather or scatter, moves one record of 16 KiB a call, continues in the clear after `shutdown`,
and must not be read and written by two threads at once. Here one thread may read while another writes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from baton.rpc.identity.identity import WORKER
from baton.rpc.identity.table import KV_SENDERS
from baton.rpc.tls.credentials import Tls

_CHUNK_BYTES = 256 << 10  # sent or received by one call
_TAKE_BYTES = 1 << 20  # filled in by one call
_RECORD_BYTES = 17 << 10  # more than the largest record with its header
# AES-GCM is safe for 388 GB under one key, and Python cannot request a new key: connections end earlier.
_REKEY_BYTES = 1 << 37
_MAX_BYTES = 1 << 38


class KvTls:
    """Secures a worker's KV connections with the fleet's certificates, read again for each connection."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls

    def connect(self, sock: socket.socket, seconds: float) -> TlsSocket:
        """Secures a sender's end. Raises OSError if the peer is not a worker of the fleet, or is too slow."""
        context = self._tls.ssl_context(server_side=False)
        secured = TlsSocket(sock, context, self._tls.host_name_of(WORKER))
        secured.handshake(seconds)
        return secured

    def accept(self, sock: socket.socket, seconds: float) -> TlsSocket:
        """Secures a receiver's end. Raises OSError if the peer has no certificate of the CA, or is too slow."""
        secured = TlsSocket(sock, self._tls.ssl_context(server_side=True))
        secured.handshake(seconds)
        return secured

    def refusal(self, sock: socket.socket | TlsSocket) -> str:
        """Returns why an accepted peer may not send KV. Empty: it may."""
        assert isinstance(sock, TlsSocket), "accept secured the socket"
        return self._tls.refusal(sock.peer_certificate, KV_SENDERS)


class TlsSocket:
    """TLS over a connected socket, which it owns. TLS 1.3 only: after the handshake, only data moves.

    With `server_hostname` it is the client's end: the DNS name that the peer's certificate must have.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_hostname: str | None = None) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self._lock = (
            threading.Lock()
        )  # guards the two above and _needs_input: OpenSSL has one state for both directions
        self._scratch = memoryview(bytearray(_CHUNK_BYTES))
        self._needs_input = True  # nothing can be read before more bytes are received
        self._num_sent = 0

    @property
    def peer_certificate(self) -> Mapping[str, Any] | None:
        """The peer's certificate, as `getpeercert` returns it."""
        return self._tls.getpeercert()

    @property
    def buffered(self) -> bool:
        """Whether a read would return without the network."""
        with self._lock:
            return not self._needs_input and (self._tls.pending() > 0 or self._incoming.pending > 0)

    @property
    def needs_new_key(self) -> bool:
        """Whether the key has encrypted so much that a new connection should replace this one."""
        return self._num_sent >= _REKEY_BYTES

    def handshake(self, seconds: float) -> None:
        """Runs the handshake. Raises SSLError if the peer's identity is wrong, TimeoutError, or another OSError."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                done = False
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._sock.sendall(self._outgoing.read())  # the alert with the cause
                raise
            else:
                done = True
            self._sock.sendall(self._outgoing.read())
            if done:
                self._needs_input = False
                return
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError(f"the TLS handshake took longer than {seconds:g} s")
            if not self._take(socket.MSG_DONTWAIT):
                raise ConnectionError("the peer ended the connection within the TLS handshake")

    def recv_into(self, buffer: bytearray | memoryview, num_bytes: int = 0, flags: int = 0) -> int:
        """Reads as a socket does; 0 at the end. Ignores flags. Raises the errors of the socket's limits."""
        view = memoryview(buffer)
        view = view[:num_bytes] if num_bytes else view
        while True:
            count = self._read([view])
            if count or not view.nbytes:
                return count
            if not self._take(0):
                return 0

    def recvmsg_into(self, buffers: Sequence[memoryview], _space: int, _flags: int) -> tuple[int]:
        """Reads what has been received, as with MSG_DONTWAIT. Raises BlockingIOError if that is nothing."""
        views = list(buffers)
        total, ended = 0, False
        while views and total < _TAKE_BYTES:
            count = self._read(views)
            total += count
            views = _rest(views, count)
            if views:
                try:
                    ended = not self._take(socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                if ended:
                    break
        if not total and not ended:
            raise BlockingIOError
        return (total,)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Sends the first bytes of the buffers; returns how many. Raises the errors of the socket's limits."""
        parts, remaining = [], _CHUNK_BYTES
        for buffer in buffers:
            parts.append(buffer[:remaining])
            remaining -= parts[-1].nbytes
            if not remaining:
                break
        data = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
        self._num_sent += data.nbytes
        if self._num_sent > _MAX_BYTES:
            raise ConnectionError(f"{_MAX_BYTES} bytes, the maximum, were sent under one key")
        with self._lock:
            done = 0
            while done < data.nbytes:
                done += self._tls.write(data[done:])
            secret = self._outgoing.read()
        self._sock.sendall(secret)
        return data.nbytes

    def sendall(self, data: bytes | memoryview) -> None:
        """Sends all bytes."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.sendmsg([rest]) :]

    def fileno(self) -> int:
        return self._sock.fileno()

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Sets an option of the socket. Lowers a low-water mark, since some plain bytes may be buffered here."""
        if option == socket.SO_RCVLOWAT and isinstance(value, int):
            value = max(1, value - _RECORD_BYTES)
        self._sock.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        """Shuts the socket down, which wakes blocked reads and writes. Never sends in the clear."""
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()

    def _read(self, views: list[memoryview]) -> int:
        """Fills the views with buffered bytes; returns how many."""
        total = 0
        with self._lock:
            try:
                for view in views:
                    done = 0
                    while done < view.nbytes:
                        count = cast(int, self._tls.read(view.nbytes - done, cast(Any, view[done:])))
                        if not count:
                            return total
                        done += count
                        total += count
            except ssl.SSLWantReadError:
                self._needs_input = True
        return total

    def _take(self, flags: int) -> int:
        """Receives from the network; 0: the peer has ended the stream."""
        count = self._sock.recv_into(self._scratch, 0, flags)
        if count:
            with self._lock:
                self._incoming.write(self._scratch[:count])
                self._needs_input = False
        return count


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []
