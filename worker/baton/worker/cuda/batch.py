"""The persistent batch on the device: every row's tokens and block table, changed by differences.

What many rows get goes up together and is scattered; what one row gets much of goes to its place in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.core import Int32, StepPlan
from baton.worker.cuda.uploads import PinnedRing

_MIN_LONG = 512  # numbers of one row that are worth a copy of their own
_USUAL_UPLOAD = 1 << 15  # numbers: a step's columns, or what is scattered into short rows


class DeviceBatch:
    """Rows of token ids and block ids."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.max_blocks = -(-max_model_len // block_size)
        self.token_ids = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(num_rows, self.max_blocks, dtype=torch.int32, device=device)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._num_row_blocks = np.zeros(num_rows, np.int64)
        self._trust = RowTrust(num_rows)
        self._device = device
        self._uploads = PinnedRing(_USUAL_UPLOAD, torch.int64)
        self._long = PinnedRing(max_model_len, torch.int32)

    def apply(self, plan: StepPlan) -> None:
        """Brings rows in line with the plan: tokens of admitted rows, new blocks of any."""
        if plan.admitted:
            rows = np.array([init.row for init in plan.admitted], np.int64)
            self._num_row_blocks[rows] = 0
            self.num_prompt_tokens[rows] = [init.num_prompt_tokens for init in plan.admitted]
            self._trust.restore(rows)
            self._write(self.token_ids, rows, np.zeros_like(rows), [init.token_ids for init in plan.admitted])
        if plan.new_blocks:
            rows = np.array([row for row, _ in plan.new_blocks], np.int64)
            block_ids = [np.array(block_ids, np.int32) for _, block_ids in plan.new_blocks]
            self._write(self.block_table, rows, self._num_row_blocks[rows], block_ids)
            self._num_row_blocks[rows] += [len(some) for some in block_ids]

    def rows_of(self, plan: StepPlan) -> Int32:
        """The plan's rows, -1 for those that a failed step left in an unknown state."""
        return self._trust.masked(plan.rows)

    def distrust(self, plan: StepPlan) -> None:
        """The plan's launch failed: its rows are not to be touched until they are admitted again."""
        self._trust.withdraw(plan.rows)

    def upload(self, values: NDArray[np.int64]) -> Tensor:
        """A device copy of int64 `values`, through pinned memory."""
        return self._uploads.to_device(values, self._device)

    def _write(
        self, target: Tensor, rows: NDArray[np.int64], starts: NDArray[np.int64], values: Sequence[Int32]
    ) -> None:
        """Values of each row, from `starts` on, into target [num_rows, width]."""
        counts = np.array([len(some) for some in values], np.int64)
        for index in np.flatnonzero(counts >= _MIN_LONG).tolist():
            row, start = int(rows[index]), int(starts[index])
            self._long.copy_to(values[index], target[row, start : start + int(counts[index])])
        short = np.flatnonzero(counts < _MIN_LONG)
        if len(short):
            places = _spread(rows[short] * target.shape[1] + starts[short], counts[short])
            both = self.upload(np.concatenate((places, *(values[index] for index in short.tolist()))))
            target.view(-1).index_copy_(0, both[: len(places)], both[len(places) :].int())


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
