"""Limits the prompt tokens of a step while several tenants use the worker. Moves no block and starts no request.

A step that has begun cannot be interrupted: a request waits for the rest of the step that it arrives in, and for all of
the one that computes its prompt. While one tenant is alone, it may fill them; otherwise each is short. A step that can
finish the only prompts of some tenants holds as many tokens of the others: those wait for one more step, and each of
the former gets its first token as soon as if its prompt were computed beside its own like.

Background requests count where there is no urgent one: beside those they have limits of their own.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.worker.requests.state import Line, RequestState
from baton.worker.scheduling.background import is_background
from baton.worker.scheduling.queues import RequestQueues

# How long a tenant counts after its last request began or ended.
_RECENT_SECONDS = 10.0
# The least part of the limit that a step holds for a tenant's only prompt.
_LEAST_PART = 8

_Seen = tuple[bool, str]  # whether its requests are in the background, and the tenant


class SharedSteps:
    """Knows which tenants use the worker. `limit`: prompt tokens of a step that several share; 0: no limit."""

    def __init__(self, queues: RequestQueues, limit: int, clock: Callable[[], float]) -> None:
        self._queues = queues
        self._limit = limit
        self._clock = clock
        self._seen: dict[_Seen, float] = {}  # when a tenant's last request began or ended, oldest first
        self._shortened = False  # the last step was, for a tenant's only prompt

    def see(self, state: RequestState) -> None:
        """Records that a request begins or ends."""
        seen = _seen(state.line)
        self._seen.pop(seen, None)
        self._seen[seen] = self._clock()

    def budget(self, budget: int) -> int:
        """Returns how many of a step's remaining tokens may be those of prompts."""
        if not self._limit or budget <= self._limit or not self._queues.has_prompts or len(self._tenants()) < 2:
            self._shortened = False
            return budget
        # Of two steps in a row, one at most: tenants with one short prompt each do not starve one with many.
        limit = self._limit if self._shortened else self._limit_for_lone()
        self._shortened = limit < self._limit
        return limit

    def _limit_for_lone(self) -> int:
        """Returns the limit of a step that finishes the short prompts of tenants with no other request."""
        prefilling = {state.line for state in self._queues.batch.prefilling}
        lengths = [len(state.token_ids) for state in self._queues.waiting.lone() if state.line not in prefilling]
        short = [length for length in lengths if 2 * length <= self._limit]
        if not short:
            return self._limit
        # Each tenant gets an even part, the others together one.
        return min(self._limit, max(self._limit // _LEAST_PART, (len(short) + 1) * max(short)))

    def _tenants(self) -> set[str]:
        since = self._clock() - _RECENT_SECONDS
        while self._seen and self._seen[first := next(iter(self._seen))] < since:
            del self._seen[first]
        seen = set(self._seen)
        if len(seen) < 2:
            seen.update(map(_seen, self._queues.waiting.lines))
            seen.update([_seen(state.line) for state in self._queues.batch.running()])
        urgent = {tenant for is_behind, tenant in seen if not is_behind}
        return urgent or {tenant for _, tenant in seen}


def _seen(line: Line) -> _Seen:
    return is_background(line.priority), line.tenant
