"""Prompt blocks that are being computed right now, and who waits for them. Holds no blocks, decides nothing.

A request computes the blocks of its own chain in order. Hashes are chained: where two requests have the same hash for
a block, all blocks before are the same too. So it is enough to know of each request which block comes next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.worker.core import BlockHash
from baton.worker.requests.state import Phase, RequestState


class Common(NamedTuple):
    """The blocks of a request that another computes, up to block number `last`."""

    holder: RequestState
    last: int


@dataclass(slots=True, eq=False)
class _Work:
    """Blocks [next, stop) of the holder's chain are to be computed."""

    holder: RequestState
    next: int
    stop: int
    waiters: dict[RequestState, int] = field(default_factory=dict)  # the block that each waits for

    @property
    def next_hash(self) -> BlockHash:
        return self.holder.block_hashes[self.next]


class PrefixesInProgress:
    """Which request computes which blocks. Every wait ends: by the block, or by the end of its holder's work."""

    def __init__(self) -> None:
        self._work_of: dict[RequestState, _Work] = {}
        self._work_at: dict[BlockHash, list[_Work]] = {}  # by the block that is next
        self._parked: dict[RequestState, _Work] = {}

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def parked(self) -> list[RequestState]:
        """Who waits."""
        return list(self._parked)

    def begin(self, holder: RequestState, start: int, stop: int) -> None:
        """The holder will compute blocks [start, stop) of its chain."""
        assert holder not in self._work_of, f"{holder.request.request_id} computes blocks already"
        if start < stop:
            work = self._work_of[holder] = _Work(holder, start, stop)
            self._work_at.setdefault(work.next_hash, []).append(work)

    def last_common(self, state: RequestState, start: int, stop: int) -> Common | None:
        """The last of the request's blocks [start, stop) that another computes, from `start` on. None: not even that.

        Only a request that wants a remote prefill itself waits for a remote one: others compute at once.
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

    def park(self, state: RequestState, common: Common) -> None:
        """The request waits until these blocks are computed."""
        work = self._work_of[common.holder]
        work.waiters[state] = common.last
        self._parked[state] = work

    def unpark(self, state: RequestState) -> None:
        """The request waits no more, for reasons of its own."""
        work = self._parked.pop(state, None)
        if work is not None:
            del work.waiters[state]

    def computed(self, holder: RequestState, num_blocks: int) -> list[RequestState]:
        """The first num_blocks of the holder's chain can be found now. Returns who waited for them."""
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
        """The holder computes nothing more. Returns who waited for it."""
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
    """The last index of [low, high] at which two chains are equal, as they are at `low`."""
    if ours[high] == theirs[high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if ours[middle] == theirs[middle]:
            low = middle
        else:
            high = middle
    return low
