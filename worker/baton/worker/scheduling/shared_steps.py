"""Limits the prompt tokens of a step while several tenants use the worker. Moves no block and starts no request.

A step that has begun cannot be interrupted: a request waits for the rest of the step that it arrives in, and for all of
the one that computes its prompt. While one tenant is alone, it may fill them; otherwise each is short, at the cost of a
few percent of the prompts' throughput.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.worker.requests.state import RequestState
from baton.worker.scheduling.queues import RequestQueues

# How long a tenant counts after its last request began or ended.
_RECENT_SECONDS = 10.0


class SharedSteps:
    """Knows which tenants use the worker. `limit`: prompt tokens of a step that several share; 0: no limit."""

    def __init__(self, queues: RequestQueues, limit: int, clock: Callable[[], float]) -> None:
        self._queues = queues
        self._limit = limit
        self._clock = clock
        self._seen: dict[str, float] = {}  # when a tenant's last request began or ended, oldest first

    def see(self, state: RequestState) -> None:
        """Records that a request begins or ends."""
        tenant = state.request.tenant
        self._seen.pop(tenant, None)
        self._seen[tenant] = self._clock()

    def budget(self, budget: int) -> int:
        """Returns how many of a step's remaining tokens may be those of prompts."""
        if not self._limit or budget <= self._limit or not self._has_prompts() or len(self._tenants()) < 2:
            return budget
        return self._limit

    def _has_prompts(self) -> bool:
        return bool(self._queues.batch.prefilling) or self._queues.num_queued > 0

    def _tenants(self) -> set[str]:
        since = self._clock() - _RECENT_SECONDS
        while self._seen and self._seen[first := next(iter(self._seen))] < since:
            del self._seen[first]
        tenants = set(self._seen)
        if len(tenants) < 2:
            tenants.update([line.tenant for line in self._queues.waiting.lines])
            tenants.update([state.request.tenant for state in self._queues.batch.running()])
        return tenants
