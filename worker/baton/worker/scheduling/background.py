"""Keeps background requests, those with a priority above 0, small while urgent ones use the worker. Starts no request.

A step that has begun cannot be interrupted: an urgent request waits for the rest of the step that it arrives in. While
urgent requests come and go, a step has few prompt tokens of background requests, and few rows for them; those with an
urgent prompt have none of these tokens, except one in some.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from baton.worker.requests.state import RequestState
from baton.worker.scheduling.queues import RequestQueues

# How long urgent requests count after the last one began or ended.
_RECENT_SECONDS = 10.0
# The part of the rows that background requests may take beside urgent ones.
_ROWS_PART = 0.125
# How many of them may begin in a step: each delays its launch by a few tenths of a millisecond.
_STARTS = 1
# Of so many steps with urgent prompts, one has prompt tokens of background requests, which may not wait for ever.
_YIELDED_STEPS = 8


def is_background(priority: int) -> bool:
    """Returns whether requests of this priority may wait for others, as routers see it too."""
    return priority > 0


class Background:
    """`limit`: prompt tokens of background requests in a step beside urgent requests; 0: no limit."""

    def __init__(self, queues: RequestQueues, limit: int, num_rows: int, clock: Callable[[], float]) -> None:
        self._batch = queues.batch
        self._limit = limit
        self._most_rows = max(1, int(num_rows * _ROWS_PART))
        self._clock = clock
        self._urgent_seen = float("-inf")
        self._is_fresh = False  # the rest was computed for this step
        self._tokens_left = sys.maxsize
        self._rows_left = sys.maxsize
        self._num_yielded = 0  # steps with urgent prompts since the last one with tokens of background requests

    def see(self, state: RequestState) -> None:
        """Records that a request begins or ends."""
        if not is_background(state.rank[0]):
            self._urgent_seen = self._clock()

    def begin_step(self) -> None:
        """Begins a step."""
        self._is_fresh = False

    def waits(self, state: RequestState) -> bool:
        """Returns whether a request gets no row in this step."""
        if not is_background(state.rank[0]):
            return False
        self._refresh()
        return self._tokens_left <= 0 or self._rows_left <= 0

    def start(self, state: RequestState) -> None:
        """Counts a row."""
        if is_background(state.rank[0]):
            self._refresh()
            self._rows_left -= 1

    def take(self, state: RequestState, num_tokens: int) -> int:
        """Returns how many of these prompt tokens the request gets in this step."""
        if not is_background(state.rank[0]):
            return num_tokens
        self._refresh()
        taken = min(num_tokens, self._tokens_left)
        self._tokens_left -= taken
        return taken

    def _refresh(self) -> None:
        """Sets what background requests may take of this step, once they want something."""
        if self._is_fresh:
            return
        self._is_fresh = True
        self._tokens_left = self._rows_left = sys.maxsize
        if self._limit and self._has_urgent():
            self._tokens_left = 0 if self._yields() else self._limit
            running = sum(is_background(state.rank[0]) for state in self._batch.running())
            self._rows_left = min(_STARTS, self._most_rows - running)

    def _yields(self) -> bool:
        """Returns whether an urgent prompt has this step's tokens for itself."""
        if not self._has_urgent_prompt():
            self._num_yielded = 0
            return False
        self._num_yielded = (self._num_yielded + 1) % _YIELDED_STEPS
        return self._num_yielded > 0

    def _has_urgent_prompt(self) -> bool:
        # One that waits may not fit until background requests have ended.
        return any(not is_background(state.rank[0]) for state in self._batch.prefilling[:1])

    def _has_urgent(self) -> bool:
        if self._clock() - self._urgent_seen < _RECENT_SECONDS:
            return True
        return any(not is_background(state.rank[0]) for state in self._batch.running())
