"""Gives running requests the blocks of their next tokens, before prompts are continued and admitted."""

from __future__ import annotations

from baton.worker.core import BlockId, Row
from baton.worker.kv.holdings import Holdings
from baton.worker.requests.state import NO_ROW, RequestState
from baton.worker.scheduling.preemption import Preemption
from baton.worker.scheduling.steps.batch import Batch
from baton.worker.scheduling.steps.draft import Draft


class Growth:
    """Extends block tables. A decode without a block for its next token preempts another request, or itself."""

    def __init__(self, holdings: Holdings, batch: Batch, preemption: Preemption) -> None:
        self._pool = holdings.pool
        self._batch = batch
        self._preemption = preemption
        self._block_size = holdings.block_size

    def grow(self, draft: Draft) -> None:
        """Gives each decode that starts a new block one."""
        batch = self._batch
        short = batch.short_rows(draft.decode_rows(batch))
        if not len(short):
            return
        states = batch.states_at(short)
        block_ids = self._pool.allocate(len(states))
        if block_ids is None:
            self._grow_by_rank(states, draft)
            return
        for state, block_id in zip(states, block_ids, strict=True):
            _extend(state, block_id, draft)
        batch.capacity[short] += self._block_size

    def _grow_by_rank(self, states: list[RequestState], draft: Draft) -> None:
        """Gives each of these decodes a block, the most urgent first. Preempts if there is none."""
        batch = self._batch
        for state in sorted(states, key=lambda other: other.rank):
            while state.row != NO_ROW:
                block_ids = self._pool.allocate(1)
                if block_ids is not None:
                    _extend(state, block_ids[0], draft)
                    batch.capacity[state.row] += self._block_size
                    break
                if batch.has_block(state.row):
                    break
                draft.preempted = True
                self._preemption.preempt(self._preemption.victim() or state, draft)


def _extend(state: RequestState, block_id: BlockId, draft: Draft) -> None:
    state.block_ids.append(block_id)
    draft.new_blocks[Row(state.row)] = [block_id]
