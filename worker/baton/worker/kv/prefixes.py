"""Prompt blocks that running requests compute, and the requests that wait for them. Holds no blocks, decides nothing.

A request computes the blocks of its own chain in order. Hashes are chained: if two requests have the same hash for a
block, all earlier blocks are the same too. So the next block of each request is all that must be stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.worker.core import BlockHash
from baton.worker.requests.state import Phase, RequestState


class Common(NamedTuple):
    """The blocks of a request that another request computes, up to block number `last`."""

    holder: RequestState
    last: int


@dataclass(slots=True, eq=False)
class _Work:
    """Blocks [next, stop) of the holder's chain, which it will compute."""

    holder: RequestState
    next: int
    stop: int
    waiters: dict[RequestState, int] = field(default_factory=dict)  # with the block that each waits for

    @property
    def next_hash(self) -> BlockHash:
        return self.holder.block_hashes[self.next]


class PrefixesInProgress:
    """The blocks that each request computes. Every wait ends with the block, or with its holder's work."""

    def __init__(self) -> None:
        self._work_of: dict[RequestState, _Work] = {}
        self._work_at: dict[BlockHash, list[_Work]] = {}  # by the next block
        self._parked: dict[RequestState, _Work] = {}

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def parked(self) -> list[RequestState]:
        """The waiting requests."""
        return list(self._parked)

    def begin(self, holder: RequestState, start: int, stop: int) -> None:
        """Records that the holder will compute blocks [start, stop) of its chain."""
        assert holder not in self._work_of, f"{holder.request.request_id} computes blocks already"
        if start < stop:
            work = self._work_of[holder] = _Work(holder, start, stop)
            self._work_at.setdefault(work.next_hash, []).append(work)

    def last_common(self, state: RequestState, start: int, stop: int) -> Common | None:
        """Returns the last of the request's blocks [start, stop) that another request computes. None: there is none.

        Only a request that needs a remote prefill itself waits for a remote one: others compute at once.
        """
        stop = min(stop, len(state.block_hashes))
        if start >= stop:
            return None
        found: Common | None = None
        for work in self._work_at.get(state.block_hashes[start], ()):
            if work.holder.phase is Phase.REMOTE and not state.wants_remote:
                continue
            index = _last_equal(state.block_hashes, work.holder.block_hashes, start, min(stop, work.stop) - 1)
            if found is None or index > found.last:
                found = Common(work.holder, index)
        return found

    def commons(self, state: RequestState) -> Iterator[Common]:
        """Yields the blocks of the request that each of the others computes, if those come next there."""
        for work in self._work_of.values():
            stop = min(len(state.block_hashes), work.stop)
            if work.next < stop and state.block_hashes[work.next] == work.next_hash:
                holder = work.holder
                yield Common(holder, _last_equal(state.block_hashes, holder.block_hashes, work.next, stop - 1))

    def park(self, state: RequestState, common: Common) -> None:
        """Makes the request wait until these blocks are computed."""
        work = self._work_of[common.holder]
        work.waiters[state] = common.last
        self._parked[state] = work

    def unpark(self, state: RequestState) -> None:
        """Ends the request's wait, for a reason of its own."""
        work = self._parked.pop(state, None)
        if work is not None:
            del work.waiters[state]

    def computed(self, holder: RequestState, num_blocks: int) -> list[RequestState]:
        """Records that the first `num_blocks` of the holder's chain are findable. Returns the requests that waited."""
        work = self._work_of.get(holder)
        if work is None or num_blocks <= work.next:
            return []
        if num_blocks >= work.stop:
            return self.end(holder)
        self._unlist(work)
        work.next = num_blocks
        self._work_at.setdefault(work.next_hash, []).append(work)
        return self._wake(work, [state for state, index in work.waiters.items() if index < num_blocks])

    def end(self, holder: RequestState) -> list[RequestState]:
        """Ends the holder's work. Returns the requests that waited for it."""
        work = self._work_of.pop(holder, None)
        if work is None:
            return []
        self._unlist(work)
        return self._wake(work, list(work.waiters))

    def _unlist(self, work: _Work) -> None:
        there = self._work_at[work.next_hash]
        there.remove(work)
        if not there:
            del self._work_at[work.next_hash]

    def _wake(self, work: _Work, woken: list[RequestState]) -> list[RequestState]:
        for state in woken:
            del self._parked[state], work.waiters[state]
        return woken


def _last_equal(ours: list[BlockHash], theirs: list[BlockHash], low: int, high: int) -> int:
    """Returns the last index in [low, high] at which two chains are equal. They are equal at `low`."""
    if ours[high] == theirs[high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if ours[middle] == theirs[middle]:
            low = middle
        else:
            high = middle
    return low
