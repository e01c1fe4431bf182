"""The sending end of the TCP transport: one connection and one thread for each receiver. Pieces go in order."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.worker.core import BlockId
from baton.worker.transfer.base import Outbound, Pushed, PushFailed, PushFenced
from baton.worker.transfer.event_queue import EventQueue
from baton.worker.transfer.tcp_frames import PieceHeader, encode_header
from baton.worker.transfer.tcp_options import enlarge_send_buffer

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 2.0
_SEND_SECONDS = 5.0  # for one piece
_IDLE_SECONDS = 60.0
_JOIN_SECONDS = 2.0

ReadBlocks = Callable[[int, Sequence[BlockId]], bytearray | memoryview]


@dataclass(slots=True, eq=False)
class Push:
    """One outbound transfer; guarded by its link's lock."""

    outbound: Outbound
    num_pieces: int = 0
    num_bytes: int = 0
    stopped: bool = False  # nothing more is sent
    fencing: bool = False  # someone waits for the piece that is being sent


@dataclass(frozen=True, slots=True)
class _Begin:
    """Dials ahead of the first piece."""

    push: Push


@dataclass(frozen=True, slots=True)
class _Piece:
    push: Push
    layer: int
    first_index: int
    block_ids: Sequence[BlockId]


@dataclass(frozen=True, slots=True)
class _End:
    push: Push


_Item = _Begin | _Piece | _End


class SenderLink:
    """The way to one receiver, from its first push to a failure or a long silence."""

    def __init__(self, host: str, port: int, read: ReadBlocks, events: EventQueue) -> None:
        self.num_pieces = 0
        self.num_bytes = 0
        self._address = (host, port)
        self._read = read
        self._events = events
        self._sock: socket.socket | None = None
        self._queue: deque[_Item] = deque()
        self._pushes: set[Push] = set()
        self._current: Push | None = None  # whose piece is being read or sent
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"kv-to-{host}:{port}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """It takes no pushes any more."""
        return self._ended

    def begin(self, push: Push) -> bool:
        """Takes a push on. False: the link has ended."""
        with self._changed:
            if self._ended:
                return False
            self._pushes.add(push)
            self._put(_Begin(push))
            return True

    def send(self, push: Push, layer: int, first_index: int, block_ids: Sequence[BlockId]) -> None:
        """Queues a piece."""
        with self._changed:
            self._put(_Piece(push, layer, first_index, block_ids))

    def end(self, push: Push) -> None:
        """Queues a push's end: Pushed follows."""
        with self._changed:
            self._put(_End(push))

    def fence(self, push: Push) -> None:
        """PushFenced follows: at once, or when the piece that is being sent is."""
        with self._changed:
            push.stopped = True
            self._pushes.discard(push)
            push.fencing = self._current is push
        if not push.fencing:
            self._events.post(PushFenced(push.outbound.push_id))

    def cut(self) -> None:
        """Wakes the thread out of whatever it sends."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the link, whatever waits."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self.cut()

    def join(self) -> None:
        """Waits for the thread's end, for a bounded time."""
        self._thread.join(_JOIN_SECONDS)

    def _put(self, item: _Item) -> None:
        if not item.push.stopped:
            self._queue.append(item)
            self._changed.notify()

    # The thread.

    def _run(self) -> None:
        reason = "the link is closed"
        try:
            while (item := self._take()) is not None:
                self._serve(item)
        except OSError as error:
            reason = f"{self._address[0]}:{self._address[1]}: {error}"
        except Exception as error:  # of the executor: the thread must not die in silence
            reason = f"blocks could not be read: {error}"
            _log.exception("pushing KV to %s:%d failed", *self._address)
        finally:
            self._fail(reason)

    def _take(self) -> _Item | None:
        """The next item. None: the link is closed, or nothing came for long."""
        with self._changed:
            while not self._queue and not self._ended:
                if not self._changed.wait(_IDLE_SECONDS) and not self._pushes and not self._queue:
                    self._ended = True
            return None if self._ended else self._queue.popleft()

    def _serve(self, item: _Item) -> None:
        push = item.push
        if isinstance(item, _Begin):
            self._dial()
            return
        with self._changed:
            if push.stopped:
                return
            if isinstance(item, _End):
                push.stopped = True
                self._pushes.discard(push)
            else:
                self._current = push
        if isinstance(item, _End):
            self._events.post(Pushed(push.outbound.push_id, push.num_pieces, push.num_bytes))
            return
        try:
            self._send(push, item)
        finally:
            with self._changed:
                self._current = None
                fenced = push.fencing
            if fenced:
                self._events.post(PushFenced(push.outbound.push_id))

    def _send(self, push: Push, piece: _Piece) -> None:
        sock = self._sock
        assert sock is not None, "a push begins with a connection"
        data = self._read(piece.layer, piece.block_ids)
        outbound = push.outbound
        header = PieceHeader(
            outbound.transfer_id,
            outbound.generation,
            outbound.receiver_epoch,
            piece.layer,
            piece.first_index,
            len(piece.block_ids),
            len(data),
            zlib.crc32(data) if outbound.checksum else None,
        )
        sock.sendall(encode_header(header), getattr(socket, "MSG_MORE", 0))
        sock.sendall(data)
        push.num_pieces += 1
        push.num_bytes += len(data)
        self.num_pieces += 1
        self.num_bytes += len(data)

    def _dial(self) -> None:
        """Sees to a connection that was not closed meanwhile, as by a receiver that was restarted."""
        if self._sock is not None:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN | select.POLLHUP | select.POLLERR)
            if not poll.poll(0):
                return
            self._sock.close()
            self._sock = None
        sock = _connect(*self._address)
        with self._changed:
            self._sock = sock
            if self._ended:
                raise ConnectionError("the link is closed")

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._ended = True
            failed = [push for push in self._pushes if not push.stopped]
            for push in failed:
                push.stopped = True
            self._queue.clear()
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
        for push in failed:
            self._events.post(PushFailed(push.outbound.push_id, reason))


def _connect(host: str, port: int) -> socket.socket:
    """Raises OSError when no connection stands in time."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        enlarge_send_buffer(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.settimeout(_CONNECT_SECONDS)
        sock.connect(address)
        sock.settimeout(_SEND_SECONDS)
    except OSError:
        sock.close()
        raise
    return sock
