"""Signals that stop a process: SIGTERM, Ctrl-C or a hang-up once to drain, twice to leave at once."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

# `make`, `timeout` and shells signal a process and its group: what arrives that close is one wish, not two.
_ONE_WISH_SECONDS = 0.5


def watch_signals(stop: asyncio.Event, leave: Callable[[signal.Signals], None]) -> None:
    """Sets `stop` on the first SIGTERM, SIGINT or SIGHUP, calls `leave` on a later one.

    A SIGHUP that is ignored stays so: `nohup` asks for that.
    """
    first_at: float | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal first_at
        now = time.monotonic()
        if first_at is None:
            first_at = now
            _log.info("%s: stopping", number.name)
            stop.set()
        elif now - first_at > _ONE_WISH_SECONDS:
            leave(number)

    loop = asyncio.get_running_loop()
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
        loop.add_signal_handler(number, on_signal, number)
