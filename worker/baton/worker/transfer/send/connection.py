"""The way to one receiver: one connection, whose pieces are started in order, and a thread that sees to their ends.

The thread starts pieces too, but for one that nothing is before: whoever pushes that starts it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.rpc.errors import ServiceError
from baton.worker.transfer.base import Outbound, Piece, Pushed, PushFailed, PushFenced
from baton.worker.transfer.event_queue import EventQueue
from baton.worker.transfer.send.pieces import PieceSender, StartedPiece
from baton.worker.transfer.wire.sockets import shut_down

_log = logging.getLogger(__name__)

_IDLE_SECONDS = 60.0
_JOIN_SECONDS = 2.0

OpenConnection = Callable[[threading.Condition, Callable[[socket.socket], None]], PieceSender]


@dataclass(slots=True, eq=False)
class Push:
    """One outbound transfer; guarded by its link's lock."""

    outbound: Outbound
    num_pieces: int = 0
    num_bytes: int = 0
    num_waiting: int = 0  # what of it is in the queue, or is being taken from there
    num_started: int = 0  # pieces whose blocks are being read
    complete: bool = False  # its last piece was pushed
    stopped: bool = False  # nothing more is started
    fencing: bool = False  # someone waits for what was started


@dataclass(frozen=True, slots=True)
class _Begin:
    """Dials ahead of the first piece."""

    push: Push


@dataclass(frozen=True, slots=True)
class _Send:
    push: Push
    piece: Piece


_Item = _Begin | _Send


class OutboundConnection:
    """From a receiver's first push to a failure or a long silence. `open_connection` dials; on the thread."""

    def __init__(self, name: str, open_connection: OpenConnection, events: EventQueue) -> None:
        self._name = name
        self._open = open_connection
        self._events = events
        self._connection: PieceSender | None = None
        self._dialling: socket.socket | None = None  # waits for the receiver's greeting
        self._queue: deque[_Item] = deque()
        self._started: deque[tuple[Push, StartedPiece]] = deque()  # taken off by the thread alone
        self._pushes: set[Push] = set()
        self._changed = threading.Condition()
        self._serving = False  # the thread has taken something out of the queue, and may start it
        self._problem: BaseException | None = None  # of a piece that could not be started, by whatever thread
        self._ended = False
        self._used_at = time.monotonic()  # when a push last began, or a piece was last sent
        self._thread = threading.Thread(target=self._run, name=f"kv-to-{name}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """It takes no pushes any more."""
        return self._ended

    def idle_since(self, kind: str) -> float | None:
        """When it was last used. None: a push is under way, the link has ended, or its kind is another."""
        with self._changed:
            idle = not (self._ended or self._pushes or self._queue or self._started or self._serving)
            known = self._connection is not None and self._connection.kind == kind
            return self._used_at if idle and known else None

    def retire(self) -> None:
        """Ends the link where it is still idle."""
        with self._changed:
            if not self._pushes:
                self._ended = True
                self._changed.notify_all()

    def begin(self, push: Push) -> bool:
        """Takes a push on. False: the link has ended."""
        with self._changed:
            if self._ended:
                return False
            self._pushes.add(push)
            self._used_at = time.monotonic()
            self._put(_Begin(push))
            return True

    def send(self, push: Push, piece: Piece) -> None:
        """Queues a piece, or starts it at once where nothing is before it: to wake the thread takes as long."""
        with self._changed:
            if self._can_start(push):
                self._start_here(push, piece)
            else:
                self._put(_Send(push, piece))

    def end(self, push: Push) -> None:
        """That was its last piece: Pushed follows."""
        with self._changed:
            push.complete = True
        self._report_end(push)

    def fence(self, push: Push) -> None:
        """PushFenced follows: at once, or when what was started is sent."""
        with self._changed:
            push.stopped = True
            self._pushes.discard(push)
            push.fencing = push.num_started > 0
            self._changed.notify_all()
        if not push.fencing:
            self._events.post(PushFenced(push.outbound.push_id))

    def cut(self) -> None:
        """Wakes the thread out of whatever it sends."""
        connection = self._connection
        if connection is not None:
            connection.cut()

    def close(self) -> None:
        """Ends the link, whatever waits."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            if self._dialling is not None:
                shut_down(self._dialling)
        self.cut()

    def join(self) -> None:
        """Waits for the thread's end, for a bounded time."""
        self._thread.join(_JOIN_SECONDS)

    def _can_start(self, push: Push) -> bool:
        connection = self._connection
        return (
            connection is not None
            and not (self._serving or self._queue or self._ended or push.stopped or self._problem)
            and connection.starts_at_once(push.outbound)
            and connection.room()
        )

    def _start_here(self, push: Push, piece: Piece) -> None:
        push.num_started += 1
        with contextlib.suppress(BaseException):  # the thread's to tell
            self._start(push, piece)
        self._changed.notify_all()

    def _put(self, item: _Item) -> None:
        if not item.push.stopped:
            item.push.num_waiting += 1
            self._queue.append(item)
            self._changed.notify_all()

    # The thread.

    def _run(self) -> None:
        reason = "the link is closed"
        try:
            while self._turn():
                pass
        except ServiceError as error:
            reason = f"{self._name}: {error.message}"
        except OSError as error:
            reason = f"{self._name}: {error}"
        except Exception as error:  # of the executor: the thread must not die in silence
            reason = f"blocks could not be read: {error}"
            _log.exception("pushing KV to %s failed", self._name)
        finally:
            self._fail(reason)

    def _turn(self) -> bool:
        """Starts what can be, and finishes what was started longest ago where nothing can, or where the receiver waits
        for that. False: it is over."""
        connection = self._connection
        if connection is not None and not self._started and connection.ended() and not self._is_needed():
            self._disconnect()
        if connection is not None and self._started and connection.is_due(self._started[0][1]):
            self._finish_oldest()
            return True
        item = self._next()
        if self._problem is not None:
            raise self._problem
        if item is not None:
            self._serve(item)
            self._served()
        elif self._ended:
            return False
        elif self._started:
            assert connection is not None, "something was started on it"
            if not self._queue or connection.await_end(self._started[0][1]):
                self._finish_oldest()
        elif self._queue:
            assert self._connection is not None, "a push begins with a connection"
            self._connection.wait_for_room()
        return True

    def _is_needed(self) -> bool:
        with self._changed:
            return bool(self._pushes)

    def _next(self) -> _Item | None:
        """What to do next. None: the link is closed, something must be finished first, or the connection changed."""
        with self._changed:
            idle = not (self._queue or self._started or self._ended or self._problem)
            if idle and not self._changed.wait(_IDLE_SECONDS) and not self._pushes and not self._queue:
                self._ended = True
            if self._ended or not self._queue:
                return None
            if not self._can_serve(self._queue[0]):
                return None
            self._serving = True
            return self._queue.popleft()

    def _served(self) -> None:
        with self._changed:
            self._serving = False

    def _can_serve(self, item: _Item) -> bool:
        connection = self._connection
        if item.push.stopped:
            return True
        if isinstance(item, _Begin):  # what was started on a connection comes to its end before another is made
            return not self._started or connection is None or not connection.ended()
        assert connection is not None, "a push begins with a connection"
        return connection.room()

    def _serve(self, item: _Item) -> None:
        push = item.push
        if isinstance(item, _Begin):
            self._connect()
        piece = item.piece if isinstance(item, _Send) else None
        with self._changed:
            push.num_waiting -= 1
            if push.stopped:
                return
            if piece is not None:
                push.num_started += 1
        if piece is not None:
            self._start(push, piece)
        else:
            self._report_end(push)

    def _start(self, push: Push, piece: Piece) -> None:
        assert self._connection is not None, "a push begins with a connection"
        try:
            started_piece = self._connection.start(push.outbound, piece)
        except BaseException as error:
            self._problem = error
            self._left(push)
            raise
        self._started.append((push, started_piece))

    def _finish_oldest(self) -> None:
        assert self._connection is not None, "something was started on it"
        push, started_piece = self._started[0]
        self._connection.finish(started_piece)
        self._started.popleft()
        push.num_pieces += 1
        push.num_bytes += started_piece.num_bytes
        self._left(push)

    def _left(self, push: Push) -> None:
        """A piece's blocks are not read any more."""
        with self._changed:
            push.num_started -= 1
            self._used_at = time.monotonic()
        self._report_end(push)

    def _report_end(self, push: Push) -> None:
        """What the end of its pieces means, if they have all ended."""
        with self._changed:
            fenced = push.fencing and not push.num_started
            push.fencing = push.fencing and not fenced
            left = push.num_started or push.num_waiting
            pushed = push.complete and not (push.stopped or left or self._problem)
            if pushed:
                push.stopped = True
                self._pushes.discard(push)
        if fenced:
            self._events.post(PushFenced(push.outbound.push_id))
        elif pushed:
            self._events.post(Pushed(push.outbound.push_id, push.num_pieces, push.num_bytes))

    def _connect(self) -> None:
        """Sees to a connection that was not closed meanwhile, as by a receiver that was restarted."""
        if self._connection is not None:
            if not self._connection.ended():
                return
            self._disconnect()
        connection = self._open(self._changed, self._dialled)
        with self._changed:
            self._connection, self._dialling = connection, None
            if self._ended:
                raise ConnectionError("the link is closed")

    def _dialled(self, sock: socket.socket) -> None:
        with self._changed:
            self._dialling = sock
            if self._ended:
                raise ConnectionError("the link is closed")

    def _disconnect(self) -> None:
        with self._changed:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.cut()
            while self._started:
                push, started_piece = self._started[0]
                connection.settle(started_piece)
                self._started.popleft()
                self._left(push)
            connection.close()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._ended = True
            self._dialling = None
            failed = [push for push in self._pushes if not push.stopped]
            for push in failed:
                push.stopped = True
            self._queue.clear()
        for push in failed:
            self._events.post(PushFailed(push.outbound.push_id, reason))
        try:
            self._disconnect()
        except Exception:  # of a library, at the end of its use
            _log.exception("the connection to %s could not be closed", self._name)
