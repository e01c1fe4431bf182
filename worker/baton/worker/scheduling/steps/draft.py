"""Builds the executor's plan of one step from decisions. Decides nothing itself."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from baton.worker.core import BlockId, Int64, MoreBlocks, Request, Row, RowInit, StepPlan
from baton.worker.requests.outputs import PrefillStarted
from baton.worker.requests.state import RequestState
from baton.worker.scheduling.steps.batch import Batch


@dataclass(slots=True)
class ScheduledStep:
    """A plan, and its requests."""

    plan: StepPlan
    states: list[RequestState]  # one for each of the plan's rows
    started: list[PrefillStarted]
    num_prefill_tokens: int

    def admitted_requests(self) -> list[Request]:
        """Returns the requests that get a row in this step."""
        rows = {init.row for init in self.plan.admitted}
        return [state.request for state, row in zip(self.states, self.plan.rows.tolist(), strict=True) if row in rows]


@dataclass(slots=True)
class Draft:
    """The decisions of a step so far. A request that is preempted is taken out again."""

    step: int  # its number
    budget: int  # tokens left
    preempted: bool = False  # a decode found no block
    new_blocks: dict[Row, list[BlockId]] = field(default_factory=dict)
    more_blocks: dict[Row, list[MoreBlocks]] = field(default_factory=dict)
    admitted: dict[Row, RowInit] = field(default_factory=dict)
    chunks: dict[RequestState, int] = field(default_factory=dict)
    started: dict[RequestState, PrefillStarted] = field(default_factory=dict)
    waiting: set[RequestState] = field(default_factory=set)  # have a row, and no blocks to compute more in this step
    _decode_rows: Int64 | None = field(default=None, init=False)  # None: not computed yet, or outdated

    def decode_rows(self, batch: Batch) -> Int64:
        """Returns the rows that decode."""
        if self._decode_rows is None:
            self._decode_rows = batch.decode_rows()
        return self._decode_rows

    def take_out(self, state: RequestState, row: Row) -> None:
        """Removes a request from this step."""
        self.new_blocks.pop(row, None)
        self.more_blocks.pop(row, None)
        self.admitted.pop(row, None)
        self.chunks.pop(state, None)
        self._decode_rows = None

    def finalize(self, batch: Batch, block_size: int) -> ScheduledStep | None:
        """Advances the batch by all decodes and the chunks, and returns the plan. None: there is nothing to run."""
        for state, chunk in list(self.chunks.items()):
            first = int(batch.num_computed[state.row])
            self._name_partial(state, first, first + chunk, block_size)
            # A remotely prefilled request continues as a decode at once. A prefill for another worker stays one: its
            # KV is pushed while it is computed.
            whole = chunk == 1 and first + 1 == len(state.token_ids) and not state.request.prefill_only
            if whole and first >= state.request.num_prompt_tokens:
                del self.chunks[state]
                batch.start_decoding(state)
                self._decode_rows = None
        decode_rows = self.decode_rows(batch)
        num_decodes = len(decode_rows)
        states = batch.states_at(decode_rows)
        states.extend(self.chunks)
        if not states:
            return None
        rows = decode_rows
        if self.chunks:
            rows = np.concatenate((decode_rows, np.array([state.row for state in self.chunks], np.int64)))
        num_scheduled = batch.step_tokens(decode_rows, self.budget)
        if self.chunks:
            num_scheduled = np.concatenate((num_scheduled, np.array(list(self.chunks.values()), np.int32)))
        num_computed = batch.num_computed[rows]
        samples = np.empty(len(rows), np.bool_)
        samples.fill(True)
        for index, (state, chunk) in enumerate(self.chunks.items(), num_decodes):
            samples[index] = num_computed[index] + chunk == len(state.token_ids)
            if samples[index]:
                batch.start_decoding(state)
        batch.num_computed[rows] = num_computed + num_scheduled
        batch.last_step[rows] = self.step
        plan = StepPlan(
            step=self.step,
            freed=batch.take_freed(),
            admitted=list(self.admitted.values()),
            new_blocks=list(self.new_blocks.items()),
            more_blocks=list(itertools.chain.from_iterable(self.more_blocks.values())),
            rows=rows,
            num_scheduled_tokens=num_scheduled,
            num_computed_tokens=num_computed,
            samples=samples,
            num_decodes=num_decodes,
            head=states[0].request.head,
        )
        return ScheduledStep(plan, states, list(self.started.values()), sum(self.chunks.values()))

    def _name_partial(self, state: RequestState, start: int, stop: int, block_size: int) -> None:
        """Names all blocks of a prompt in partial groups, since steps that did not compute it named none."""
        if not state.partial:
            return
        row = Row(state.row)
        for blocks in state.partial:
            blocks.write(start, stop, block_size)
        self.more_blocks[row] = [
            MoreBlocks(row, blocks.group, *span) for blocks in state.partial for span in blocks.named()
        ]
