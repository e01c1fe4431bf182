"""The persistent batch on the device: every row's tokens and block table, changed by differences.

Each step's numbers go up in one pinned buffer and one copy; buffers rotate, so that the host never waits for a copy.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.core import Int32, StepPlan

_NUM_BUFFERS = 16  # uploads of all steps that can be in flight, and some


class DeviceBatch:
    """Rows of token ids and block ids."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.max_blocks = -(-max_model_len // block_size)
        self.token_ids = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(num_rows, self.max_blocks, dtype=torch.int32, device=device)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._max_model_len = max_model_len
        self._num_row_blocks = np.zeros(num_rows, np.int64)
        self._trust = RowTrust(num_rows)
        self._device = device
        self._turn = 0
        self._pinned = [torch.empty(0, dtype=torch.int64, pin_memory=True) for _ in range(_NUM_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(_NUM_BUFFERS)]  # type: ignore[no-untyped-call]

    def apply(self, plan: StepPlan) -> None:
        """Brings rows in line with the plan: tokens of admitted rows, new blocks of any."""
        if plan.admitted:
            rows = np.array([init.row for init in plan.admitted], np.int64)
            self._num_row_blocks[rows] = 0
            self.num_prompt_tokens[rows] = [init.num_prompt_tokens for init in plan.admitted]
            self._trust.restore(rows)
            counts = np.array([len(init.token_ids) for init in plan.admitted], np.int64)
            values = np.concatenate([np.asarray(init.token_ids, np.int64) for init in plan.admitted])
            self._scatter(self.token_ids, _spread(rows * self._max_model_len, counts), values)
        if plan.new_blocks:
            rows = np.array([row for row, _ in plan.new_blocks], np.int64)
            counts = np.array([len(block_ids) for _, block_ids in plan.new_blocks], np.int64)
            values = np.concatenate([np.asarray(block_ids, np.int64) for _, block_ids in plan.new_blocks])
            first = rows * self.max_blocks + self._num_row_blocks[rows]
            self._num_row_blocks[rows] += counts
            self._scatter(self.block_table, _spread(first, counts), values)

    def rows_of(self, plan: StepPlan) -> Int32:
        """The plan's rows, -1 for those that a failed step left in an unknown state."""
        return self._trust.masked(plan.rows)

    def distrust(self, plan: StepPlan) -> None:
        """The plan's launch failed: its rows are not to be touched until they are admitted again."""
        self._trust.withdraw(plan.rows)

    def upload(self, values: NDArray[np.int64]) -> Tensor:
        """A device copy of int64 `values`, through pinned memory."""
        turn = self._turn
        self._turn = (turn + 1) % _NUM_BUFFERS
        if len(self._pinned[turn]) < len(values):
            self._pinned[turn] = torch.empty(2 * len(values), dtype=torch.int64, pin_memory=True)
        self._copied[turn].synchronize()
        staging = self._pinned[turn][: len(values)]
        staging.numpy()[:] = values
        out = staging.to(self._device, non_blocking=True)
        self._copied[turn].record()
        return out

    def _scatter(self, target: Tensor, index: NDArray[np.int64], values: NDArray[np.int64]) -> None:
        both = self.upload(np.concatenate((index, values)))
        target.view(-1).index_copy_(0, both[: len(index)], both[len(index) :].int())


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
