"""The queue of requests that could run if there were room, best rank first. Knows nothing of why there is none."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from baton.worker.request_state import RequestState

_MAX_STALE = 64


class WaitingQueue:
    """A heap by rank. What is discarded leaves the heap when it comes up, or when there is too much of it."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], RequestState]] = []
        self._members: set[RequestState] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._members)

    def push(self, state: RequestState) -> None:
        """Adds a request that is not in the queue."""
        self._members.add(state)
        heapq.heappush(self._heap, (state.rank, state))
        if len(self._heap) > 2 * len(self._members) + _MAX_STALE:
            self._heap = [(member.rank, member) for member in self._members]
            heapq.heapify(self._heap)

    def peek(self) -> RequestState | None:
        """The request that is next."""
        while self._heap:
            state = self._heap[0][1]
            if state in self._members:
                return state
            heapq.heappop(self._heap)
        return None

    def discard(self, state: RequestState) -> None:
        """Takes a request out, wherever it stands."""
        self._members.discard(state)
        if self._heap and self._heap[0][1] is state:
            heapq.heappop(self._heap)
