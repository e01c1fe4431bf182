"""Blocks that a preemption cannot take back, limited so that every running request can finish.

A request's blocks are pinned while a remote peer may write them, while they wait for a peer to read them, and while
they are the prefix or the result of a remote prefill. If all blocks were pinned, running requests could preempt each
other for ever. So blocks are pinned only if every running request, alone with the pinned blocks, still fits. Blocks
that a pinned request will take later count as pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import BlockId
from baton.worker.kv.partial_groups import PartialGroups
from baton.worker.requests.state import RequestState, num_blocks_for


class PinnedBlocks:
    """Counts distinct pinned blocks, by request."""

    def __init__(
        self, num_blocks: int, block_size: int, max_model_len: int, partial: PartialGroups | None = None
    ) -> None:
        self.num_pinned = 0
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._partial = partial or None
        # Of any request. With windows it depends on the request.
        self._longest = num_blocks if self._partial else num_blocks_for(max_model_len, block_size)
        self._counts = np.zeros(num_blocks, np.int32)
        self._blocks_of: dict[RequestState, NDArray[np.int64]] = {}
        self._num_later: dict[RequestState, int] = {}

    def set(self, state: RequestState, block_ids: Sequence[BlockId], num_later: int = 0) -> None:
        """Pins exactly these blocks, which are all different, for the request, and as many more as it takes later."""
        self.remove(state)
        if num_later:
            self._num_later[state] = num_later
            self.num_pinned += num_later
        pinned = self._blocks_of[state] = np.array(block_ids, np.int64)
        counts = self._counts[pinned]
        self._counts[pinned] = counts + 1
        self.num_pinned += int(np.count_nonzero(counts == 0))

    def remove(self, state: RequestState) -> None:
        """Unpins the request's blocks. Idempotent."""
        pinned = self._blocks_of.pop(state, None)
        if pinned is not None:
            self.num_pinned -= self._num_later.pop(state, 0)
            counts = self._counts[pinned]
            self._counts[pinned] = counts - 1
            self.num_pinned -= int(np.count_nonzero(counts == 1))

    def can_finish(self, state: RequestState) -> bool:
        """Returns whether the request could finish while others' blocks stay pinned."""
        return self.lifetime_blocks(state) + self.num_pinned - self._num_own(state) <= self._num_blocks

    def would_fit(self, pinning: RequestState, extra: int, others: Iterable[RequestState]) -> bool:
        """Returns whether all other requests could still finish with `extra` more blocks pinned for one."""
        pinned = self.num_pinned + extra
        if pinned + self._longest <= self._num_blocks:
            return True
        for state in others:
            own = self._num_own(state) + (extra if state is pinning else 0)
            if self.lifetime_blocks(state) + pinned - own > self._num_blocks:
                return False
        return pinned <= self._num_blocks

    def lifetime_blocks(self, state: RequestState) -> int:
        """Returns the most blocks of all groups that the request can ever need."""
        num_blocks = state.lifetime_blocks(self._block_size)
        return num_blocks + self._partial.most_blocks(state) if self._partial else num_blocks

    def _num_own(self, state: RequestState) -> int:
        return len(self._blocks_of.get(state, ())) + self._num_later.get(state, 0)
