"""The persistent batch on the device: every row's tokens and block table, changed by differences.

What rows get in a step goes up together and is scattered; what one row gets much of goes to its place in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.core import Int32, StepPlan
from baton.worker.cuda.uploads import Patches, PinnedRing

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
        written: list[tuple[int, Int32]] = []  # from which word on, and what
        for init in plan.admitted:
            self._num_row_blocks[init.row] = 0
            self.num_prompt_tokens[init.row] = init.num_prompt_tokens
            written.append((init.row * self.token_ids.shape[1], init.token_ids))
        if plan.admitted:
            self._trust.restore(np.array([init.row for init in plan.admitted], np.int64))
        for row, block_ids in plan.new_blocks:
            first = self._first_block_word + row * self.max_blocks + int(self._num_row_blocks[row])
            written.append((first, np.array(block_ids, np.int32)))
            self._num_row_blocks[row] += len(block_ids)
        self._write(written)

    def rows_of(self, plan: StepPlan) -> Int32:
        """The plan's rows, -1 for those that a failed step left in an unknown state."""
        return self._trust.masked(plan.rows)

    def distrust(self, plan: StepPlan) -> None:
        """The plan's launch failed: its rows are not to be touched until they are admitted again."""
        self._trust.withdraw(plan.rows)

    def upload(self, values: NDArray[np.int64]) -> Tensor:
        """A device copy of int64 `values`, through pinned memory."""
        return self._uploads.to_device(values, self._device)

    def _write(self, written: Iterable[tuple[int, Int32]]) -> None:
        """Numbers side by side, each from a word of ours on."""
        short: list[tuple[int, Int32]] = []
        for first, values in written:
            if len(values) >= _MIN_LONG:
                self._long.copy_to(values, self._words[first : first + len(values)])
            elif len(values):
                short.append((first, values))
        if short:
            starts = np.array([first for first, _ in short], np.int64)
            counts = np.array([len(values) for _, values in short], np.int64)
            self._patches.write(_spread(starts, counts), np.concatenate([values for _, values in short]))


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
