"""Step 3 of receiving, under tcp: pieces whose bytes follow their headers.

Reads from the socket straight into the blocks, or through a buffer if a piece has to be checked or converted first.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import DataLoss
from baton.worker.executors.base import Executor
from baton.worker.transfer.piece_bytes import block_views, in_place, write_piece
from baton.worker.transfer.receive.coverage import Part
from baton.worker.transfer.receive.open_transfers import OpenTransfer, OpenTransfers
from baton.worker.transfer.receive.pieces import BODY_SECONDS, PieceAdmission, receive_header
from baton.worker.transfer.totals import KindTotals
from baton.worker.transfer.wire.checksum import checksum_of
from baton.worker.transfer.wire.frames import PieceHeader
from baton.worker.transfer.wire.sockets import MAX_BUFFERS, Connection, readable, skip

_SCRATCH_BYTES = 1 << 20
_WAKE_BYTES = 512 << 10  # the thread is woken when so many bytes are readable,
_WAKE_SECONDS = 0.05  # or after this time


class InlinePieceReceiver:
    """Implements PieceReceiver."""

    sender_writes = False

    def __init__(
        self,
        sock: Connection,
        executor: Executor,
        transfers: OpenTransfers,
        admission: PieceAdmission,
        totals: KindTotals,
    ) -> None:
        self._sock = sock
        self._executor = executor
        self._transfers = transfers
        self._admission = admission
        self._totals = totals
        self._staging = bytearray()

    def receive(self) -> None:
        """Receives one piece at a time."""
        while (header := receive_header(self._sock)) is not None:
            self._receive_piece(header)

    def idle_since(self) -> float | None:
        """Returns None: these connections are never retired, as their number is not limited."""
        return None

    def cut(self) -> None:
        """Does nothing: the shutdown of the socket ends `receive`."""

    def fail(self, reason: str) -> None:
        self._admission.fail(reason)

    def close(self, sender_gone: bool) -> None:
        """Does nothing: there are no slots."""

    def _receive_piece(self, header: PieceHeader) -> None:
        if header.slot is not None:
            raise DataLoss(f"a piece names slot {header.slot}; this connection has no slots")
        transfer = self._transfers.find(header)
        plain = header.checksum is None and header.heads is None
        kv_bytes = in_place(self._executor, header.layer) if plain else None
        if transfer is not None and kv_bytes is not None:
            self._receive_direct(transfer, header, kv_bytes)
        else:
            self._receive_staged(header)

    def _receive_direct(
        self, transfer: OpenTransfer, header: PieceHeader, kv_bytes: Sequence[NDArray[np.uint8]]
    ) -> None:
        """Receives from the socket into the blocks."""
        part = self._admission.claim(transfer, header)
        began = time.monotonic()
        left = header.num_bytes
        if part is not None:
            views = block_views(kv_bytes, part.layers, transfer.block_ids(part))
            left -= _receive_into(
                self._sock,
                views,
                self._transfers,
                transfer,
                part,
                lambda: self._totals.received(header.num_bytes, time.monotonic() - began),
                BODY_SECONDS,
            )
        if left:
            self._drain(left)
            if part is not None:
                self._totals.stray()

    def _receive_staged(self, header: PieceHeader) -> None:
        """Receives from the socket into a buffer, and copies from there once the piece is admitted."""
        began = time.monotonic()
        if len(self._staging) < header.num_bytes:
            self._staging = bytearray(header.num_bytes)
        body = memoryview(self._staging)[: header.num_bytes]
        self._fill(body)
        seconds = time.monotonic() - began
        admitted = self._admission.admit(header, lambda: checksum_of(body))
        if admitted is None:
            return
        transfer, part = admitted
        try:
            write_piece(self._executor, body, part.layers, transfer.block_ids(part), header.heads)
        except Exception as error:
            self._admission.spoiled(transfer, error)
        else:
            self._admission.written(transfer, header, part, seconds)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionError("the connection ended within a piece")
            view = view[count:]

    def _drain(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
        while num_bytes:
            part = scratch[: min(num_bytes, len(scratch))]
            self._fill(part)
            num_bytes -= len(part)


def _receive_into(
    sock: Connection,
    views: list[memoryview],
    transfers: OpenTransfers,
    transfer: OpenTransfer,
    part: Part,
    landing: Callable[[], None],
    seconds: float,
) -> int:
    """Fills the views from the socket and lands the piece. Returns the number of bytes: all, or fewer if it was fenced.

    Reads only what is readable while it holds the transfer, so a fence never waits for the peer. Calls `landing` when
    all bytes are there, before the transfer is reported as landed. Raises ConnectionError if the peer ends the
    connection, or sends nothing for `seconds`.
    """
    left = sum(view.nbytes for view in views)
    taken, first, wake = 0, 0, 1
    moved_at = time.monotonic()
    try:
        while left:
            if wake != min(left, _WAKE_BYTES):
                wake = min(left, _WAKE_BYTES)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake)
            readable(sock, _WAKE_SECONDS)
            if not transfers.enter(transfer):
                return taken
            count = 0
            try:
                count = _receive_present(sock, views[first : first + MAX_BUFFERS])
                left -= count
                if not left:
                    landing()
            finally:
                transfers.leave(transfer, count, part if not left else None)
            if count:
                moved_at = time.monotonic()
            elif time.monotonic() >= moved_at + seconds:
                raise ConnectionError(f"no byte of a piece was received for {seconds:g} s")
            taken += count
            first = skip(views, first, count)
    finally:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    return taken


def _receive_present(sock: Connection, views: list[memoryview]) -> int:
    """Reads the bytes that are readable now; returns their number. Raises ConnectionError at the end of the stream."""
    try:
        count = sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
    except BlockingIOError:
        return 0
    if not count:
        raise ConnectionError("the connection ended within a piece")
    return count
