"""The persistent batch: tokens and block tables of each row, updated by plans. Knows no model and no tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.rpc.errors import InternalError
from baton.worker.core import BlockId, Int32, Int64, RowInit, StepPlan


class Rows:
    """Columns over all rows. Those of freed rows are undefined."""

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, null_block: int, num_groups: int = 1
    ) -> None:
        self.block_size = block_size
        # Untouched zero pages take no memory, so all rows can have the greatest width.
        self.token_ids = np.zeros((num_rows, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)  # known tokens
        self.num_drafts = np.zeros(num_rows, np.int64)  # guessed tokens behind the known ones
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        # A table for each group. Windows read none of the blocks that they have passed, which stay in their tables.
        self.num_blocks = np.zeros((num_groups, num_rows), np.int64)
        self._tables = np.zeros((num_groups, num_rows, -(-max_model_len // block_size)), np.int32)
        self._null_block = null_block

    def admit(self, init: RowInit) -> None:
        """Stores a request in its row, with empty block tables."""
        row, count = init.row, len(init.token_ids)
        if count >= self.token_ids.shape[1]:
            raise InternalError(f"row {row} gets {count} tokens; it holds {self.token_ids.shape[1] - 1}")
        self.token_ids[row, :count] = init.token_ids
        self.num_tokens[row] = count
        self.num_drafts[row] = 0
        self.num_prompt_tokens[row] = init.num_prompt_tokens
        self.num_blocks[:, row] = 0

    def add_blocks(self, row: int, block_ids: Sequence[BlockId]) -> None:
        """Appends to a row's block table of the first group."""
        self.set_blocks(row, 0, int(self.num_blocks[0, row]), block_ids)

    def set_blocks(self, row: int, group: int, start: int, block_ids: Sequence[BlockId]) -> None:
        """Ends a row's block table of a group with these blocks, from place `start` on."""
        stop = start + len(block_ids)
        if stop > self._tables.shape[2]:
            raise InternalError(f"row {row} gets {stop} blocks; it holds {self._tables.shape[2]}")
        self._tables[group, row, start:stop] = block_ids
        self.num_blocks[group, row] = stop

    def set_drafts(self, row: int, token_ids: Int32) -> None:
        """Writes guessed tokens behind a row's known ones. `append` overwrites them."""
        start = int(self.num_tokens[row])
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.num_drafts[row] = len(token_ids)

    def append(self, rows: Int64, token_ids: Int64) -> None:
        """Appends a token to each of these rows."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def check_tokens(self, plan: StepPlan) -> None:
        """Raises InternalError for a plan with tokens that its rows do not have."""
        self._check(plan, self.num_tokens + self.num_drafts)

    def check_blocks(self, plan: StepPlan) -> None:
        """Raises InternalError for a plan with blocks that its rows do not have."""
        for num_blocks in self.num_blocks:
            self._check(plan, num_blocks * self.block_size)

    def _check(self, plan: StepPlan, most: Int64) -> None:
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        wrong = ends > most[plan.rows]
        if wrong.any():
            row = int(plan.rows[wrong][0])
            raise InternalError(
                f"step {plan.step} computes row {row} to token {int(ends[wrong][0])}; it knows"
                f" {int(self.num_tokens[row])} tokens and has {int(self.num_blocks[:, row].min())} blocks of"
                f" {self.block_size}"
            )

    def block_table(self, rows: Int64, seq_lens: Int64, group: int = 0) -> Int64:
        """Returns [len(rows), blocks of the longest row], padded with the null block."""
        num_blocks = -(-seq_lens // self.block_size)
        width = int(num_blocks.max())
        table: Int64 = self._tables[group][rows, :width].astype(np.int64)
        table[np.arange(width) >= num_blocks[:, None]] = self._null_block
        return table

    def blocks_of(self, row: int, first: int, stop: int, num_used: int, group: int = 0) -> Int64:
        """Returns blocks `first` to `stop` of a row's chain, with the null block from number `num_used` on."""
        table = np.full(stop - first, self._null_block, np.int64)
        used = max(0, min(stop, num_used) - first)
        table[:used] = self._tables[group, row, first : first + used]
        return table

    def blocks_at(self, rows: Int64, positions: Int64, group: int = 0) -> Int64:
        """Returns the blocks of these positions of these rows."""
        blocks: Int64 = self._tables[group][rows, positions // self.block_size].astype(np.int64)
        return blocks
