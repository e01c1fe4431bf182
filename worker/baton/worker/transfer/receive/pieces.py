"""Step 3 of receiving, the part that all transports share: reads piece headers, and decides which pieces to write.

Bytes of a transfer that is not open, or with another generation or epoch, are drained and never written.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Protocol

from baton.rpc.errors import DataLoss
from baton.worker.transfer.receive.coverage import Part
from baton.worker.transfer.receive.open_transfers import OpenTransfer, OpenTransfers
from baton.worker.transfer.totals import KindTotals
from baton.worker.transfer.wire.frames import PIECE_BYTES, PieceHeader, decode_piece
from baton.worker.transfer.wire.sockets import Connection

_log = logging.getLogger(__name__)

BODY_SECONDS = 30.0  # limit of a socket read within a piece
_IDLE_PERIODS = 20  # times BODY_SECONDS without a piece, after which a connection is closed
_MANY = 1000  # transfers of one connection before ended ones are dropped


class PieceReceiver(Protocol):
    """Receives the pieces of one connection. Runs on its thread; `idle_since` and `cut` are for any thread."""

    sender_writes: bool  # the sender writes our memory, even after the connection ended

    def receive(self) -> None:
        """Receives until the sender has no more pieces.

        Raises DataLoss for invalid data, OSError if nothing arrives.
        """

    def idle_since(self) -> float | None:
        """Returns when a piece was last received, by the monotonic clock. None: more pieces are expected."""

    def cut(self) -> None:
        """Ends all waits."""

    def fail(self, reason: str) -> None:
        """Fails the open transfers of this connection. Returns when nothing more is written."""

    def close(self, sender_gone: bool) -> None:
        """Frees the slots. `sender_gone`: the sender can no longer write them."""


def receive_header(sock: Connection) -> PieceHeader | None:
    """Reads the next header. None: the peer ended the connection between two pieces, or was idle too long."""
    data = bytearray(PIECE_BYTES)
    view = memoryview(data)
    num_idle = 0
    while view:
        try:
            count = sock.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            num_idle += 1
            if len(view) < PIECE_BYTES:
                raise DataLoss("a piece's header is incomplete") from None
            if num_idle >= _IDLE_PERIODS:
                return None
            continue
        if count == 0:
            if len(view) < PIECE_BYTES:
                raise ConnectionError("the connection ended within a header")
            return None
        view = view[count:]
    return decode_piece(data)


class ConnectionTransfers:
    """The transfers that one connection carried pieces of. Used by its thread; `any_open` is for any thread."""

    def __init__(self, transfers: OpenTransfers) -> None:
        self._transfers = transfers
        self._ids: set[int] = set()
        self._last_id: int | None = None

    def add(self, transfer_id: int) -> None:
        """Adds a transfer. Drops ended ones from time to time."""
        self._ids.add(transfer_id)
        self._last_id = transfer_id
        if len(self._ids) > _MANY:
            self._ids = {known for known in self._ids if self._transfers.is_open(known)}

    def any_open(self) -> bool:
        """Returns whether any of the transfers expects more pieces."""
        return any(self._transfers.is_open(transfer_id) for transfer_id in tuple(self._ids))

    def last_is_open(self) -> bool:
        """Returns whether the transfer of the last piece expects more."""
        return self._last_id is not None and self._transfers.is_open(self._last_id)

    def fail(self, reason: str) -> None:
        """Fails all open transfers."""
        for transfer_id in self._ids:
            self._transfers.fail(transfer_id, reason)


class PieceAdmission:
    """Decides which pieces of one connection are written, and fails their transfers."""

    def __init__(self, peer: str, transfers: OpenTransfers, totals: KindTotals) -> None:
        self._peer = peer
        self._transfers = transfers
        self._totals = totals
        self._involved = ConnectionTransfers(transfers)

    def expect(self, header: PieceHeader) -> None:
        """Adds the transfer of an announced piece: it fails if the connection does."""
        if self._transfers.find(header) is not None:
            self._involved.add(header.transfer_id)

    def any_open(self) -> bool:
        """Returns whether more pieces are expected. For any thread."""
        return self._involved.any_open()

    def expects_more(self) -> bool:
        """Returns whether the next piece is likely to follow at once: the last one's transfer expects more."""
        return self._involved.last_is_open()

    def admit(self, header: PieceHeader, checksum: Callable[[], int]) -> tuple[OpenTransfer, Part] | None:
        """Checks a received piece and enters its transfer. Returns where to write it, None: nowhere."""
        transfer = self._transfers.find(header)
        if transfer is None:
            self._totals.stray()
            return None
        if header.checksum is not None and header.checksum != checksum():
            self._involved.add(header.transfer_id)
            self._totals.corrupt()
            problem = f"the checksum of layer {header.layer}, block {header.first_index} does not match"
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
        """Claims the piece's part. None: the piece is invalid, and its transfer has failed."""
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
        """Records that an admitted piece is in its blocks."""
        # Counted first: the report of a landed transfer reads which transports have received bytes.
        self._totals.received(header.num_bytes, seconds)
        self._transfers.leave(transfer, header.num_bytes, part)

    def spoiled(self, transfer: OpenTransfer, error: Exception) -> None:
        """Records that an admitted piece could not be written; its transfer fails."""
        defect = not isinstance(error, DataLoss)
        level = logging.ERROR if defect else logging.WARNING
        _log.log(level, "a piece of %s could not be written: %s", self._peer, error, exc_info=error if defect else None)
        self._transfers.leave(transfer, 0, None)
        self._transfers.fail(transfer.inbound.transfer_id, f"a piece could not be written: {error}")

    def dropped(self, transfer: OpenTransfer) -> None:
        """Leaves the transfer of an admitted piece that will not be written, or not be reported."""
        self._transfers.leave(transfer, 0, None)

    def fail(self, reason: str) -> None:
        """Fails the open transfers of this connection."""
        self._involved.fail(f"{self._peer}: {reason}")
