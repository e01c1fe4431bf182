"""The connection to one receiver: starts pieces in order, and finishes them on a thread.

The thread starts pieces too, except one that no other piece precedes: the thread that pushes it also starts it.
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
    """One outbound transfer. The connection's lock guards it."""

    outbound: Outbound
    num_pieces: int = 0
    num_bytes: int = 0
    num_waiting: int = 0  # items of this push that the thread has not served yet
    num_started: int = 0  # pieces whose blocks are being read
    complete: bool = False  # the last piece was pushed
    stopped: bool = False  # no more pieces are started
    fencing: bool = False  # a fence waits for the started pieces


@dataclass(frozen=True, slots=True)
class _Begin:
    """Dials before the first piece."""

    push: Push


@dataclass(frozen=True, slots=True)
class _Send:
    push: Push
    piece: Piece


_Item = _Begin | _Send


class OutboundConnection:
    """Pushes to one receiver, until a failure or a long idle time. `open_connection` dials, on the thread."""

    def __init__(self, name: str, open_connection: OpenConnection, events: EventQueue) -> None:
        self._name = name
        self._open = open_connection
        self._events = events
        self._connection: PieceSender | None = None
        self._dialing: socket.socket | None = None  # awaits the receiver's welcome
        self._queue: deque[_Item] = deque()
        self._started: deque[tuple[Push, StartedPiece]] = deque()  # only the thread removes entries
        self._pushes: set[Push] = set()
        self._changed = threading.Condition()
        self._serving = False  # the thread has taken an item, and may start it
        self._problem: BaseException | None = None  # error of a piece that failed to start, on any thread
        self._ended = False
        self._used_at = time.monotonic()  # when a push last began, or a piece was last sent
        self._thread = threading.Thread(target=self._run, name=f"kv-to-{name}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether it accepts no more pushes."""
        return self._ended

    def idle_since(self, kind: str) -> float | None:
        """Returns when it was last used. None: a push is open, the connection has ended, or it is of another kind."""
        with self._changed:
            idle = not (self._ended or self._pushes or self._queue or self._started or self._serving)
            known = self._connection is not None and self._connection.kind == kind
            return self._used_at if idle and known else None

    def retire(self) -> None:
        """Ends the connection if it is still idle."""
        with self._changed:
            if not self._pushes:
                self._ended = True
                self._changed.notify_all()

    def begin(self, push: Push) -> bool:
        """Begins a push. False: the connection has ended."""
        with self._changed:
            if self._ended:
                return False
            self._pushes.add(push)
            self._used_at = time.monotonic()
            self._put(_Begin(push))
            return True

    def send(self, push: Push, piece: Piece) -> None:
        """Queues a piece; starts it at once if none precedes it, since waking the thread would take as long."""
        with self._changed:
            if self._can_start(push):
                self._start_here(push, piece)
            else:
                self._put(_Send(push, piece))

    def end(self, push: Push) -> None:
        """Marks the last piece of a push. Pushed follows."""
        with self._changed:
            push.complete = True
        self._report_end(push)

    def fence(self, push: Push) -> None:
        """Stops a push. PushFenced follows at once, or when its started pieces are sent."""
        with self._changed:
            push.stopped = True
            self._pushes.discard(push)
            push.fencing = push.num_started > 0
            self._changed.notify_all()
        if not push.fencing:
            self._events.post(PushFenced(push.outbound.push_id))

    def cut(self) -> None:
        """Interrupts the thread's current send."""
        connection = self._connection
        if connection is not None:
            connection.cut()

    def close(self) -> None:
        """Ends the connection and drops what is queued."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            if self._dialing is not None:
                shut_down(self._dialing)
        self.cut()

    def join(self) -> None:
        """Waits a limited time for the end of the thread."""
        self._thread.join(_JOIN_SECONDS)

    def _can_start(self, push: Push) -> bool:
        connection = self._connection
        return (
            connection is not None
            and not (self._serving or self._queue or self._ended or push.stopped or self._problem)
            and connection.starts_at_once(push.outbound)
            and connection.has_capacity()
        )

    def _start_here(self, push: Push, piece: Piece) -> None:
        push.num_started += 1
        with contextlib.suppress(BaseException):  # the thread reports it
            self._start(push, piece)
        self._changed.notify_all()

    def _put(self, item: _Item) -> None:
        if not item.push.stopped:
            item.push.num_waiting += 1
            self._queue.append(item)
            self._changed.notify_all()

    # On the thread.

    def _run(self) -> None:
        reason = "the connection is closed"
        try:
            while self._turn():
                pass
        except ServiceError as error:
            reason = f"{self._name}: {error.message}"
        except OSError as error:
            reason = f"{self._name}: {error}"
        except Exception as error:  # of the executor: a thread must not end without a report
            reason = f"blocks could not be read: {error}"
            _log.exception("pushing KV to %s failed", self._name)
        finally:
            self._fail(reason)

    def _turn(self) -> bool:
        """Serves the next item. If it cannot start one, or the receiver waits for that, finishes the oldest piece.

        Returns False when the connection has ended.
        """
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
            self._connection.wait_for_capacity()
        return True

    def _is_needed(self) -> bool:
        with self._changed:
            return bool(self._pushes)

    def _next(self) -> _Item | None:
        """Takes the next item. None: the connection ended or changed, or a started piece must be finished first."""
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
        if isinstance(item, _Begin):  # started pieces end before the thread dials again
            return not self._started or connection is None or not connection.ended()
        assert connection is not None, "a push begins with a connection"
        return connection.has_capacity()

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
        """Records that a piece's blocks are no longer read."""
        with self._changed:
            push.num_started -= 1
            self._used_at = time.monotonic()
        self._report_end(push)

    def _report_end(self, push: Push) -> None:
        """Reports the end of a push, or of its fence, if all its pieces have ended."""
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
        """Dials, unless the connection is still open. The receiver may have closed it, as at a restart."""
        if self._connection is not None:
            if not self._connection.ended():
                return
            self._disconnect()
        connection = self._open(self._changed, self._dialed)
        with self._changed:
            self._connection, self._dialing = connection, None
            if self._ended:
                raise ConnectionError("the connection is closed")

    def _dialed(self, sock: socket.socket) -> None:
        with self._changed:
            self._dialing = sock
            if self._ended:
                raise ConnectionError("the connection is closed")

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
            self._dialing = None
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
