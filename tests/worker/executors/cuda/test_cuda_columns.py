"""A plan's columns for the kernels, and generated tokens unrolled into decodes: compared with a list of every token."""

from __future__ import annotations

import numpy as np
import pytest

from baton.worker.core import StepPlan
from baton.worker.executors.cuda.inputs.batch import RowTrust
from baton.worker.executors.cuda.inputs.columns import StepColumns, step_columns, unroll_outputs


def plan_of(sequences: list[tuple[int, int, int, bool]], num_decodes: int) -> StepPlan:
    """Sequences of (row, computed, count, samples)."""
    rows, computed, counts, samples = (np.array(column) for column in zip(*sequences, strict=True))
    return StepPlan(
        1,
        rows=rows.astype(np.int32),
        num_computed_tokens=computed.astype(np.int32),
        num_scheduled_tokens=counts.astype(np.int32),
        samples=samples.astype(np.bool_),
        num_decodes=num_decodes,
    )


def tokens_of(columns: StepColumns) -> list[tuple[int, int]]:
    """(row, position) of each of the step's tokens."""
    each = zip(columns.rows.tolist(), columns.num_computed.tolist(), columns.counts.tolist(), strict=True)
    return [(row, first + index) for row, first, count in each for index in range(count)]


def sampled_after(columns: StepColumns) -> list[tuple[int, int]]:
    last = columns.starts[columns.chosen + 1] - 1
    return [tokens_of(columns)[index] for index in last.tolist()]


def test_a_plans_columns_are_the_plans() -> None:
    plan = plan_of([(4, 9, 1, True), (2, 0, 5, False), (7, 3, 2, True)], 1)
    columns = step_columns(plan, plan.rows)
    assert columns.starts.tolist() == [0, 1, 6, 8]
    assert sampled_after(columns) == [(4, 9), (7, 4)]


@pytest.mark.parametrize("seed", range(30))
def test_unrolled_steps_compute_the_same_tokens_and_sample_in_the_same_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_decodes, num_chunks = random.integers(0, 4), random.integers(1, 6)
    rows = random.permutation(20)
    sequences = [(int(rows[i]), int(random.integers(3, 30)), 1, True) for i in range(num_decodes)]
    for i in range(num_chunks):
        row = int(rows[num_decodes + i])
        sequences.append((row, int(random.integers(0, 20)), int(random.integers(1, 9)), bool(random.integers(2))))
    plan = plan_of(sequences, int(num_decodes))
    columns = step_columns(plan, plan.rows)
    prompts = random.integers(1, 30, len(sequences))
    unrolled = unroll_outputs(columns, prompts)
    assert sorted(tokens_of(unrolled)) == sorted(tokens_of(columns))
    assert sampled_after(unrolled) == sampled_after(columns)
    prompt_of = dict(zip(columns.rows.tolist(), prompts.tolist(), strict=True))
    decodes = unrolled.num_decodes
    assert (unrolled.counts[:decodes] == 1).all()
    assert tokens_of(unrolled)[:num_decodes] == tokens_of(columns)[:num_decodes]
    behind = zip(unrolled.rows[num_decodes:decodes], unrolled.num_computed[num_decodes:decodes], strict=True)
    assert all(position >= prompt_of[int(row)] for row, position in behind)
    for row, first, count in zip(
        unrolled.rows[decodes:], unrolled.num_computed[decodes:], unrolled.counts[decodes:], strict=True
    ):
        assert count > 0
        assert first + count <= prompt_of[int(row)]


def test_a_step_of_prompts_alone_is_left_as_it_is() -> None:
    plan = plan_of([(4, 9, 1, True), (2, 0, 5, True)], 1)
    columns = step_columns(plan, plan.rows)
    assert unroll_outputs(columns, np.array([3, 5])) is columns


def test_rows_of_a_failed_step_are_masked_until_they_are_admitted_again() -> None:
    trust = RowTrust(6)
    rows = np.array([1, 4, 5], np.int32)
    assert trust.masked(rows) is rows
    trust.withdraw(np.array([4, 5], np.int32))
    assert trust.masked(rows).tolist() == [1, -1, -1]
    trust.restore(np.array([4]))
    assert trust.masked(rows).tolist() == [1, 4, -1]
    trust.restore(np.array([5]))
    assert trust.masked(rows) is rows
