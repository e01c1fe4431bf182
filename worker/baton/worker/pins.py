"""Blocks that preemption cannot bring back, kept few enough that every request that runs can run to its end.

A request's blocks are pinned while a remote peer may write them, while they wait for a peer to read them, and while
they are the prefix or the result of a remote prefill. If those were all blocks, running requests could preempt each
other for ever. So nothing is pinned unless each running request, alone beside the pins, still fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.worker.core import BlockId
from baton.worker.request_state import RequestState, num_blocks_for


class Pins:
    """Counts distinct pinned blocks, by request."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.num_pinned = 0
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._longest = num_blocks_for(max_model_len, block_size)
        self._counts: dict[BlockId, int] = {}
        self._blocks_of: dict[RequestState, list[BlockId]] = {}

    def set(self, state: RequestState, block_ids: Sequence[BlockId]) -> None:
        """Pins exactly these blocks for the request."""
        self.remove(state)
        self._blocks_of[state] = list(block_ids)
        for block_id in block_ids:
            count = self._counts.get(block_id, 0)
            self._counts[block_id] = count + 1
            self.num_pinned += count == 0

    def remove(self, state: RequestState) -> None:
        """Pins nothing for the request any more. Idempotent."""
        for block_id in self._blocks_of.pop(state, ()):
            count = self._counts[block_id] - 1
            if count:
                self._counts[block_id] = count
            else:
                del self._counts[block_id]
                self.num_pinned -= 1

    def leave_room_for(self, state: RequestState) -> bool:
        """Whether the request could run to its end beside what others have pinned."""
        own = len(self._blocks_of.get(state, ()))
        return state.lifetime_blocks(self._block_size) + self.num_pinned - own <= self._num_blocks

    def would_leave_room(self, pinning: RequestState, extra: int, others: Iterable[RequestState]) -> bool:
        """Whether, with `extra` more blocks pinned for one request, each of the others could still run to its end."""
        pinned = self.num_pinned + extra
        if pinned + self._longest <= self._num_blocks:
            return True
        for state in others:
            own = len(self._blocks_of.get(state, ())) + (extra if state is pinning else 0)
            if state.lifetime_blocks(self._block_size) + pinned - own > self._num_blocks:
                return False
        return pinned <= self._num_blocks
