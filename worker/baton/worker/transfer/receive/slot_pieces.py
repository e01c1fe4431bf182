"""Step 3 of receiving, under ipc, nccl and rdma: copies pieces from their slots into the blocks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass

from baton.rpc.errors import DataLoss, InternalError
from baton.worker.transfer.bulk import BulkReceiver, SlotCopy, has_ended
from baton.worker.transfer.receive.coverage import Part
from baton.worker.transfer.receive.open_transfers import OpenTransfer
from baton.worker.transfer.receive.pieces import PieceAdmission, receive_header
from baton.worker.transfer.wire.frames import PieceHeader, encode_credit
from baton.worker.transfer.wire.sockets import Connection, readable
from baton.worker.transfer.wire.stall_watchdog import watch

_log = logging.getLogger(__name__)

_WRITE_SECONDS = 5.0  # from a piece's announcement until it is in its blocks
_STUCK_SECONDS = 15.0  # without progress of the connection's thread; longer than it waits for one piece
_GONE_SECONDS = 0.25  # for a piece after the sender closed its end: by then a started copy has ended, or never will
_SPIN_SECONDS = 500e-6  # the longest that a piece takes while the transport moves well
_NAP_SECONDS = 20e-6


@dataclass(frozen=True, slots=True)
class _Writing:
    """A piece that is being copied from its slot into blocks."""

    slot: int
    header: PieceHeader
    transfer: OpenTransfer
    part: Part
    pending: SlotCopy
    began: float


class SlotPieceReceiver:
    """Implements PieceReceiver."""

    sender_writes = True

    def __init__(self, sock: Connection, peer: str, bulk: BulkReceiver, admission: PieceAdmission) -> None:
        self._sock = sock
        self._peer = peer
        self._bulk = bulk
        self._slots = bulk.slots
        self._admission = admission
        self._busy: set[int] = set()  # announced slots that were not returned to the sender yet
        self._writing: deque[_Writing] = deque()  # copies out of slots, oldest first
        self._written_at = 0.0  # when the last piece was in its blocks
        self._moved_at = time.monotonic()  # when a piece was last announced or written
        self._served_at = 0.0  # when the thread last served a pending piece; 0: none is pending
        self._over = threading.Event()

    def receive(self) -> None:
        """Receives announcements, and writes pieces in order meanwhile."""
        watch(self._sock, self._peer, self._over, lambda: self._served_at, _STUCK_SECONDS, self._bulk.abort)
        announced: deque[tuple[int, PieceHeader]] = deque()
        bulk, writing = self._bulk, self._writing
        ended = False
        while announced or writing or not ended:
            self._served_at = time.monotonic() if announced or writing else 0.0
            if writing and has_ended(writing[0].pending):  # first: the sender may wait for this slot
                self._finish_write(writing.popleft())
            elif not ended and (not (announced or writing or self._spins()) or readable(self._sock, 0)):
                header = receive_header(self._sock)
                ended = header is None
                if header is not None:
                    slot = self._announced(header)
                    if bulk.writes_ahead and header.checksum is None and not announced:
                        self._begin_write(slot, header)
                    else:
                        announced.append((slot, header))
            elif announced:
                self._begin_write(*announced.popleft())
            elif writing:
                self._wait_briefly(_GONE_SECONDS if ended else _WRITE_SECONDS)
            else:
                os.sched_yield()

    def idle_since(self) -> float | None:
        return None if self._busy or self._admission.any_open() else self._moved_at

    def cut(self) -> None:
        self._bulk.abort()

    def fail(self, reason: str) -> None:
        self._over.set()
        self._bulk.abort()
        for writing in self._writing:
            try:
                writing.pending.wait(_WRITE_SECONDS)
            except Exception as error:
                _log.debug("a piece was not written: %s", error)
            self._admission.dropped(writing.transfer)
        self._writing.clear()
        self._admission.fail(reason)

    def close(self, sender_gone: bool) -> None:
        self._bulk.close(sender_gone)

    def _spins(self) -> bool:
        """Whether to spin: the sender copies on its own thread, and a woken thread could displace it from its core."""
        recent = time.monotonic() - self._moved_at < _SPIN_SECONDS
        return recent and not self._bulk.writes_ahead and self._admission.expects_more()

    def _wait_briefly(self, limit: float) -> None:
        """Sleeps or spins; a wait in the device would not see the sender's end.

        Raises ConnectionError after `limit`.
        """
        still = time.monotonic() - self._moved_at
        if still >= limit:
            raise ConnectionError(f"an announced piece did not arrive in {limit:g} s")
        if still < _SPIN_SECONDS:
            os.sched_yield()  # even sleep(0) takes tens of microseconds
        else:
            time.sleep(_NAP_SECONDS)

    def _announced(self, header: PieceHeader) -> int:
        """Returns the announced piece's slot, and expects its bytes there."""
        self._served_at = time.monotonic()
        slot = self._slot_of(header)
        self._busy.add(slot)
        self._admission.expect(header)
        self._bulk.announced(slot, header.num_bytes)
        self._moved_at = time.monotonic()
        return slot

    def _slot_of(self, header: PieceHeader) -> int:
        slot = header.slot
        if slot is None or slot >= self._slots.num_slots or header.num_bytes > self._slots.slot_bytes:
            raise DataLoss(
                f"a piece of {header.num_bytes} bytes was announced in slot {slot}; the sender has "
                f"{self._slots.num_slots} slots of {self._slots.slot_bytes} bytes"
            )
        if slot in self._busy:
            raise DataLoss(f"a piece was announced in slot {slot}, which was not returned yet")
        return slot

    def _begin_write(self, slot: int, header: PieceHeader) -> None:
        """Starts to copy the slot into the blocks."""
        began = time.monotonic()
        if header.checksum is not None or not self._bulk.writes_ahead:
            self._bulk.take(slot, header.num_bytes)
        admitted = self._admission.admit(header, lambda: self._bulk.checksum(slot, header.num_bytes))
        if admitted is not None:
            transfer, part = admitted
            try:
                pending = self._bulk.write(slot, part.layers, transfer.block_ids(part), header.heads)
            except Exception as error:
                self._admission.spoiled(transfer, error)
            else:
                self._writing.append(_Writing(slot, header, transfer, part, pending, began))
                return
        self._give_back(slot)

    def _finish_write(self, writing: _Writing) -> None:
        """Records the piece and returns its slot to the sender."""
        header = writing.header
        try:
            if not writing.pending.wait(_WRITE_SECONDS):
                raise InternalError(f"a piece was not written to its blocks in {_WRITE_SECONDS:g} s")
        except Exception as error:
            self._admission.spoiled(writing.transfer, error)
        else:
            now = time.monotonic()
            seconds = now - max(writing.began, self._written_at)
            self._written_at = now
            self._admission.written(writing.transfer, header, writing.part, max(seconds, header.copy_micros / 1e6))
        self._moved_at = time.monotonic()
        self._give_back(writing.slot)

    def _give_back(self, slot: int) -> None:
        self._busy.discard(slot)
        self._sock.sendall(encode_credit(slot))
