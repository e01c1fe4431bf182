"""Speculation on a device: drafts behind the known tokens of decodes, and what was right of them.

The host proposes drafts, so a step with some is launched once the tokens of the step before are read. The plan is made
before that, and all other work on those tokens follows the launch: the device waits for the proposer only. Steps are
launched ahead while no row gains by drafts.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import Int32, Int64, RowInit, StepPlan, StepResult, TokenMasks
from baton.worker.executors.cuda.drafts.drafted_plan import DraftedPlan, within_masks
from baton.worker.executors.cuda.drafts.look_pace import LookPace
from baton.worker.sampling.penalties import is_penalized
from baton.worker.speculation.speculator import Speculator

_NONE = np.empty(0, np.int32)


@dataclass(slots=True)
class _Launched:
    """A step on the device. Columns are over the plan's rows."""

    plan: StepPlan
    drafted: DraftedPlan | None  # None: no row has drafts
    starts: Int64  # known tokens of the rows before it
    generations: Int64  # of the rows: which of their requests it computes
    looked: bool
    waited: float = 0.0  # seconds that the device had nothing to do for the look
    left_out: Int32 = field(default_factory=lambda: _NONE)


class VerifiedSteps:
    """The known tokens of the batch's rows, and the drafts of steps between `add` and `collect`.

    `collect` waits for the oldest of the `num_launched` steps on the device. A step computes at most `num_sequences`.
    """

    def __init__(
        self,
        speculator: Speculator,
        num_rows: int,
        max_model_len: int,
        num_sequences: int,
        collect: Callable[[], StepResult],
        num_launched: Callable[[], int],
    ) -> None:
        self.speculator = speculator
        self.token_ids = np.zeros((num_rows, max_model_len + 1), np.int32)  # untouched pages take no memory
        self._num_tokens = np.zeros(num_rows, np.int64)  # known
        self._num_ahead = np.zeros(num_rows, np.int64)  # tokens of steps in flight
        self._num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._alone = np.zeros(num_rows, np.bool_)  # rows whose tokens change what is counted of the next ones
        self._generations = np.zeros(num_rows, np.int64)  # requests that each row has had
        self._live: set[int] = set()
        self._num_sequences = num_sequences
        self._collect, self._num_launched = collect, num_launched
        self._launched: deque[_Launched] = deque()
        self._read: deque[StepResult | Exception] = deque()
        self._next: _Launched | None = None
        self._pace = LookPace()
        self._num_reported = 0  # of the speculator's failures

    def close(self) -> None:
        """Drops what was read ahead, and ends the proposer's threads."""
        self._read.clear()
        self.speculator.close()

    def add(self, plan: StepPlan) -> StepPlan:
        """Returns the plan of what the device computes: one token of each decode, and its drafts.

        Waits for the steps in flight if they have drafts, or if some are proposed.
        """
        self._take_rows(plan)
        self._next = None
        rows, count = plan.rows.astype(np.int64), plan.num_decodes
        most = self._most(plan, rows[:count])
        looks = bool(most.any()) and self._pace.due() and bool(self.speculator.lengths.worth(rows[:count]).any())
        if count and (looks or any(step.drafted is not None for step in self._launched)):
            self._read_ahead()
        began = time.perf_counter()
        drafted = None
        if looks:
            found = self.speculator.drafts(rows, self.token_ids, self._num_tokens, most)
            found, walked = within_masks(plan.masks, found)
            if any(map(len, found)):
                drafted = DraftedPlan.of(plan, self._num_tokens[rows], found, walked)
        starts = self._num_tokens[rows] + self._num_ahead[rows]
        self._next = _Launched(plan, drafted, starts, self._generations[rows], looks, began)
        if drafted is not None:
            return drafted.plan
        num_scheduled, num_computed = plan.num_scheduled_tokens.copy(), plan.num_computed_tokens.copy()
        num_scheduled[:count], num_computed[:count] = 1, starts[:count] - 1
        return dataclasses.replace(plan, num_scheduled_tokens=num_scheduled, num_computed_tokens=num_computed)

    def drafts(self) -> tuple[Int64, Int64, Int32]:
        """Returns the rows, positions and tokens of the step's drafts, which it reads as tokens of the batch."""
        drafted = None if self._next is None else self._next.drafted
        if drafted is None:
            return np.empty(0, np.int64), np.empty(0, np.int64), _NONE
        given = drafted.drafts >= 0
        plan = drafted.plan
        return (
            plan.rows[given].astype(np.int64),
            plan.num_computed_tokens[given].astype(np.int64),
            drafted.drafts[given],
        )

    def placed(self, masks: TokenMasks | None, left_out: Int32) -> tuple[TokenMasks | None, Int32]:
        """Returns masks and left out rows of the step's plan as those of what the device computes."""
        step = self._next
        if step is None:
            return masks, left_out
        step.left_out = left_out
        if step.drafted is None:
            return masks, left_out
        return step.drafted.masks(masks), step.drafted.starts[left_out].astype(np.int32)

    def launched(self) -> None:
        """Records that the step is on the device."""
        step, self._next = self._next, None
        assert step is not None, "a step was added"
        if step.looked:
            step.waited = time.perf_counter() - step.waited
        self._launched.append(step)
        if step.drafted is None:
            self._num_ahead[_sampling_rows(step)] += 1

    def ended(self) -> bool:
        """Returns whether a step was read ahead, so that `collect` returns at once."""
        return bool(self._read)

    def collect(self) -> StepResult:
        """Returns the result of the oldest step, with the accepted tokens only. Raises what its collection raised."""
        if not self._read:
            self._read.append(self._read_one())
        result = self._read.popleft()
        if isinstance(result, Exception):
            raise result
        return result

    def _read_ahead(self) -> None:
        while self._num_launched():
            self._read.append(self._read_one())

    def _read_one(self) -> StepResult | Exception:
        step = self._launched.popleft()
        try:
            result = self._collect()
        except Exception as error:  # of that step, so raised by its collection
            return error
        if step.drafted is not None:
            result = step.drafted.accepted(result)
        self._store(step, result)
        self._learn(step, result)
        return result

    def _store(self, step: _Launched, result: StepResult) -> None:
        """Writes a step's tokens to the rows that still have its requests."""
        rows = step.plan.rows.astype(np.int64)
        counts = np.where(self._generations[rows] == step.generations, result.counts, 0)
        index = np.repeat(np.arange(len(rows)), result.counts)
        own = counts[index] > 0
        first = np.cumsum(result.counts) - result.counts
        offsets = np.arange(len(index)) - first[index]
        self.token_ids[rows[index[own]], (step.starts[index] + offsets)[own]] = result.token_ids[own]
        self._num_tokens[rows] += counts
        if step.drafted is None:
            self._num_ahead[rows] -= counts

    def _learn(self, step: _Launched, result: StepResult) -> None:
        plan, count = step.plan, step.plan.num_decodes
        num_failed = self.speculator.num_failed
        result.num_proposer_failures, self._num_reported = num_failed - self._num_reported, num_failed
        if not count:
            return
        drafted = np.zeros(count, np.int64) if result.drafted is None else result.drafted.astype(np.int64)
        accepted = np.maximum(result.counts[:count].astype(np.int64) - 1, 0)
        lengths = self.speculator.lengths
        lengths.observe(plan.rows[:count].astype(np.int64), drafted, accepted)
        if count == len(plan.rows):
            lengths.times.observe(count + int(drafted.sum()), result.seconds + step.waited)
        if step.looked:
            self._pace.observe(int(accepted.sum()), count, result.seconds, step.waited)
        else:
            self._pace.skipped()

    def _most(self, plan: StepPlan, rows: Int64) -> Int64:
        """Returns the most drafts of each decode."""
        count = len(rows)
        # Prompts hide what a draft would save, and masks that follow the launch are of the last known token.
        if not count or count < len(plan.rows) or plan.masks_follow:
            return np.zeros(count, np.int64)
        most = plan.num_scheduled_tokens[:count].astype(np.int64) - 1
        most[self._alone[rows]] = 0
        return np.minimum(most, (self._num_sequences - count) // count)

    def _take_rows(self, plan: StepPlan) -> None:
        for row in self._live.intersection((*plan.freed, *(init.row for init in plan.admitted))):
            self._live.discard(row)
            start, stop = int(self._num_prompt_tokens[row]), int(self._num_tokens[row])
            self.speculator.free(row, self.token_ids[row, start:stop])
        for init in plan.admitted:
            self._admit(init)

    def _admit(self, init: RowInit) -> None:
        row, count = init.row, len(init.token_ids)
        self._live.add(row)
        self._generations[row] += 1
        self._num_ahead[row] = 0
        self.token_ids[row, :count] = init.token_ids
        self._num_tokens[row], self._num_prompt_tokens[row] = count, init.num_prompt_tokens
        # Penalties count each sampled token; processors see one position of a row.
        self._alone[row] = is_penalized(init.sampling) or bool(init.sampling.extra_args)
        self.speculator.admit(init)


def _sampling_rows(step: _Launched) -> Int64:
    samples: NDArray[np.bool_] = step.plan.samples.copy()
    samples[np.flatnonzero(samples)[step.left_out]] = False
    return step.plan.rows[samples].astype(np.int64)
