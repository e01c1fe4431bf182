"""The inputs of steps, by whether the model keeps keys and values: over blocks of a cache, or of whole prompts."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.kernels.reference.attention.paged_attention import Scratch
from baton.kernels.reference.attention.whole_attention import runs_of
from baton.rpc.errors import InternalError
from baton.worker.core import RowInit, StepPlan
from baton.worker.executors.cpu.rows import Rows
from baton.worker.executors.cpu.step_inputs import make_step_inputs
from baton.worker.layers.cpu.step import StepInputs, WholeInputs
from baton.worker.models.config import ModelConfig


class Steps(Protocol):
    """Makes the inputs of steps from the batch's rows."""

    def admit(self, init: RowInit) -> None:
        """Stores what inputs need of a request besides its tokens."""

    def make(self, plan: StepPlan) -> StepInputs | WholeInputs:
        """Returns the inputs of a plan. Raises InternalError if its rows do not have what it computes."""


class PagedSteps:
    """Implements Steps over blocks."""

    def __init__(self, rows: Rows, config: ModelConfig, cache: Tensor) -> None:
        self._rows = rows
        self._config = config
        self._cache = cache  # of any layer: only its shape is used
        self._scratch = Scratch(cache)

    def admit(self, init: RowInit) -> None:
        """Does nothing: the rows have all that is needed."""

    def make(self, plan: StepPlan) -> StepInputs:
        self._rows.check_tokens(plan)
        self._rows.check_blocks(plan)
        return make_step_inputs(plan, self._rows, self._config, self._cache, self._scratch)


class WholeSteps:
    """Implements Steps without a cache: a step computes whole prompts."""

    def __init__(self, rows: Rows, num_rows: int, config: ModelConfig) -> None:
        self._rows = rows
        self._has_types = config.num_token_types > 1
        self._second_starts = np.zeros(num_rows, np.int64)  # by row: the token at which the second text begins; 0: none

    def admit(self, init: RowInit) -> None:
        """Stores where the second text of a pair begins."""
        self._second_starts[init.row] = 0 if init.pooling is None else init.pooling.second_text_start

    def make(self, plan: StepPlan) -> WholeInputs:
        self._rows.check_tokens(plan)
        if plan.num_computed_tokens.any() or not plan.samples.all():
            raise InternalError(f"step {plan.step} computes parts of prompts; this model computes them whole")
        lengths = plan.num_scheduled_tokens.astype(np.int64)
        row_of_token = np.repeat(plan.rows, lengths).astype(np.int64)
        positions = np.arange(len(row_of_token)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        types = None
        if self._has_types and self._second_starts[plan.rows].any():
            starts = self._second_starts[row_of_token]
            types = torch.from_numpy(((starts > 0) & (positions >= starts)).astype(np.int64))
        return WholeInputs(
            token_ids=torch.from_numpy(self._rows.token_ids[row_of_token, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            token_types=types,
            runs=runs_of(lengths.tolist()),
        )
