"""Gives running requests the blocks of their next tokens, before prompts are continued and admitted."""

from __future__ import annotations

from collections.abc import Sequence

from baton.worker.core import BlockId, MoreBlocks, Row
from baton.worker.kv.holdings import Holdings
from baton.worker.requests.state import NO_ROW, RequestState
from baton.worker.scheduling.preemption import Preemption
from baton.worker.scheduling.steps.batch import Batch
from baton.worker.scheduling.steps.draft import Draft


class Growth:
    """Extends block tables. A request without a block for its next token preempts another one, or itself."""

    def __init__(self, holdings: Holdings, batch: Batch, preemption: Preemption) -> None:
        self._holdings = holdings
        self._pool = holdings.pool
        self._batch = batch
        self._preemption = preemption
        self._block_size = holdings.block_size
        self._num_groups = 1 + len(holdings.partial)
        self._num_pages = 1 + sum(holdings.partial.pages)  # of one block in each group

    def grow(self, draft: Draft) -> None:
        """Gives each decode that starts a new block one in each group, and prompts what their next chunks need."""
        self._grow_decodes(draft)
        if self._num_groups > 1:
            self._move_partial(draft)

    def _grow_decodes(self, draft: Draft) -> None:
        batch, each = self._batch, self._num_pages
        short = batch.short_rows(draft.decode_rows(batch))
        if not len(short):
            return
        states = batch.states_at(short)
        if self._num_groups > 1:
            for state in states:
                self._holdings.free_passed(state, int(batch.num_computed[state.row]), draft.step - 1)
        block_ids = self._pool.allocate(len(states) * each)
        if block_ids is None:
            self._grow_by_rank(states, draft)
            return
        for index, state in enumerate(states):
            self._extend(state, block_ids[index * each : (index + 1) * each], draft)
        batch.capacity[short] += self._block_size

    def _grow_by_rank(self, states: list[RequestState], draft: Draft) -> None:
        """Gives each of these decodes its blocks, the most urgent first. Preempts if there are too few."""
        batch = self._batch
        for state in sorted(states, key=lambda other: other.rank):
            while state.row != NO_ROW:
                block_ids = self._pool.allocate(self._num_pages)
                if block_ids is not None:
                    self._extend(state, block_ids, draft)
                    batch.capacity[state.row] += self._block_size
                    break
                if batch.has_block(state.row):
                    break
                draft.preempted = True
                self._preemption.preempt(self._preemption.victim() or state, draft)

    def _move_partial(self, draft: Draft) -> None:
        """Gives prompts what their next chunks need in partial groups. Preempts if there are too few blocks.

        A prefill for another worker is never preempted: it waits for blocks that steps in flight or copies still have.
        """
        batch = self._batch
        for state in list(batch.prefilling):
            while state.row != NO_ROW:
                if self._holdings.advance(state, int(batch.num_computed[state.row]), draft.step - 1):
                    break
                victim = self._preemption.victim()
                if victim is None and state.request.prefill_only:
                    draft.waiting.add(state)
                    break
                draft.preempted = True
                self._preemption.preempt(victim or state, draft)

    def _extend(self, state: RequestState, pages: Sequence[BlockId], draft: Draft) -> None:
        """Appends a block in each group."""
        row = Row(state.row)
        state.block_ids.append(pages[0])
        draft.new_blocks[row] = [pages[0]]
        if len(pages) > 1:
            self._holdings.partial.append_next(self._pool, state, pages[1:])
            draft.more_blocks[row] = [MoreBlocks(row, blocks.group, *blocks.newest()) for blocks in state.partial]
