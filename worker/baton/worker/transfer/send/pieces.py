"""Sends the pieces of one connection: bytes behind their header, or through slots of the receiver."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.rpc.errors import DataLoss, Mismatch
from baton.worker.executors.base import Executor
from baton.worker.transfer.base import Outbound, Piece
from baton.worker.transfer.bulk import BulkSender, SlotCopy, Slots, has_ended, no_announcement
from baton.worker.transfer.piece_bytes import in_place, read_piece
from baton.worker.transfer.send.background import BackgroundThread, Result
from baton.worker.transfer.send.free_slots import FreeSlots
from baton.worker.transfer.totals import KindTotals
from baton.worker.transfer.wire.checksum import checksum_of
from baton.worker.transfer.wire.frames import PieceHeader, encode_piece
from baton.worker.transfer.wire.sockets import (
    Connection,
    needs_new_key,
    readable,
    send_all,
    shut_down,
    wait_for_peers_end,
)
from baton.worker.transfer.wire.stall_watchdog import watch

SEND_SECONDS = 5.0  # for one piece, or until a slot is free
_STUCK_SECONDS = SEND_SECONDS + 1.0  # after which the watchdog gives a piece up that the connection's thread did not
_NUM_READ_AHEAD = 2
_WAIT_SECONDS = 0.25
_BRIEF_BYTES = 64 << 20  # the receiver is not ready for a lone piece of this size before its copy has ended
_SPIN_SECONDS = 500e-6  # the longest that a slot takes to return while the transport moves well
_CHECK_SECONDS = 1e-3  # between checks whether a copy has ended
_JOIN_SECONDS = 2.0


class StartedPiece(Protocol):
    """A piece between `start` and `finish`."""

    num_bytes: int


class PieceSender(Protocol):
    """An open connection. Its thread calls these methods; `cut` and `ended` are for any thread."""

    kind: str  # of the transport

    def has_capacity(self) -> bool:
        """Returns whether a piece can be started."""

    def starts_at_once(self, outbound: Outbound) -> bool:
        """Returns whether `start` never waits, so that any thread may call it if no other does."""

    def wait_for_capacity(self) -> None:
        """Waits until a piece can be started. Raises TimeoutError."""

    def start(self, outbound: Outbound, piece: Piece) -> StartedPiece:
        """Starts to read the piece's blocks, and to move them if the transport can."""

    def is_due(self, started_piece: StartedPiece) -> bool:
        """Returns whether the receiver could be notified of the oldest piece now, and only `finish` does that."""

    def await_end(self, started_piece: StartedPiece) -> bool:
        """Waits until the oldest piece can be finished (True), or another can be started (False)."""

    def finish(self, started_piece: StartedPiece) -> None:
        """Returns when the oldest piece is sent and its blocks are no longer read. Raises OSError."""

    def settle(self, started_piece: StartedPiece) -> None:
        """Returns when the piece's blocks are no longer read. For pieces of a connection that was cut."""

    def ended(self) -> bool:
        """Returns whether the receiver has closed its end."""

    def cut(self) -> None:
        """Makes every call end soon."""

    def close(self) -> None:
        """Closes the connection. Call after the last piece is finished or settled."""


@dataclass(slots=True)
class _Inline:
    header: Callable[[int, int | None], PieceHeader]
    data: Result[tuple[list[memoryview], int | None]]
    num_bytes: int = 0


class InlinePieceSender:
    """Sends bytes behind their header. Blocks that must be copied are, while the previous piece is sent."""

    kind = "tcp"

    def __init__(self, sock: Connection, executor: Executor, totals: KindTotals) -> None:
        self._sock = sock
        self._executor = executor
        self._totals = totals
        self._reads = BackgroundThread("kv-read")
        self._num_started = 0

    def has_capacity(self) -> bool:
        return self._num_started < _NUM_READ_AHEAD

    def starts_at_once(self, outbound: Outbound) -> bool:
        return False

    def wait_for_capacity(self) -> None:
        raise AssertionError("a piece can be started when none is being sent")

    def start(self, outbound: Outbound, piece: Piece) -> StartedPiece:
        def read() -> tuple[list[memoryview], int | None]:
            data = read_piece(self._executor, piece, outbound.conversion)
            return data, checksum_of(*data) if outbound.checksum else None

        as_it_is = outbound.conversion is None and in_place(self._executor, piece.layer) is not None
        data = Result.of(read) if as_it_is else self._reads.run(read)
        self._num_started += 1
        return _Inline(
            lambda num_bytes, checksum: header_of(outbound, piece, num_bytes, checksum, None),
            data,
        )

    def is_due(self, started_piece: StartedPiece) -> bool:
        return False

    def await_end(self, started_piece: StartedPiece) -> bool:
        return True

    def finish(self, started_piece: StartedPiece) -> None:
        assert isinstance(started_piece, _Inline)
        data, checksum = started_piece.data.get()
        started_piece.num_bytes = sum(part.nbytes for part in data)
        began = time.monotonic()
        header = encode_piece(started_piece.header(started_piece.num_bytes, checksum))
        send_all(self._sock, [memoryview(header), *data], SEND_SECONDS)
        self._num_started -= 1
        self._totals.sent(started_piece.num_bytes, time.monotonic() - began)

    def settle(self, started_piece: StartedPiece) -> None:
        assert isinstance(started_piece, _Inline)
        started_piece.data.wait()

    def ended(self) -> bool:
        return readable(self._sock, 0) or needs_new_key(self._sock)

    def cut(self) -> None:
        shut_down(self._sock)

    def close(self) -> None:
        self._reads.close()
        self._sock.close()


@dataclass(slots=True)
class _InSlot:
    header: PieceHeader
    pending: SlotCopy
    started: float
    num_bytes: int


class SlotPieceSender:
    """Sends pieces through slots, which headers name. A thread of its own waits for the connection's end."""

    def __init__(
        self,
        kind: str,
        peer: str,
        sock: Connection,
        sender: BulkSender,
        slots: Slots,
        executor: Executor,
        totals: KindTotals,
        changed: threading.Condition,
    ) -> None:
        self.kind = kind
        self._sock = sock
        self._sender = sender
        self._executor = executor
        self._totals = totals
        self._changed = changed  # notified at the end
        self._free = FreeSlots(sock, slots.num_slots)
        self._num_slots = slots.num_slots
        self._slot_bytes = slots.slot_bytes
        self._ended = ""
        self._broken: OSError | None = None  # why no more pieces can be sent
        self._moved_at = 0.0  # when the previous piece was finished
        self._unfinished: deque[float] = deque()  # when each unfinished piece was started
        self._over = threading.Event()
        sock.settimeout(None)
        self._ending = threading.Thread(target=self._await_peers_end, name="kv-end", daemon=True)
        self._ending.start()
        watch(sock, peer, self._over, self._unfinished_since, _STUCK_SECONDS, self._give_up)

    def has_capacity(self) -> bool:
        """Returns whether a slot is free and no slot's last piece is unfinished; both share one SlotCopy."""
        return self._any_free() and len(self._unfinished) < self._num_slots

    def starts_at_once(self, outbound: Outbound) -> bool:
        return self._sender.announces_first and outbound.conversion is None and not outbound.checksum

    def wait_for_capacity(self) -> None:
        deadline = time.monotonic() + SEND_SECONDS
        while not self._any_free():
            self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the receiver returned none of {self._num_slots} slots in {SEND_SECONDS:g} s")
            self._wait_briefly(left)

    def start(self, outbound: Outbound, piece: Piece) -> StartedPiece:
        self._check()
        conversion = outbound.conversion
        if conversion is None:
            block_bytes = self._executor.kv_spec.layer_bytes(piece.layer)
        else:
            block_bytes = conversion.layer_bytes(piece.layer)
        num_bytes = piece.num_blocks * piece.num_layers * block_bytes
        if num_bytes > self._slot_bytes:
            raise Mismatch(f"a piece has {num_bytes} bytes; the receiver's slots have {self._slot_bytes}")
        slot = self._free.take()
        header = header_of(outbound, piece, num_bytes, None, slot)
        if outbound.checksum:
            # Of the blocks, not of the bytes that the transport moves. Computed before the copy starts: work that the
            # copy queues may block the device until the receiver is notified (as while kernel code is loaded).
            header = header.with_checksum(checksum_of(*read_piece(self._executor, piece, conversion)))
        started = time.monotonic()
        self._unfinished.append(started)
        brief = self._sender.announces_first and len(self._unfinished) == 1 and num_bytes <= _BRIEF_BYTES
        if brief:
            self._announce(header)
        announce = no_announcement if brief else lambda: self._announce(header)
        pending = self._sender.put(piece, slot, conversion, announce)
        return _InSlot(header, pending, started, num_bytes)

    def _announce(self, header: PieceHeader) -> None:
        """Announces a piece. `finish` raises errors of this: the copy may have started, and must be awaited."""
        try:
            self._sock.sendall(encode_piece(header))
        except OSError as error:
            self._broken = error

    def is_due(self, started_piece: StartedPiece) -> bool:
        assert isinstance(started_piece, _InSlot)
        return not self._sender.announces_first and has_ended(started_piece.pending)

    def await_end(self, started_piece: StartedPiece) -> bool:
        """Polls: a slot usually returns before the next copy ends, and a wait in the device would not see it."""
        assert isinstance(started_piece, _InSlot)
        deadline = started_piece.started + SEND_SECONDS
        while self._sender.announces_first and not (self._ended or has_ended(started_piece.pending)):
            if self.has_capacity():
                return False
            if time.monotonic() >= deadline:
                break
            self._wait_briefly(_CHECK_SECONDS)
        return True

    def finish(self, started_piece: StartedPiece) -> None:
        assert isinstance(started_piece, _InSlot)
        deadline = started_piece.started + SEND_SECONDS
        while not started_piece.pending.wait(_WAIT_SECONDS):
            self._check()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"a piece was not copied in {SEND_SECONDS:g} s")
        self._unfinished.popleft()
        self._check_unbroken()
        now = time.monotonic()
        seconds = now - max(started_piece.started, self._moved_at)
        self._moved_at = now
        if not self._sender.announces_first:
            self._announce(started_piece.header.copied_in(seconds))
            self._check_unbroken()
        self._totals.sent(started_piece.num_bytes, seconds)

    def settle(self, started_piece: StartedPiece) -> None:
        """Waits without a limit, because the connection and its slots must exist while the copy may run."""
        assert isinstance(started_piece, _InSlot)
        try:
            while not started_piece.pending.wait(_WAIT_SECONDS):
                pass
        except Exception:  # the copy has ended, with an error
            return

    def ended(self) -> bool:
        return bool(self._ended)

    def cut(self) -> None:
        self._sender.abort()
        # Only this direction: the receiver takes the end of the other for the end of every copy.
        shut_down(self._sock, socket.SHUT_RD)
        with self._changed:
            self._ended = self._ended or "the connection was cut"
            self._changed.notify_all()

    def close(self) -> None:
        self._over.set()
        self._sender.close()
        shut_down(self._sock)
        self._ending.join(_JOIN_SECONDS)
        self._sock.close()

    def _check(self) -> None:
        if self._ended:
            raise ConnectionError(self._ended)

    def _check_unbroken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _unfinished_since(self) -> float:
        """Returns when the oldest unfinished piece was started; 0: there is none."""
        try:
            return self._unfinished[0]
        except IndexError:
            return 0.0

    def _give_up(self) -> None:
        """Gives pieces up without the connection's lock: a thread that is stuck in a device call may hold it."""
        self._broken = TimeoutError("a piece was given up: its copy made no progress")
        self._sender.abort()

    def _any_free(self) -> bool:
        try:
            return self._free.any()
        except (OSError, DataLoss) as error:
            self._ended = self._ended or str(error)
            shut_down(self._sock, socket.SHUT_RD)  # the thread that awaits the peer's end does the rest
            return False

    def _wait_briefly(self, seconds: float) -> None:
        """Waits for a byte of the receiver, at most `seconds`. Spins while a slot is likely to return at once."""
        last = max(self._moved_at, self._unfinished[-1]) if self._unfinished else self._moved_at
        if time.monotonic() - last < _SPIN_SECONDS:
            os.sched_yield()  # even sleep(0) takes tens of microseconds
        else:
            readable(self._sock, seconds)

    def _await_peers_end(self) -> None:
        wait_for_peers_end(self._sock)
        with self._changed:
            self._ended = self._ended or "the peer ended the connection"
            self._changed.notify_all()
        self._sender.abort()


def header_of(outbound: Outbound, piece: Piece, num_bytes: int, checksum: int | None, slot: int | None) -> PieceHeader:
    """Returns the header of a piece."""
    return PieceHeader(
        transfer_id=outbound.transfer_id,
        generation=outbound.generation,
        receiver_epoch=outbound.receiver_epoch,
        layer=piece.layer,
        first_index=piece.first_index,
        num_blocks=piece.num_blocks,
        num_bytes=num_bytes,
        checksum=checksum,
        num_layers=piece.num_layers,
        heads=None if outbound.conversion is None else outbound.conversion.heads(piece.layer),
        slot=slot,
    )
