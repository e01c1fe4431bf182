"""The deadlines of requests. Knows no clock and ends nothing."""

from __future__ import annotations

import heapq

from baton.worker.requests.state import Phase, RequestState

_MAX_STALE = 64


class Deadlines:
    """A heap of deadlines. Only those of requests that compute or wait count."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestState]] = []
        self._compact_at = _MAX_STALE

    def add(self, state: RequestState) -> None:
        """Adds a request, if it has a deadline."""
        deadline = state.request.deadline
        if deadline is None:
            return
        heapq.heappush(self._heap, (deadline, state.rank[2], state))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if _counts(entry[2])]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + _MAX_STALE

    def next(self) -> float | None:
        """Returns the next deadline."""
        while self._heap and not _counts(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now: float) -> RequestState | None:
        """Returns a request whose deadline has passed."""
        deadline = self.next()
        if deadline is None or deadline > now:
            return None
        return heapq.heappop(self._heap)[2]


def _counts(state: RequestState) -> bool:
    """Returns whether a deadline counts. A computed prefill waits for its peer, whose lease has a limit of its own."""
    return state.phase not in (Phase.DONE, Phase.HOLDING)
