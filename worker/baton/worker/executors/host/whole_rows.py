"""The rows of a batch that computes whole prompts: their tokens, and the columns of a step. Knows no tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from baton.rpc.errors import InternalError
from baton.worker.core import Int32, Int64, StepPlan


class WholeColumns(NamedTuple):
    """The tokens of a step: whole prompts, one after another."""

    token_ids: Int32  # [num_tokens]
    positions: Int32  # [num_tokens]
    token_types: Int32 | None  # [num_tokens]; None: all are 0
    seq_lens: Int64  # [num_seqs]


class WholeRows:
    """The tokens of each row, and where its second text begins."""

    def __init__(self, *, has_types: bool) -> None:
        self._has_types = has_types
        self._token_ids: dict[int, Int32] = {}  # by row
        self._second_starts: dict[int, int] = {}  # by row: the token at which the second text begins; 0: none

    def apply(self, plan: StepPlan) -> None:
        """Drops the tokens of freed rows, and stores those of admitted ones."""
        for row in plan.freed:
            self._token_ids.pop(row, None)
        for init in plan.admitted:
            self._token_ids[init.row] = init.token_ids
            self._second_starts[init.row] = 0 if init.pooling is None else init.pooling.second_text_start

    def columns(self, plan: StepPlan) -> WholeColumns:
        """Returns a step's columns. Raises InternalError unless the plan computes whole prompts of its rows."""
        if plan.num_computed_tokens.any() or not plan.samples.all():
            raise InternalError(f"step {plan.step} computes parts of prompts; this model computes them whole")
        rows, seq_lens = plan.rows.tolist(), plan.num_scheduled_tokens.astype(np.int64)
        token_ids = [self._tokens_of(plan, row, count) for row, count in zip(rows, seq_lens.tolist(), strict=True)]
        ends = np.cumsum(seq_lens)
        positions = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - seq_lens, seq_lens)
        types = None
        starts = np.array([self._second_starts[row] for row in rows], np.int64)
        if self._has_types and starts.any():
            start_of_token = np.repeat(starts, seq_lens)
            types = ((start_of_token > 0) & (positions >= start_of_token)).astype(np.int32)
        return WholeColumns(np.concatenate(token_ids), positions.astype(np.int32), types, seq_lens)

    def _tokens_of(self, plan: StepPlan, row: int, count: int) -> Int32:
        known = self._token_ids.get(row)
        if known is None or len(known) != count:
            raise InternalError(
                f"step {plan.step} computes {count} tokens of row {row}; it has {0 if known is None else len(known)}"
            )
        return known
