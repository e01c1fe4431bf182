"""A plan as the columns that a step's kernels read: which sequences, how much of each, which are sampled. Host only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import Int64, StepPlan


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Sequences that decode one token first, then chunks. A row of -1 computes nothing that counts."""

    rows: Int64  # [num_seqs]
    num_computed: Int64  # [num_seqs], before the step
    counts: Int64  # [num_seqs] tokens of the step
    num_decodes: int
    chosen: Int64  # sequences whose last token is followed by a sample, in the plan's order

    @property
    def starts(self) -> Int64:
        """[num_seqs + 1]: where each sequence's tokens begin among the step's."""
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(self.counts)))


def step_columns(plan: StepPlan, rows: NDArray[np.int32]) -> StepColumns:
    """The plan as it is. `rows` are the plan's, with -1 for those that must not be touched."""
    return StepColumns(
        rows.astype(np.int64),
        plan.num_computed_tokens.astype(np.int64),
        plan.num_scheduled_tokens.astype(np.int64),
        plan.num_decodes,
        np.flatnonzero(plan.samples),
    )


def unroll_outputs(columns: StepColumns, num_prompt_tokens: Int64) -> StepColumns:
    """The same step with every generated token that a chunk computes again as a decode of its own.

    `num_prompt_tokens` [num_seqs] tells prompt from output. A token's result then comes from the kernel that computed
    it first: the one for chunks in the prompt, the one for decodes behind it.
    """
    decodes = columns.num_decodes
    first = columns.num_computed[decodes:]
    ends = first + columns.counts[decodes:]
    begins = np.clip(num_prompt_tokens[decodes:], first, ends)  # of the outputs
    num_outputs = ends - begins
    if not num_outputs.any():
        return columns
    num_unrolled = int(num_outputs.sum())
    rows = columns.rows[decodes:]
    left = begins > first  # chunks that have prompt tokens
    offsets = np.arange(num_unrolled) - np.repeat(np.cumsum(num_outputs) - num_outputs, num_outputs)
    place = np.arange(len(columns.rows))
    place[decodes:] = np.where(
        num_outputs > 0, decodes + np.cumsum(num_outputs) - 1, decodes + num_unrolled + np.cumsum(left) - 1
    )
    return StepColumns(
        np.concatenate((columns.rows[:decodes], np.repeat(rows, num_outputs), rows[left])),
        np.concatenate((columns.num_computed[:decodes], np.repeat(begins, num_outputs) + offsets, first[left])),
        np.concatenate((columns.counts[:decodes], np.ones(num_unrolled, np.int64), (begins - first)[left])),
        decodes + num_unrolled,
        place[columns.chosen],
    )
