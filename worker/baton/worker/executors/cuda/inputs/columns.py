"""Converts a plan to the columns that kernels read: sequences, their tokens, and which are sampled. Host only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.worker.core import Int64, StepPlan


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The sequences of a step: first those that decode one token, then chunks. Results of row -1 are ignored."""

    rows: Int64  # [num_seqs]
    num_computed: Int64  # [num_seqs], before the step
    counts: Int64  # [num_seqs] tokens of the step
    num_decodes: int
    chosen: Int64  # sequences that sample after their last token, in the plan's order

    @property
    def starts(self) -> Int64:
        """Index of each sequence's first token in the step, [num_seqs + 1]."""
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(self.counts)))


def step_columns(plan: StepPlan, rows: Int64) -> StepColumns:
    """Returns the plan's columns. `rows` are the plan's, with -1 for excluded ones."""
    return StepColumns(
        rows,
        plan.num_computed_tokens.astype(np.int64),
        plan.num_scheduled_tokens.astype(np.int64),
        plan.num_decodes,
        np.flatnonzero(plan.samples),
    )


def unroll_outputs(columns: StepColumns, num_prompt_tokens: Int64) -> StepColumns:
    """Returns the step with each generated token that a chunk recomputes as a separate decode.

    So each token is computed by the same kernel as at first: prompt tokens by the one for chunks, generated ones by the
    one for decodes. `num_prompt_tokens` is [num_seqs].
    """
    decodes = columns.num_decodes
    first = columns.num_computed[decodes:]
    ends = first + columns.counts[decodes:]
    begins = np.clip(num_prompt_tokens[decodes:], first, ends)  # of the generated tokens
    num_outputs = ends - begins
    if not num_outputs.any():
        return columns
    num_unrolled = int(num_outputs.sum())
    rows = columns.rows[decodes:]
    left = begins > first  # chunks with prompt tokens
    offsets = np.arange(num_unrolled) - np.repeat(np.cumsum(num_outputs) - num_outputs, num_outputs)
    new_index = np.arange(len(columns.rows))
    new_index[decodes:] = np.where(
        num_outputs > 0, decodes + np.cumsum(num_outputs) - 1, decodes + num_unrolled + np.cumsum(left) - 1
    )
    return StepColumns(
        np.concatenate((columns.rows[:decodes], np.repeat(rows, num_outputs), rows[left])),
        np.concatenate((columns.num_computed[:decodes], np.repeat(begins, num_outputs) + offsets, first[left])),
        np.concatenate((columns.counts[:decodes], np.ones(num_unrolled, np.int64), (begins - first)[left])),
        decodes + num_unrolled,
        new_index[columns.chosen],
    )
