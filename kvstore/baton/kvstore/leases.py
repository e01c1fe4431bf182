"""How long each worker may be unheard of. Knows no index and no stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Leases:
    """One timer a worker, which renewals do not touch: it looks at the last one when it fires."""

    def __init__(self, seconds: float, on_expired: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._on_expired = on_expired
        self._heard: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def renew(self, worker_id: str) -> None:
        """The worker was heard of now."""
        loop = asyncio.get_running_loop()
        self._heard[worker_id] = loop.time()
        if worker_id not in self._timers:
            self._arm(loop, worker_id, self._seconds)

    def close(self) -> None:
        """Nothing expires any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _arm(self, loop: asyncio.AbstractEventLoop, worker_id: str, seconds: float) -> None:
        self._timers[worker_id] = loop.call_later(seconds, self._look, loop, worker_id)

    def _look(self, loop: asyncio.AbstractEventLoop, worker_id: str) -> None:
        left = self._heard[worker_id] + self._seconds - loop.time()
        if left > 0:
            self._arm(loop, worker_id, left)
            return
        del self._timers[worker_id], self._heard[worker_id]
        self._on_expired(worker_id)
