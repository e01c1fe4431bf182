"""Receives a piece straight into its blocks, taking what is there, so that a fence never waits for a peer."""

from __future__ import annotations

import socket
from collections.abc import Callable

from baton.worker.transfer.coverage import Part
from baton.worker.transfer.inbound import InboundTransfers, OpenTransfer
from baton.worker.transfer.sockets import MAX_BUFFERS, readable, skip


def receive_into(
    sock: socket.socket,
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
    taken, first = 0, 0
    while left:
        if not transfers.enter(transfer):
            return taken
        count: int | None = 0
        try:
            count = _receive(sock, views[first : first + MAX_BUFFERS])
        finally:
            left -= count or 0
            if not left:
                landing()
            transfers.leave(transfer, count or 0, part if not left else None)
        if count is None:
            if not readable(sock, seconds):
                raise ConnectionError(f"nothing of a piece came for {seconds:g} s")
            continue
        if not count:
            raise ConnectionError("it ended within a piece")
        taken += count
        first = skip(views, first, count)
    return taken


def _receive(sock: socket.socket, views: list[memoryview]) -> int | None:
    """What is there. None: nothing yet. 0: the end."""
    try:
        return sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
    except BlockingIOError:
        return None
