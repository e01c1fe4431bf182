"""The inputs of steps, by whether the model keeps keys and values: over blocks of a cache, or of whole prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.kernels.reference.attention.whole_attention import runs_of
from baton.worker.core import Int32, StepPlan
from baton.worker.executors.cpu.begun_blocks import BegunBlocks
from baton.worker.executors.cpu.rows import Rows
from baton.worker.executors.cpu.step_inputs import Gathers, make_step_inputs, views_of
from baton.worker.executors.host.state_tables import StateTables, state_tables
from baton.worker.executors.host.whole_rows import WholeRows
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.cpu.states import DeferredStates, StateRun
from baton.worker.layers.cpu.step import StepInputs, WholeInputs
from baton.worker.models.config import ModelConfig


class Steps(Protocol):
    """Makes the inputs of steps from the batch's rows."""

    @property
    def states(self) -> Mapping[int, StateTables]:
        """The states of the rows, by KV group."""

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
        spec: KvSpec,
        cache: Tensor,
        dtype: torch.dtype,
        *,
        begun: BegunBlocks | None = None,  # None: blocks hold nothing but keys and values
        aligned: bool = False,
    ) -> None:
        """`cache`: of any layer; `dtype`: what it is computed in."""
        self._begun = begun
        self._aligned = aligned
        self._rows = rows
        self.states: Mapping[int, StateTables] = state_tables(spec)
        groups = spec.layer_groups
        attention = [layer for layer, group in enumerate(groups) if group not in self.states]
        self._views = views_of([config.windows[layer] for layer in attention], [groups[layer] for layer in attention])
        self._gathers = Gathers(cache, dtype)

    def apply(self, plan: StepPlan) -> None:
        """Stores the blocks of groups after the first."""
        if self._begun is not None:
            self._begun.apply(plan)
        for table in self.states.values():
            table.apply(plan)
        for blocks in plan.more_blocks:
            if blocks.group in self.states:
                self.states[blocks.group].set(blocks)
            else:
                self._rows.set_blocks(*blocks)

    def make(self, plan: StepPlan) -> StepInputs:
        self._rows.check_tokens(plan)
        self._rows.check_blocks(plan)
        if self._begun is not None:
            self._begun.clear(plan)
        states = {group: list(_state_runs(plan, table)) for group, table in self.states.items()}
        return make_step_inputs(plan, self._rows, self._views, self._gathers, states, aligned=self._aligned)


def _state_runs(plan: StepPlan, table: StateTables) -> Iterator[StateRun]:
    """Yields the decodes, then the chunks."""
    counts = plan.num_scheduled_tokens.astype(np.int64)
    ends = np.cumsum(counts)
    for rows in (slice(0, plan.num_decodes), slice(plan.num_decodes, len(counts))):
        if rows.start == rows.stop:
            continue
        start = int(ends[rows.start] - counts[rows.start])
        bounds = np.concatenate((np.zeros(1, np.int64), ends[rows] - start)).astype(np.int32)
        read, write = map(torch.from_numpy, table.pages(plan, rows))
        decodes = rows.stop == plan.num_decodes
        deferred: list[DeferredStates] | None = [] if decodes and int(counts[rows].max()) > 1 else None
        yield StateRun(start, int(ends[rows.stop - 1]), torch.from_numpy(bounds), read, write, decodes, deferred)


class WholeSteps:
    """Implements Steps without a cache: a step computes whole prompts."""

    def __init__(self, config: ModelConfig) -> None:
        self._rows = WholeRows(has_types=config.num_token_types > 1)
        self.states: Mapping[int, StateTables] = {}

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


def write_deferred(inputs: StepInputs | WholeInputs, counts: Int32) -> None:
    """Writes the states that a step has left out, after the first `counts` tokens of each of its decodes."""
    if isinstance(inputs, WholeInputs):
        return
    for run in (run for runs in inputs.states.values() for run in runs):
        if run.deferred:
            keep = torch.from_numpy(counts[: len(run.read)].astype(np.int32))
            for states in run.deferred:
                states.write(keep)
            run.deferred.clear()
