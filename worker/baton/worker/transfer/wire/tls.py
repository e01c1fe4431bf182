"""A TLS connection in the place of a socket: what sends and receives KV takes either.

Python's own SSLSocket can neither gather nor scatter, moves one record of 16 KiB a call, goes on in the clear behind a
`shutdown`, and must not be read and written by two threads at once. Here one thread may read and one may write.
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

from baton.rpc.identity import WORKER
from baton.rpc.identity_table import KV_SENDERS
from baton.rpc.tls import Tls

_CHUNK_BYTES = 256 << 10  # that one call sends or takes from the network
_TAKE_BYTES = 1 << 20  # that one call fills in
_RECORD_BYTES = 17 << 10  # more than the largest, with what is around it
# AES-GCM is good for 388 GB under one key, and Python cannot ask for another: a connection ends before.
_WORN_BYTES = 1 << 37
_MAX_BYTES = 1 << 38


class KvTls:
    """What a worker's KV connections show, and accept: workers of the same fleet. With the files as they are then."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls

    def connect(self, sock: socket.socket, seconds: float) -> TlsSocket:
        """A sender's end. Raises OSError where the peer is no worker of the fleet, or takes longer."""
        context = self._tls.ssl_context(server_side=False)
        secured = TlsSocket(sock, context, self._tls.host_name_of(WORKER))
        secured.shake_hands(seconds)
        return secured

    def accept(self, sock: socket.socket, seconds: float) -> TlsSocket:
        """A receiver's end. Raises OSError where the peer shows no certificate of the CA, or takes longer."""
        secured = TlsSocket(sock, self._tls.ssl_context(server_side=True))
        secured.shake_hands(seconds)
        return secured

    def refusal(self, sock: socket.socket | TlsSocket) -> str:
        """Why an accepted peer may send no KV. Empty: it may."""
        assert isinstance(sock, TlsSocket), "it was accepted here"
        return self._tls.refusal(sock.peer_certificate, KV_SENDERS)


class TlsSocket:
    """Over a connected socket, which it owns. TLS 1.3 alone: nothing but data moves after the handshake.

    `server_hostname` makes it the client's end: the DNS name that the peer's certificate must have.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_hostname: str | None = None) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self._lock = threading.Lock()  # of the two above and of this: OpenSSL's state is one for both directions
        self._scratch = memoryview(bytearray(_CHUNK_BYTES))
        self._starved = True  # nothing can be read before more comes from the network
        self._num_sent = 0

    @property
    def peer_certificate(self) -> Mapping[str, Any] | None:
        """As `getpeercert` has it."""
        return self._tls.getpeercert()

    @property
    def buffered(self) -> bool:
        """Whether something can be read without the network."""
        with self._lock:
            return not self._starved and (self._tls.pending() > 0 or self._incoming.pending > 0)

    @property
    def worn(self) -> bool:
        """Whether its key has served long enough: a new connection has another."""
        return self._num_sent >= _WORN_BYTES

    def shake_hands(self, seconds: float) -> None:
        """Before anything else. Raises OSError: SSLError for a peer that is not who it must be, TimeoutError."""
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
                    self._sock.sendall(self._outgoing.read())  # the alert says why
                raise
            else:
                done = True
            self._sock.sendall(self._outgoing.read())
            if done:
                self._starved = False
                return
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError(f"the TLS handshake took longer than {seconds:g} s")
            if not self._take(socket.MSG_DONTWAIT):
                raise ConnectionError("the peer ended the connection within the TLS handshake")

    def recv_into(self, buffer: bytearray | memoryview, num_bytes: int = 0, flags: int = 0) -> int:
        """Some bytes, as a socket gives them; 0 at the end. What the socket's limits raise. Flags change nothing."""
        view = memoryview(buffer)
        view = view[:num_bytes] if num_bytes else view
        while True:
            count = self._read([view])
            if count or not view.nbytes:
                return count
            if not self._take(0):
                return 0

    def recvmsg_into(self, buffers: Sequence[memoryview], _space: int, _flags: int) -> tuple[int]:
        """What is there now, as with MSG_DONTWAIT. Raises BlockingIOError for nothing."""
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
        """The first bytes of these; how many. What the socket's limits raise."""
        parts, room = [], _CHUNK_BYTES
        for buffer in buffers:
            parts.append(buffer[:room])
            room -= parts[-1].nbytes
            if not room:
                break
        data = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
        self._num_sent += data.nbytes
        if self._num_sent > _MAX_BYTES:
            raise ConnectionError(f"{_MAX_BYTES} bytes were sent under one key, which is enough")
        with self._lock:
            done = 0
            while done < data.nbytes:
                done += self._tls.write(data[done:])
            secret = self._outgoing.read()
        self._sock.sendall(secret)
        return data.nbytes

    def sendall(self, data: bytes | memoryview) -> None:
        """All of them."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.sendmsg([rest]) :]

    def fileno(self) -> int:
        """The socket's."""
        return self._sock.fileno()

    def settimeout(self, seconds: float | None) -> None:
        """The socket's."""
        self._sock.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """The socket's. A low-water mark is of plain bytes, of which a part may be here already."""
        if option == socket.SO_RCVLOWAT and isinstance(value, int):
            value = max(1, value - _RECORD_BYTES)
        self._sock.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        """The socket's: wakes whoever reads or writes. Nothing leaves in the clear behind it."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """The socket's."""
        self._sock.close()

    def _read(self, views: list[memoryview]) -> int:
        """Fills these from what is here; how many bytes."""
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
                self._starved = True
        return total

    def _take(self, flags: int) -> int:
        """From the network; 0: the peer has ended it."""
        count = self._sock.recv_into(self._scratch, 0, flags)
        if count:
            with self._lock:
                self._incoming.write(self._scratch[:count])
                self._starved = False
        return count


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []
