"""The persistent batch on the device: every row's tokens and block table, changed by differences.

What rows get in a step goes up together and is scattered; what one row gets much of goes to its place in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.core import Int32, StepPlan
from baton.worker.executors.cuda.inputs.uploads import Patches, PinnedRing

_MIN_LONG = 512  # numbers of one row that are worth a copy of their own
_USUAL_UPLOAD = 1 << 15  # numbers: a step's columns, or what is scattered
_ALIGNMENT = 64  # words: tables begin where an allocation might


class DeviceBatch:
    """Rows of token ids and block ids."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.max_blocks = -(-max_model_len // block_size)
        num_token_words, num_block_words = num_rows * max_model_len, num_rows * self.max_blocks
        self._first_block_word = -(-num_token_words // _ALIGNMENT) * _ALIGNMENT
        words = torch.zeros(self._first_block_word + num_block_words, dtype=torch.int32, device=device)
        self.token_ids = words[:num_token_words].view(num_rows, max_model_len)
        self.block_table = words[self._first_block_word :].view(num_rows, self.max_blocks)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._num_row_blocks = np.zeros(num_rows, np.int64)
        self._trust = RowTrust(num_rows)
        self._device = device
        self._uploads = PinnedRing(_USUAL_UPLOAD, torch.int64)
        self._words = words
        self._patches = Patches(words, _USUAL_UPLOAD)
        self._long = PinnedRing(max_model_len, torch.int32)

    def apply(self, plan: StepPlan) -> None:
        """Brings rows in line with the plan: tokens of admitted rows, new blocks of any."""
        firsts: list[NDArray[np.int64]] = []  # among the words
        values: list[Int32] = []  # from there on
        if plan.admitted:
            rows = np.array([init.row for init in plan.admitted], np.int64)
            self._num_row_blocks[rows] = 0
            self.num_prompt_tokens[rows] = [init.num_prompt_tokens for init in plan.admitted]
            self._trust.restore(rows)
            firsts.append(rows * self.token_ids.shape[1])
            values += [init.token_ids for init in plan.admitted]
        if plan.new_blocks:
            rows = np.array([row for row, _ in plan.new_blocks], np.int64)
            firsts.append(self._first_block_word + rows * self.max_blocks + self._num_row_blocks[rows])
            values += [np.array(block_ids, np.int32) for _, block_ids in plan.new_blocks]
            self._num_row_blocks[rows] += [len(block_ids) for _, block_ids in plan.new_blocks]
        if values:
            self._write(np.concatenate(firsts), values)

    def rows_of(self, plan: StepPlan) -> Int32:
        """The plan's rows, -1 for those that a failed step left in an unknown state."""
        return self._trust.masked(plan.rows)

    def distrust(self, plan: StepPlan) -> None:
        """The plan's launch failed: its rows are not to be touched until they are admitted again."""
        self._trust.withdraw(plan.rows)

    def upload(self, values: NDArray[np.int64]) -> Tensor:
        """A device copy of int64 `values`, through pinned memory."""
        return self._uploads.to_device(values, self._device)

    def _write(self, firsts: NDArray[np.int64], values: Sequence[Int32]) -> None:
        counts = np.array([len(some) for some in values], np.int64)
        for index in np.flatnonzero(counts >= _MIN_LONG).tolist():
            first = int(firsts[index])
            self._long.copy_to(values[index], self._words[first : first + len(values[index])])
        short = np.flatnonzero(counts < _MIN_LONG)
        if len(short):
            places = _spread(firsts[short], counts[short])
            self._patches.write(places, np.concatenate([values[index] for index in short.tolist()]))


class RowTrust:
    """Which rows hold what the engine believes.

    A step that is launched behind a failed one may go on with its requests, before the engine has failed them: their
    block tables may lack a block, and writing through one would reach another request's.
    """

    def __init__(self, num_rows: int) -> None:
        self._doubtful = np.zeros(num_rows, np.bool_)
        self._any = False

    def withdraw(self, rows: NDArray[np.int32]) -> None:
        """These rows mean nothing from now on."""
        self._doubtful[rows] = True
        self._any = True

    def restore(self, rows: NDArray[np.int64]) -> None:
        """These rows are given new content."""
        if self._any:
            self._doubtful[rows] = False
            self._any = bool(self._doubtful.any())

    def masked(self, rows: Int32) -> Int32:
        """The rows, -1 for doubtful ones."""
        return np.where(self._doubtful[rows], np.int32(-1), rows) if self._any else rows


def _spread(first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """first[0], first[0] + 1, ... (counts[0] of them), then first[1], ..."""
    ends = np.cumsum(counts)
    spread: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(first - (ends - counts), counts)
    return spread
