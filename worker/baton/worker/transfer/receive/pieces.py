"""What the ways in which pieces come over a connection have in common: headers, and who lets a piece be written.

Bytes of a transfer that is not open, or that do not carry its generation and epoch, are drained and never written.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Protocol

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockId
from baton.worker.transfer.receive.coverage import Part
from baton.worker.transfer.receive.open_transfers import OpenTransfer, OpenTransfers
from baton.worker.transfer.totals import KindTotals
from baton.worker.transfer.wire.frames import PIECE_BYTES, PieceHeader, decode_piece
from baton.worker.transfer.wire.sockets import Connection

_log = logging.getLogger(__name__)

BODY_SECONDS = 30.0  # without a byte of a piece that has begun: what limits the socket's receives
_IDLE_PERIODS = 20  # of BODY_SECONDS without a piece, until a connection is closed
_MANY = 1000  # transfers of one connection


class PieceReceiver(Protocol):
    """One connection's pieces. Belongs to its thread, but for `idle_since` and `cut`."""

    sender_writes: bool  # into memory of ours, whatever becomes of the connection

    def receive(self) -> None:
        """Until the sender has no more. Raises DataLoss for what makes no sense, OSError where nothing comes."""

    def idle_since(self) -> float | None:
        """When a piece last came, by the monotonic clock. None: more are to come."""

    def cut(self) -> None:
        """Nothing is waited for any more."""

    def fail(self, reason: str) -> None:
        """Nothing is written any more when it returns, and the open transfers that pieces came for have failed."""

    def close(self, sender_gone: bool) -> None:
        """Gives back what held the pieces. `sender_gone`: the sender writes there no more."""


def receive_header(sock: Connection) -> PieceHeader | None:
    """None: the peer ended the connection between two pieces, or was idle for long."""
    data = bytearray(PIECE_BYTES)
    view = memoryview(data)
    num_idle = 0
    while view:
        try:
            count = sock.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            num_idle += 1
            if len(view) < PIECE_BYTES:
                raise DataLoss("a piece's header did not come to its end") from None
            if num_idle >= _IDLE_PERIODS:
                return None
            continue
        if count == 0:
            if len(view) < PIECE_BYTES:
                raise ConnectionError("it ended within a header")
            return None
        view = view[count:]
    return decode_piece(data)


class ConnectionTransfers:
    """Transfers that one connection brought pieces of. Belongs to its thread, but for `any_open`."""

    def __init__(self, transfers: OpenTransfers) -> None:
        self._transfers = transfers
        self._ids: set[int] = set()
        self._last_id: int | None = None

    def add(self, transfer_id: int) -> None:
        """Forgets those that are over, now and then."""
        self._ids.add(transfer_id)
        self._last_id = transfer_id
        if len(self._ids) > _MANY:
            self._ids = {known for known in self._ids if self._transfers.is_open(known)}

    def any_open(self) -> bool:
        """Whether more pieces of one may come."""
        return any(self._transfers.is_open(transfer_id) for transfer_id in tuple(self._ids))

    def last_is_open(self) -> bool:
        """Whether more pieces of the one that a piece came for last may come."""
        return self._last_id is not None and self._transfers.is_open(self._last_id)

    def fail(self, reason: str) -> None:
        """All that are open have failed."""
        for transfer_id in self._ids:
            self._transfers.fail(transfer_id, reason)


class PieceAdmission:
    """Which pieces of one connection may be written, and what becomes of their transfers."""

    def __init__(self, peer: str, transfers: OpenTransfers, totals: KindTotals) -> None:
        self._peer = peer
        self._transfers = transfers
        self._totals = totals
        self._involved = ConnectionTransfers(transfers)

    def expect(self, header: PieceHeader) -> None:
        """A piece that comes: its transfer fails with the connection."""
        if self._transfers.find(header) is not None:
            self._involved.add(header.transfer_id)

    def any_open(self) -> bool:
        """Whether more pieces may come. For any thread."""
        return self._involved.any_open()

    def goes_on(self) -> bool:
        """Whether the next piece mostly comes at once: more of the last one's transfer may come."""
        return self._involved.last_is_open()

    def admit(self, header: PieceHeader, checksum: Callable[[], int]) -> tuple[OpenTransfer, Part] | None:
        """Where a piece that is here goes, entered; None where it goes nowhere."""
        transfer = self._transfers.find(header)
        if transfer is None:
            self._totals.stray()
            return None
        if header.checksum is not None and header.checksum != checksum():
            self._involved.add(header.transfer_id)
            self._totals.corrupt()
            problem = f"checksum of layer {header.layer}, block {header.first_index} does not match"
            self._transfers.fail(header.transfer_id, f"{self._peer}: {problem}", corrupt=True)
            return None
        part = self.claim(transfer, header)
        if part is None:
            return None
        if not self._transfers.enter(transfer):
            self._totals.stray()
            return None
        return transfer, part

    def claim(self, transfer: OpenTransfer, header: PieceHeader) -> Part | None:
        """None: the piece is wrong, and its transfer has failed."""
        self._involved.add(header.transfer_id)
        problem = self._transfers.problem(transfer, header)
        if not problem:
            try:
                return self._transfers.claim(transfer, header)
            except DataLoss as error:
                problem = error.message
        self._transfers.fail(header.transfer_id, f"{self._peer}: {problem}")
        return None

    def written(self, transfer: OpenTransfer, header: PieceHeader, part: Part, seconds: float) -> None:
        """A piece that was admitted is in its blocks."""
        # Counted first: who hears that all is there asks by what it came.
        self._totals.received(header.num_bytes, seconds)
        self._transfers.leave(transfer, header.num_bytes, part)

    def spoiled(self, transfer: OpenTransfer, error: Exception) -> None:
        """A piece that was admitted could not be written."""
        defect = not isinstance(error, DataLoss)
        level = logging.ERROR if defect else logging.WARNING
        _log.log(level, "a piece of %s could not be written: %s", self._peer, error, exc_info=error if defect else None)
        self._transfers.leave(transfer, 0, None)
        self._transfers.fail(transfer.inbound.transfer_id, f"a piece could not be written: {error}")

    def dropped(self, transfer: OpenTransfer) -> None:
        """A piece that was admitted is written no more, or nobody hears of it."""
        self._transfers.leave(transfer, 0, None)

    def fail(self, reason: str) -> None:
        """The open transfers that pieces came for have failed."""
        self._involved.fail(f"{self._peer}: {reason}")


def block_ids_of(transfer: OpenTransfer, part: Part) -> tuple[BlockId, ...]:
    """The receiver's blocks that a part fills."""
    return transfer.inbound.tables[part.group][part.blocks.start : part.blocks.stop]
