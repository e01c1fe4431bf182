"""Gives up pieces that a connection's own thread cannot: it may be in a call of the device's.

Such a call waits, for memory to be freed or code to be loaded, until the device has done all that it has; and a kernel
that receives waits for bytes. Where these never come, only another thread can say so.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable

from baton.worker.transfer.sockets import Connection

_log = logging.getLogger(__name__)

_LOST_SECONDS = 1.0  # in which the connection's thread sees itself that the sender is gone
_STUCK_SECONDS = 15.0  # that it may be away from its pieces: longer than it waits for any of them
_NAP_SECONDS = 0.5


def watch(
    sock: Connection, peer: str, over: threading.Event, turned_at: Callable[[], float], abort: Callable[[], None]
) -> None:
    """Calls `abort`, on a thread of its own, where the connection is not over soon after its sender has gone, or stands
    still. `turned_at`: when its thread last saw to pieces that are on their way, by the monotonic clock; 0: none are.
    """
    sender = select.poll()
    sender.register(sock, select.POLLRDHUP)

    def run() -> None:
        gone_at = 0.0
        while not over.wait(_NAP_SECONDS):
            now = time.monotonic()
            if not gone_at and sender.poll(0):
                gone_at = now
            at = turned_at()
            if (gone_at and now - gone_at > _LOST_SECONDS) or (at and now - at > _STUCK_SECONDS):
                _log.warning("pieces of %s are given up: they wait for what does not come", peer)
                abort()
                return

    threading.Thread(target=run, name=f"kv-watch-{peer}", daemon=True).start()
