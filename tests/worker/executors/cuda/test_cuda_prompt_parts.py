"""The tokens of a step that predict prompts with log-probabilities, compared with a list of all tokens."""

from __future__ import annotations

import numpy as np
import pytest

from baton.worker.core import StepPlan
from baton.worker.executors.cuda.inputs.columns import StepColumns, step_columns, unroll_outputs
from baton.worker.executors.cuda.sampling.prompt_logprobs import prompt_parts

NUM_PROMPT_TOKENS = np.array([30, 10, 20, 5, 1, 12, 40])
# Rows, tokens computed before, tokens of the step: decodes, chunks within and beyond prompts, a resumed request.
PLAN = StepPlan(
    1,
    rows=np.array([3, 2, 0, 1, 4, 5, 6], np.int32),
    num_computed_tokens=np.array([6, 21, 5, 2, 0, 0, 39], np.int32),
    num_scheduled_tokens=np.array([1, 1, 13, 12, 1, 11, 4], np.int32),
    samples=np.array([1, 1, 0, 1, 1, 0, 0], np.bool_),
    num_decodes=2,
)


def naive(columns: StepColumns, asking: set[int]) -> dict[tuple[int, int], int]:
    """By row and place in its prompt, the step's token that foretells it."""
    each = zip(columns.rows.tolist(), columns.num_computed.tolist(), columns.counts.tolist(), strict=True)
    tokens = [(row, first + index) for row, first, count in each for index in range(count)]
    return {
        (row, position + 1): at
        for at, (row, position) in enumerate(tokens)
        if row in asking and position + 1 < NUM_PROMPT_TOKENS[row]
    }


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("asking", [set(), {0}, {0, 1, 4, 5, 6}, set(range(7))])
def test_every_place_of_a_prompt_is_foretold_by_the_token_before(unrolled: bool, asking: set[int]) -> None:
    columns = step_columns(PLAN, PLAN.rows)
    if unrolled:
        columns = unroll_outputs(columns, NUM_PROMPT_TOKENS[PLAN.rows])
    found = {}
    for part in prompt_parts(PLAN, columns, NUM_PROMPT_TOKENS, asking):
        assert PLAN.rows[part.index] == part.row
        found.update({(part.row, part.first + at): part.begin + at for at in range(part.count)})
    assert found == naive(columns, asking)
    assert len(found) == {0: 0, 1: 13, 5: 31, 7: 31}[len(asking)]


def test_rows_that_are_not_to_be_touched_have_none() -> None:
    columns = step_columns(PLAN, np.full(7, -1, np.int32))
    assert list(prompt_parts(PLAN, columns, NUM_PROMPT_TOKENS, set(range(7)))) == []
