"""Clears blocks of tokens before they are written, where blocks may have held states.

Attention reads a whole block and multiplies what is behind a row's last token by 0. The bits of a state in fp32 may be
infinite or NaN as values of 16 or 8 bits, and 0 times these is NaN.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.worker.core import StepPlan
from baton.worker.executors.cpu.rows import Rows


class BegunBlocks:
    """Clears the blocks of the first group that steps begin, and the rest of those that another worker has sent."""

    def __init__(self, rows: Rows, values: Tensor, num_rows: int) -> None:
        """`values`: [num_layers, num_blocks, parts, heads, tokens, values], all blocks of the pool."""
        self._rows = rows
        self._bytes = values.view(torch.uint8)  # which all versions of PyTorch can index
        self._size = values.shape[4]
        self._is_new = np.zeros(num_rows, np.bool_)  # rows that no step has computed

    def apply(self, plan: StepPlan) -> None:
        """Notes the plan's admitted rows."""
        self._is_new[[init.row for init in plan.admitted]] = True

    def clear(self, plan: StepPlan) -> None:
        """Clears what this step's rows read and have not written, from their first new token on."""
        starts = plan.num_computed_tokens.astype(np.int64)
        lasts = starts + plan.num_scheduled_tokens - 1
        begins = lasts // self._size * self._size
        blocks = self._rows.blocks_at(plan.rows, lasts)
        begun = begins >= starts
        self._bytes[:, blocks[begun]] = 0
        for index in np.flatnonzero(~begun & self._is_new[plan.rows]).tolist():
            self._bytes[:, blocks[index], :, :, starts[index] - begins[index] :] = 0
        self._is_new[plan.rows] = False
