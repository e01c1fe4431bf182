"""Receives a piece straight into its blocks, taking what is there, so that a fence never waits for a peer."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from baton.worker.transfer.receive.coverage import Part
from baton.worker.transfer.receive.open_transfers import InboundTransfers, OpenTransfer
from baton.worker.transfer.wire.sockets import MAX_BUFFERS, Connection, readable, skip

_WAKE_BYTES = 512 << 10  # that are there before the thread is woken,
_WAKE_SECONDS = 0.05  # or so much later, whatever is there


def receive_into(
    sock: Connection,
    views: list[memoryview],
    transfers: InboundTransfers,
    transfer: OpenTransfer,
    part: Part,
    landing: Callable[[], None],
    seconds: float,
) -> int:
    """Fills the views from the socket, and lands the piece. Returns how many bytes were taken: all, or it was fenced.

    `landing` is called when all are there, before anybody hears of it.
    Raises ConnectionError where the peer ends the connection, or sends nothing for so many seconds.
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
                count = _receive(sock, views[first : first + MAX_BUFFERS])
                left -= count
                if not left:
                    landing()
            finally:
                transfers.leave(transfer, count, part if not left else None)
            if count:
                moved_at = time.monotonic()
            elif time.monotonic() >= moved_at + seconds:
                raise ConnectionError(f"nothing of a piece came for {seconds:g} s")
            taken += count
            first = skip(views, first, count)
    finally:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    return taken


def _receive(sock: Connection, views: list[memoryview]) -> int:
    """What is there; 0: nothing yet after all. Raises ConnectionError at the end."""
    try:
        count = sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
    except BlockingIOError:
        return 0
    if not count:
        raise ConnectionError("it ended within a piece")
    return count
