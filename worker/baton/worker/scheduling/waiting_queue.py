"""Queues of requests that would run if there were capacity, best rank first. Knows nothing of the reason."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from baton.worker.requests.state import Line, Rank, RequestState

_MAX_STALE = 64


class _Heap:
    """One line's requests by rank. Discarded ones are removed when they reach the top, or are too many."""

    __slots__ = ("entries", "num_members")

    def __init__(self) -> None:
        self.entries: list[tuple[Rank, RequestState]] = []
        self.num_members = 0


class WaitingQueue:
    """Requests by line, and by rank in each line."""

    def __init__(self) -> None:
        self._lines: dict[Line, _Heap] = {}  # those that have requests
        self._members: set[RequestState] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._members)

    @property
    def lines(self) -> list[Line]:
        """The lines that have requests."""
        return list(self._lines)

    def lone(self) -> list[RequestState]:
        """Returns the requests that are the only ones of their lines."""
        lines = [line for line, heap in self._lines.items() if heap.num_members == 1]
        return [state for line in lines if (state := self.front(line)) is not None]

    def push(self, state: RequestState) -> None:
        """Adds a request that is not in the queue."""
        heap = self._lines.setdefault(state.line, _Heap())
        self._members.add(state)
        heap.num_members += 1
        heapq.heappush(heap.entries, (state.rank, state))
        if len(heap.entries) > 2 * heap.num_members + _MAX_STALE:
            heap.entries = list({entry[1]: entry for entry in heap.entries if entry[1] in self._members}.values())
            heapq.heapify(heap.entries)

    def peek(self) -> RequestState | None:
        """Returns the request of the best rank."""
        fronts = [state for line in self._lines if (state := self.front(line)) is not None]
        return min(fronts, key=lambda state: state.rank, default=None)

    def front(self, line: Line) -> RequestState | None:
        """Returns the request of the best rank in this line."""
        heap = self._lines.get(line)
        while heap is not None and heap.entries:
            state = heap.entries[0][1]
            if state in self._members:
                return state
            heapq.heappop(heap.entries)
        return None

    def discard(self, state: RequestState) -> None:
        """Removes a request from any place in the queue."""
        if state not in self._members:
            return
        self._members.discard(state)
        heap = self._lines[state.line]
        heap.num_members -= 1
        if not heap.num_members:
            del self._lines[state.line]
        elif heap.entries[0][1] is state:
            heapq.heappop(heap.entries)
