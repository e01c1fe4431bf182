"""How one connection's pieces leave: their bytes after the header, or through slots of the receiver."""

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
from baton.worker.transfer.piece_bytes import read_piece
from baton.worker.transfer.send.background import BackgroundThread, Result
from baton.worker.transfer.send.free_slots import FreeSlots
from baton.worker.transfer.totals import KindTotals
from baton.worker.transfer.wire.checksum import checksum_of
from baton.worker.transfer.wire.frames import PieceHeader, encode_piece
from baton.worker.transfer.wire.sockets import Connection, await_peers_end, readable, send_all, shut_down, worn
from baton.worker.transfer.wire.stall_watchdog import watch

SEND_SECONDS = 5.0  # for one piece, or for a slot to become free
_STUCK_SECONDS = SEND_SECONDS + 1.0  # until a piece is given up that the link's thread should have given up
_NUM_READ_AHEAD = 2
_WAIT_SECONDS = 0.25
_BRIEF_BYTES = 64 << 20  # whose copy is over before the receiver is ready for it, where none is before it
_SPIN_SECONDS = 500e-6  # that a slot takes at most to come back while all moves well
_LOOK_SECONDS = 1e-3  # until a copy is seen to have ended whose slot does not come back
_JOIN_SECONDS = 2.0


class StartedPiece(Protocol):
    """A piece that was started."""

    num_bytes: int


class PieceSender(Protocol):
    """An established connection, as its link's thread sees it. `cut` and `ended` are for any thread."""

    kind: str  # the transport's name

    def room(self) -> bool:
        """Whether a piece can be started."""

    def starts_at_once(self, outbound: Outbound) -> bool:
        """Whether `start` waits for nothing, so that any thread may call it where no other does."""

    def wait_for_room(self) -> None:
        """Raises TimeoutError where the receiver makes none."""

    def start(self, outbound: Outbound, piece: Piece) -> StartedPiece:
        """Begins to read the piece's blocks, and perhaps to move them."""

    def is_due(self, started_piece: StartedPiece) -> bool:
        """Whether the receiver could hear of the oldest piece now, and does so by `finish` alone."""

    def await_end(self, started_piece: StartedPiece) -> bool:
        """Waits until the oldest piece can be finished, or there is room for another. Whether to finish it."""

    def finish(self, started_piece: StartedPiece) -> None:
        """Returns when the oldest piece is on its way and its blocks are not read any more. Raises OSError."""

    def settle(self, started_piece: StartedPiece) -> None:
        """After a cut: returns when the piece's blocks are not read any more."""

    def ended(self) -> bool:
        """Whether the receiver closed its end."""

    def cut(self) -> None:
        """Makes everything end soon."""

    def close(self) -> None:
        """After the last piece is finished or settled."""


@dataclass(slots=True)
class _Inline:
    header: Callable[[int, int | None], PieceHeader]
    data: Result[tuple[list[memoryview], int | None]]
    num_bytes: int = 0


class InlinePieceSender:
    """The bytes follow the header. Blocks that must be copied out first are, while the piece before is sent."""

    kind = "tcp"

    def __init__(self, sock: Connection, executor: Executor, totals: KindTotals) -> None:
        self._sock = sock
        self._executor = executor
        self._totals = totals
        self._ahead = BackgroundThread("kv-read")
        self._num_started = 0

    def room(self) -> bool:
        return self._num_started < _NUM_READ_AHEAD

    def starts_at_once(self, outbound: Outbound) -> bool:
        return False

    def wait_for_room(self) -> None:
        raise AssertionError("there is room when nothing is on its way")

    def start(self, outbound: Outbound, piece: Piece) -> StartedPiece:
        def read() -> tuple[list[memoryview], int | None]:
            data = read_piece(self._executor, piece, outbound.conversion)
            return data, checksum_of(*data) if outbound.checksum else None

        in_place = outbound.conversion is None and self._executor.kv_bytes is not None
        data = Result.of(read) if in_place else self._ahead.run(read)
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
        return readable(self._sock, 0) or worn(self._sock)

    def cut(self) -> None:
        shut_down(self._sock)

    def close(self) -> None:
        self._ahead.close()
        self._sock.close()


@dataclass(slots=True)
class _InSlot:
    header: PieceHeader
    pending: SlotCopy
    started: float
    num_bytes: int


class SlotPieceSender:
    """Pieces go into slots; the header says which. A thread of its own hears of the connection's end."""

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
        self._changed = changed  # notified of the end
        self._free = FreeSlots(sock, slots.num_slots)
        self._num_slots = slots.num_slots
        self._slot_bytes = slots.slot_bytes
        self._ended = ""
        self._broken: OSError | None = None  # why no piece leaves any more
        self._moved_at = 0.0  # when the piece before was done
        self._on_way: deque[float] = deque()  # when each piece was started that is not finished
        self._over = threading.Event()
        sock.settimeout(None)
        self._ending = threading.Thread(target=self._see_end, name="kv-end", daemon=True)
        self._ending.start()
        watch(sock, peer, self._over, self._on_way_since, _STUCK_SECONDS, self._give_up)

    def room(self) -> bool:
        """A slot that is free again, and whose piece is finished: their copies are one, which would wait for both."""
        return self._any_free() and len(self._on_way) < self._num_slots

    def starts_at_once(self, outbound: Outbound) -> bool:
        return self._sender.announces_first and outbound.conversion is None and not outbound.checksum

    def wait_for_room(self) -> None:
        deadline = time.monotonic() + SEND_SECONDS
        while not self._any_free():
            self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the receiver gave none of {self._num_slots} slots back in {SEND_SECONDS:g} s")
            self._nap(left)

    def start(self, outbound: Outbound, piece: Piece) -> StartedPiece:
        self._check()
        conversion = outbound.conversion
        if conversion is None:
            block_bytes = self._executor.kv_spec.layer_bytes(piece.layer)
        else:
            block_bytes = conversion.layer_bytes(piece.layer)
        num_bytes = piece.num_blocks * piece.num_layers * block_bytes
        if num_bytes > self._slot_bytes:
            raise Mismatch(f"a piece has {num_bytes} bytes, the receiver's slots {self._slot_bytes}")
        slot = self._free.take()
        header = header_of(outbound, piece, num_bytes, None, slot)
        if outbound.checksum:
            # Of the blocks, not of what the transport moves. Before it moves: what it queues on a device may hold up
            # all that the device does until the receiver has heard of the piece (as while a kernel's code is loaded).
            header = header.with_checksum(checksum_of(*read_piece(self._executor, piece, conversion)))
        started = time.monotonic()
        self._on_way.append(started)
        brief = self._sender.announces_first and len(self._on_way) == 1 and num_bytes <= _BRIEF_BYTES
        if brief:
            self._announce(header)
        announce = no_announcement if brief else lambda: self._announce(header)
        pending = self._sender.put(piece, slot, conversion, announce)
        return _InSlot(header, pending, started, num_bytes)

    def _announce(self, header: PieceHeader) -> None:
        """What goes wrong is raised by `finish`: the copy may be under way, and must be waited for."""
        try:
            self._sock.sendall(encode_piece(header))
        except OSError as error:
            self._broken = error

    def is_due(self, started_piece: StartedPiece) -> bool:
        assert isinstance(started_piece, _InSlot)
        return not self._sender.announces_first and has_ended(started_piece.pending)

    def await_end(self, started_piece: StartedPiece) -> bool:
        """Not in the device's own wait: a slot mostly comes back before the next copy's end, and must find us awake."""
        assert isinstance(started_piece, _InSlot)
        deadline = started_piece.started + SEND_SECONDS
        while self._sender.announces_first and not (self._ended or has_ended(started_piece.pending)):
            if self.room():
                return False
            if time.monotonic() >= deadline:
                break
            self._nap(_LOOK_SECONDS)
        return True

    def finish(self, started_piece: StartedPiece) -> None:
        assert isinstance(started_piece, _InSlot)
        deadline = started_piece.started + SEND_SECONDS
        while not started_piece.pending.wait(_WAIT_SECONDS):
            self._check()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"a piece was not copied in {SEND_SECONDS:g} s")
        self._on_way.popleft()
        self._check_unbroken()
        now = time.monotonic()
        seconds = now - max(started_piece.started, self._moved_at)
        self._moved_at = now
        if not self._sender.announces_first:
            self._announce(started_piece.header.copied_in(seconds))
            self._check_unbroken()
        self._totals.sent(started_piece.num_bytes, seconds)

    def settle(self, started_piece: StartedPiece) -> None:
        """However long it takes: while the copy may go on, the connection stays, and with it the slots."""
        assert isinstance(started_piece, _InSlot)
        try:
            while not started_piece.pending.wait(_WAIT_SECONDS):
                pass
        except Exception:  # it ended badly: it ended
            return

    def ended(self) -> bool:
        return bool(self._ended)

    def cut(self) -> None:
        self._sender.abort()
        # Not the other direction: the receiver takes its end for the end of every copy.
        shut_down(self._sock, socket.SHUT_RD)
        with self._changed:
            self._ended = self._ended or "the connection is cut"
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

    def _on_way_since(self) -> float:
        """When the piece was started that is to be finished next; 0: none was."""
        try:
            return self._on_way[0]
        except IndexError:
            return 0.0

    def _give_up(self) -> None:
        """Waits for nobody: whoever starts a piece, perhaps in a call of the device's, has the link's lock."""
        self._broken = TimeoutError("a piece was given up: its copy stood still")
        self._sender.abort()

    def _any_free(self) -> bool:
        try:
            return self._free.any()
        except (OSError, DataLoss) as error:
            self._ended = self._ended or str(error)
            shut_down(self._sock, socket.SHUT_RD)  # the thread that sees the end does the rest
            return False

    def _nap(self, seconds: float) -> None:
        """Until something comes of the receiver, or so long; less, and awake, while a slot is to come back at once."""
        last = max(self._moved_at, self._on_way[-1]) if self._on_way else self._moved_at
        if time.monotonic() - last < _SPIN_SECONDS:
            os.sched_yield()  # a sleep of no time takes tens of microseconds
        else:
            readable(self._sock, seconds)

    def _see_end(self) -> None:
        await_peers_end(self._sock)
        with self._changed:
            self._ended = self._ended or "the peer ended the connection"
            self._changed.notify_all()
        self._sender.abort()


def header_of(outbound: Outbound, piece: Piece, num_bytes: int, checksum: int | None, slot: int | None) -> PieceHeader:
    """What is said of a piece."""
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
