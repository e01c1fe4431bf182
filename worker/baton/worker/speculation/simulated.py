"""Drafts of simulated devices: their number follows what pays, as on real ones, and chance says how many are right."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import Int64, StepPlan
from baton.worker.speculation.lengths import DraftLengths

UInt64 = NDArray[np.uint64]
_LEAST_CHANCE = 2.0**-53


class SimulatedDrafts:
    """The drafts of a batch's rows. Each is right with the same chance, if those before it are."""

    def __init__(self, num_rows: int, acceptance: float) -> None:
        """`acceptance`: the chance, from 0 to 1."""
        self._lengths = DraftLengths(num_rows)
        self._acceptance = acceptance

    def choose(self, plan: StepPlan) -> Int64:
        """Returns the number of drafts of each of the plan's decodes, before the step."""
        for init in plan.admitted:
            self._lengths.admit(init.row)
        count = plan.num_decodes
        return self._lengths.choose(
            plan.rows[:count].astype(np.int64), plan.num_scheduled_tokens[:count].astype(np.int64) - 1
        )

    def accepted(self, drafted: Int64, bits: UInt64) -> Int64:
        """Returns how many drafts of each row are right, by 64 random bits of each."""
        if self._acceptance >= 1:
            return drafted
        if self._acceptance <= 0:
            return np.zeros_like(drafted)
        uniform = np.maximum((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53, _LEAST_CHANCE)
        right = np.floor(np.log(uniform) / math.log(self._acceptance)).astype(np.int64)
        return np.minimum(right, drafted)

    def observe(self, plan: StepPlan, drafted: Int64, accepted: Int64, seconds: float) -> None:
        """Learns from a step."""
        count = plan.num_decodes
        self._lengths.observe(plan.rows[:count].astype(np.int64), drafted, accepted)
        if count == len(plan.rows):
            self._lengths.times.observe(count + int(drafted.sum()), seconds)
