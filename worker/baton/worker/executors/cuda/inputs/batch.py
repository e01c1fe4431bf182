"""The persistent batch on the device: tokens and block table of each row, updated by plans.

Short updates of a step are uploaded together and scattered. A long update of one row is one copy.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.core import Int32, Int64, StepPlan
from baton.worker.executors.cuda.inputs.uploads import Patches, PinnedRing

_MIN_LONG = 512  # numbers of one row that deserve their own copy
_USUAL_UPLOAD = 1 << 15  # numbers: the columns of a step, or its short updates
_ALIGNMENT = 64  # words, as for an allocation


class _Updates(NamedTuple):
    """Runs of new words."""

    firsts: Int64  # index of each run's first word
    counts: Int64  # words of each run
    values: Int32  # of all runs, one after the other


class DeviceBatch:
    """Rows of token ids and block ids."""

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, device: torch.device, num_groups: int = 1
    ) -> None:
        self.max_blocks = -(-max_model_len // block_size)
        num_token_words, num_block_words = num_rows * max_model_len, num_rows * self.max_blocks
        self._first_block_word = -(-num_token_words // _ALIGNMENT) * _ALIGNMENT
        self._group_words = num_block_words
        num_words = self._first_block_word + num_groups * num_block_words
        words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self.token_ids = words[:num_token_words].view(num_rows, max_model_len)
        # A table for each group. Windows read none of the blocks that they have passed, which stay in their tables.
        self.block_tables = words[self._first_block_word :].view(num_groups, num_rows, self.max_blocks)
        self.block_table = self.block_tables[0]
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._num_row_blocks = np.zeros(num_rows, np.int64)
        self._trust = RowTrust(num_rows)
        self._device = device
        self._uploads = PinnedRing(_USUAL_UPLOAD, torch.int64)
        self._words = words
        self._patches = Patches(words, _USUAL_UPLOAD)
        self._long = PinnedRing(max_model_len, torch.int32)

    def apply(self, plan: StepPlan) -> None:
        """Applies the plan to the rows: tokens of admitted rows, and new blocks."""
        updates: list[_Updates] = []
        if plan.admitted:
            rows = np.array([init.row for init in plan.admitted], np.int64)
            self._num_row_blocks[rows] = 0
            self.num_prompt_tokens[rows] = [init.num_prompt_tokens for init in plan.admitted]
            self._trust.restore(rows)
            values = [init.token_ids for init in plan.admitted]
            counts = np.array([len(each) for each in values], np.int64)
            updates.append(_Updates(rows * self.token_ids.shape[1], counts, np.concatenate(values)))
        if plan.new_blocks:
            rows = np.array([row for row, _ in plan.new_blocks], np.int64)
            counts = np.array([len(block_ids) for _, block_ids in plan.new_blocks], np.int64)
            firsts = self._first_block_word + rows * self.max_blocks + self._num_row_blocks[rows]
            flat = np.array(list(itertools.chain.from_iterable(ids for _, ids in plan.new_blocks)), np.int32)
            updates.append(_Updates(firsts, counts, flat))
            self._num_row_blocks[rows] += counts
        more_blocks = [blocks for blocks in plan.more_blocks if blocks.group < len(self.block_tables)]  # not states
        if more_blocks:
            places = np.array([(row, group, start) for row, group, start, _ in more_blocks], np.int64)
            counts = np.array([len(block_ids) for *_, block_ids in more_blocks], np.int64)
            firsts = self._first_block_word + places @ np.array([self.max_blocks, self._group_words, 1])
            flat = np.array(list(itertools.chain.from_iterable(ids for *_, ids in more_blocks)), np.int32)
            updates.append(_Updates(firsts, counts, flat))
        if updates:
            self._write(_Updates(*map(np.concatenate, zip(*updates, strict=True))))

    def write_tokens(self, rows: Int64, positions: Int64, token_ids: Int32) -> None:
        """Writes tokens at these positions of these rows."""
        if len(rows):
            self._patches.write(rows * self.token_ids.shape[1] + positions, token_ids)

    def rows_of(self, plan: StepPlan) -> Int64:
        """Returns the plan's rows, with -1 for rows that a failed step left in an unknown state."""
        return self._trust.masked(plan.rows)

    def distrust(self, plan: StepPlan) -> None:
        """Excludes the rows of a plan whose launch failed, until they are admitted again."""
        self._trust.withdraw(plan.rows)

    def upload(self, values: NDArray[np.int64]) -> Tensor:
        """Returns a copy of int64 `values` on the device."""
        return self._uploads.to_device(values, self._device)

    def _write(self, updates: _Updates) -> None:
        firsts, counts, values = updates
        long = counts >= _MIN_LONG
        if not long.any():
            self._patches.write(_spread(firsts, counts), values)
            return
        ends = np.cumsum(counts)
        for first, count, end in zip(firsts[long].tolist(), counts[long].tolist(), ends[long].tolist(), strict=True):
            self._long.copy_to(values[end - count : end], self._words[first : first + count])
        if not long.all():
            self._patches.write(_spread(firsts[~long], counts[~long]), values[np.repeat(~long, counts)])


class RowTrust:
    """The rows whose contents match the engine's state.

    A step that is launched after a failed one may continue the same requests, before the engine has failed them. Their
    block tables may lack a block, so a write would reach another request's block.
    """

    def __init__(self, num_rows: int) -> None:
        self._unknown = np.zeros(num_rows, np.bool_)
        self._any = False

    def withdraw(self, rows: Int64) -> None:
        """Marks these rows as unknown."""
        self._unknown[rows] = True
        self._any = True

    def restore(self, rows: Int64) -> None:
        """Marks these rows as known, because they get new contents."""
        if self._any:
            self._unknown[rows] = False
            self._any = bool(self._unknown.any())

    def masked(self, rows: Int64) -> Int64:
        """Returns the rows, with -1 for unknown ones."""
        return np.where(self._unknown[rows], np.int64(-1), rows) if self._any else rows


def _spread(first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns first[0], first[0] + 1, ... (counts[0] of them), then first[1], ..."""
    ends = np.cumsum(counts)
    spread: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(first - (ends - counts), counts)
    return spread
