"""The steps that a start of a pooling model runs, so that nothing is compiled or out of memory while requests run.

Their plans use rows from 0 on and only the first block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.worker.core import HeadKind, PoolingParams, PoolingTask, Row, RowInit, SamplingParams, StepPlan
from baton.worker.models.pooling.spec import PoolerSpec

# Tokens: one count for each split of the kernels for few tokens, and tiles of both sizes.
_COUNTS = (1, 2, 17, 33, 65, 129)


def largest_pooled_steps(pooler: PoolerSpec, num_tokens: int, longest: int, num_rows: int) -> list[StepPlan]:
    """Returns plans with prompts of num_tokens in total, one for each kind of vectors."""
    lengths: list[int] = []
    while num_tokens > 0 and len(lengths) < num_rows:
        lengths.append(min(num_tokens, longest))
        num_tokens -= lengths[-1]
    return [_plan(task, lengths) for task in pooler.tasks]


def small_pooled_steps(pooler: PoolerSpec, longest: int, num_rows: int) -> list[StepPlan]:
    """Returns plans that use all specializations of kernels."""
    lengths = [[count] for count in _COUNTS if count <= longest]
    lengths += [[1] * count for count in {2, num_rows} if count <= num_rows]
    return [_plan(task, each) for task in pooler.tasks for each in lengths]


def _plan(task: PoolingTask, lengths: Sequence[int]) -> StepPlan:
    params = PoolingParams(task, reads_all=True)
    return StepPlan(
        step=0,
        admitted=[
            RowInit(Row(row), np.zeros(length, np.int32), length, SamplingParams(), params)
            for row, length in enumerate(lengths)
        ],
        rows=np.arange(len(lengths)),
        num_scheduled_tokens=np.array(lengths, np.int32),
        num_computed_tokens=np.zeros(len(lengths), np.int32),
        samples=np.ones(len(lengths), np.bool_),
        head=HeadKind.POOL,
    )
