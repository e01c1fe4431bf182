"""Gives up pieces that a connection's own thread cannot: it may be in a call of the device's.

Such a call waits, for memory to be freed or code to be loaded, until the device has done all that it has; and a kernel
that receives waits for bytes, one that sends for whoever takes them. Where that never comes, only another thread can
say so.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable

from baton.worker.transfer.wire.sockets import Connection

_log = logging.getLogger(__name__)

_LOST_SECONDS = 1.0  # in which the connection's thread sees itself that the peer is gone
_NAP_SECONDS = 0.5


def watch(
    sock: Connection,
    peer: str,
    over: threading.Event,
    turned_at: Callable[[], float],
    seconds: float,
    abort: Callable[[], None],
) -> None:
    """Calls `abort`, on a thread of its own, where pieces are not over soon after the peer has gone, or stand still.

    `turned_at`: when the connection's thread last saw to pieces that are on their way, by the monotonic clock; 0: none
    are. `seconds`: that it may be away from them. All ends when the connection is `over`.
    """
    end = select.poll()
    end.register(sock, select.POLLRDHUP)

    def run() -> None:
        gone_at, num_seen = 0.0, 0
        while not over.wait(_NAP_SECONDS):
            now, at = time.monotonic(), turned_at()
            if not gone_at and end.poll(0):
                gone_at = now
            stands = at and (now - at > seconds or (gone_at and now - gone_at > _LOST_SECONDS))
            num_seen = num_seen + 1 if stands else 0
            if num_seen > 1:  # after the first, a process that was stopped itself sees to its pieces
                _log.warning("pieces on the way from or to %s are given up: they wait for what does not come", peer)
                abort()
                return

    threading.Thread(target=run, name=f"kv-watch-{peer}", daemon=True).start()
