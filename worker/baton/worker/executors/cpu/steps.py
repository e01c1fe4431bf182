"""The inputs of steps, by whether the model keeps keys and values: over blocks of a cache, or of whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.kernels.reference.attention.whole_attention import runs_of
from baton.worker.core import StepPlan
from baton.worker.executors.cpu.rows import Rows
from baton.worker.executors.cpu.step_inputs import Gathers, make_step_inputs, views_of
from baton.worker.executors.host.whole_rows import WholeRows
from baton.worker.layers.cpu.step import StepInputs, WholeInputs
from baton.worker.models.config import ModelConfig


class Steps(Protocol):
    """Makes the inputs of steps from the batch's rows."""

    def apply(self, plan: StepPlan) -> None:
        """Stores what inputs need of the plan's admitted rows."""

    def make(self, plan: StepPlan) -> StepInputs | WholeInputs:
        """Returns the inputs of a plan. Raises InternalError if its rows do not have what it computes."""


class PagedSteps:
    """Implements Steps over blocks."""

    def __init__(
        self,
        rows: Rows,
        config: ModelConfig,
        groups: Sequence[int],
        cache: Tensor,
        dtype: torch.dtype,
        *,
        aligned: bool = False,
    ) -> None:
        """`cache`: of any layer; `dtype`: what it is computed in."""
        self._aligned = aligned
        self._rows = rows
        self._views = views_of(config.windows, groups)
        self._gathers = Gathers(cache, dtype)

    def apply(self, plan: StepPlan) -> None:
        """Stores the blocks of groups after the first."""
        for row, group, start, block_ids in plan.more_blocks:
            self._rows.set_blocks(row, group, start, block_ids)

    def make(self, plan: StepPlan) -> StepInputs:
        self._rows.check_tokens(plan)
        self._rows.check_blocks(plan)
        return make_step_inputs(plan, self._rows, self._views, self._gathers, aligned=self._aligned)


class WholeSteps:
    """Implements Steps without a cache: a step computes whole prompts."""

    def __init__(self, config: ModelConfig) -> None:
        self._rows = WholeRows(has_types=config.num_token_types > 1)

    def apply(self, plan: StepPlan) -> None:
        """Stores the tokens of admitted rows."""
        self._rows.apply(plan)

    def make(self, plan: StepPlan) -> WholeInputs:
        columns = self._rows.columns(plan)
        types = columns.token_types
        return WholeInputs(
            token_ids=torch.from_numpy(columns.token_ids.astype(np.int64)),
            positions=torch.from_numpy(columns.positions.astype(np.int64)),
            token_types=None if types is None else torch.from_numpy(types.astype(np.int64)),
            runs=runs_of(columns.seq_lens.tolist()),
        )
