"""Gives pieces up when the connection's own thread is stuck in a device call.

Such a call (to free memory, to load code) waits for all work of the device. A kernel that receives waits for the peer's
bytes, and one that sends waits for the peer to receive. If the peer never does, only another thread can end the wait.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable

from baton.worker.transfer.wire.sockets import Connection

_log = logging.getLogger(__name__)

_LOST_SECONDS = 1.0  # for the connection's thread to see by itself that the peer is gone
_NAP_SECONDS = 0.5


def watch(
    sock: Connection,
    peer: str,
    over: threading.Event,
    served_at: Callable[[], float],
    seconds: float,
    abort: Callable[[], None],
) -> None:
    """Calls `abort`, on a thread of its own, if pieces make no progress or do not end soon after the peer is gone.

    `served_at`: when the connection's thread last served pending pieces, by the monotonic clock; 0: none is pending.
    `seconds`: the longest time that it may not serve them. Ends when `over` is set.
    """
    end = select.poll()
    end.register(sock, select.POLLRDHUP)

    def run() -> None:
        gone_at, num_seen = 0.0, 0
        while not over.wait(_NAP_SECONDS):
            now, at = time.monotonic(), served_at()
            if not gone_at and end.poll(0):
                gone_at = now
            stands = at and (now - at > seconds or (gone_at and now - gone_at > _LOST_SECONDS))
            num_seen = num_seen + 1 if stands else 0
            if num_seen > 1:  # twice: a process that was suspended first serves its own pieces
                _log.warning("pieces to or from %s are given up: their transport makes no progress", peer)
                abort()
                return

    threading.Thread(target=run, name=f"kv-watch-{peer}", daemon=True).start()
