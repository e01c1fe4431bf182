"""The workers' leases: a worker without a message is silent after its lease and expired after the retention. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Lease:
    heard: float
    is_silent: bool
    timer: asyncio.TimerHandle


class Leases:
    """One timer per worker. Renewals only store the time, which the timer checks when it fires."""

    def __init__(
        self,
        seconds: float,
        retention_seconds: float,
        on_silent: Callable[[str], None],
        on_expired: Callable[[str], None],
    ) -> None:
        self._seconds = seconds
        self._retention_seconds = retention_seconds
        self._on_silent = on_silent
        self._on_expired = on_expired
        self._leases: dict[str, _Lease] = {}

    def renew(self, worker_id: str) -> None:
        """Starts a new lease for the worker."""
        loop = asyncio.get_running_loop()
        lease = self._leases.get(worker_id)
        if lease is None or lease.is_silent:
            self.end(worker_id)
            self._begin(loop, worker_id, self._seconds, False)
        else:
            lease.heard = loop.time()

    def begin_silent(self, worker_id: str) -> None:
        """Starts the retention of a silent worker."""
        self.end(worker_id)
        self._begin(asyncio.get_running_loop(), worker_id, self._retention_seconds, True)

    def end(self, worker_id: str) -> None:
        """Drops the worker's lease without a callback."""
        lease = self._leases.pop(worker_id, None)
        if lease is not None:
            lease.timer.cancel()

    def close(self) -> None:
        """Drops all leases without a callback."""
        for worker_id in list(self._leases):
            self.end(worker_id)

    def _begin(self, loop: asyncio.AbstractEventLoop, worker_id: str, seconds: float, is_silent: bool) -> None:
        timer = loop.call_later(seconds, self._on_timer, loop, worker_id)
        self._leases[worker_id] = _Lease(loop.time(), is_silent, timer)

    def _on_timer(self, loop: asyncio.AbstractEventLoop, worker_id: str) -> None:
        lease = self._leases[worker_id]
        if lease.is_silent:
            del self._leases[worker_id]
            self._on_expired(worker_id)
            return
        left = lease.heard + self._seconds - loop.time()
        if left > 0:
            lease.timer = loop.call_later(left, self._on_timer, loop, worker_id)
            return
        self._begin(loop, worker_id, self._retention_seconds, True)
        self._on_silent(worker_id)
