"""Drafts in steps on a CPU: writes guessed tokens behind the known ones of decoding rows, and learns what they gave."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from baton.worker.core import StepPlan, StepResult
from baton.worker.executors.cpu.rows import Rows
from baton.worker.models.hidden_states import HiddenStates
from baton.worker.speculation.speculator import Speculator


@runtime_checkable
class HiddenReader(Protocol):
    """A proposer that reads the model's hidden states."""

    hidden_layers: tuple[int, ...]  # ascending; their inputs are read

    def take_hidden(self, plan: StepPlan, hidden: Tensor) -> None:
        """Takes the hidden states [plan.num_tokens, len(hidden_layers) * hidden_size] of a computed step."""


class StepDrafts:
    """The drafts of the batch's rows. Without a speculator there are none."""

    def __init__(
        self, rows: Rows, speculator: Speculator | None, most: int = 0, reader: HiddenReader | None = None
    ) -> None:
        """`most`: drafts of a row in a step; `reader`: the proposer, if it reads hidden states."""
        self.max_step_tokens = 1 + most
        self._rows = rows
        self._live: set[int] = set()
        self._speculator = speculator
        self._reader = reader
        self._num_reported = 0  # of the speculator's failures

    def hidden_states(self) -> HiddenStates | None:
        """Returns what collects the hidden states of a step that the proposer reads; None: it reads none."""
        return None if self._reader is None else HiddenStates(self._reader.hidden_layers)

    def take_hidden(self, computed: StepPlan, hidden_states: HiddenStates | None) -> None:
        """Gives the proposer what `hidden_states` has collected."""
        if self._reader is not None and hidden_states is not None:
            self._reader.take_hidden(computed, hidden_states.joined())

    def take_rows(self, plan: StepPlan) -> None:
        """Ends the plan's freed rows, and begins its admitted ones. Call before `Rows.admit`."""
        if self._speculator is None:
            return
        for row in self._live.intersection((*plan.freed, *(init.row for init in plan.admitted))):
            self._live.discard(row)
            start, stop = int(self._rows.num_prompt_tokens[row]), int(self._rows.num_tokens[row])
            self._speculator.free(row, self._rows.token_ids[row, start:stop])
        for init in plan.admitted:
            self._live.add(init.row)
            self._speculator.admit(init)

    def add(self, plan: StepPlan) -> StepPlan:
        """Returns the plan of what the step computes: the last known token of each decode, and its drafts."""
        count = plan.num_decodes
        if self._speculator is None or not count:
            return plan
        rows = plan.rows[:count].astype(np.int64)
        most = plan.num_scheduled_tokens[:count].astype(np.int64) - 1
        found = self._speculator.drafts(rows, self._rows.token_ids, self._rows.num_tokens, most)
        self._rows.num_drafts[rows] = 0
        for index, drafts in enumerate(found):
            if len(drafts):
                self._rows.set_drafts(int(rows[index]), drafts)
        num_scheduled = plan.num_scheduled_tokens.copy()
        num_scheduled[:count] = 1 + self._rows.num_drafts[rows]
        return dataclasses.replace(plan, num_scheduled_tokens=num_scheduled)

    def observe(self, computed: StepPlan, result: StepResult) -> None:
        """Records the drafts of a computed step in its result, and learns from them."""
        count = computed.num_decodes
        if self._speculator is None:
            return
        failed, self._num_reported = self._speculator.num_failed - self._num_reported, self._speculator.num_failed
        result.num_proposer_failures = failed
        if not count:
            return
        drafted = computed.num_scheduled_tokens[:count] - 1
        accepted = np.maximum(result.counts[:count] - 1, 0)
        rows = computed.rows[:count].astype(np.int64)
        self._rows.num_drafts[rows] = 0
        self._speculator.lengths.observe(rows, drafted.astype(np.int64), accepted.astype(np.int64))
        if count == len(computed.rows):
            self._speculator.lengths.times.observe(int(computed.num_tokens), result.seconds)
        if drafted.any():
            result.drafted = drafted.astype(np.int32)

    def sleep(self) -> int:
        """Frees the proposer's memory that can be made again. Returns its bytes."""
        return 0 if self._speculator is None else self._speculator.sleep()

    def close(self) -> None:
        """Ends the proposer's threads."""
        if self._speculator is not None:
            self._speculator.close()
