"""The persistent batch on the device equals a plain table, for rows of any length and incremental updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.kernels.sampling import columns
from baton.worker.core import BlockId, Row, RowInit, SamplingParams, StepPlan
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.executors.cuda.sampling.row_parameters import column_words, row_lists
from baton.worker.executors.cuda.sampling.sampler import DeviceSampler

pytestmark = pytest.mark.gpu

NUM_ROWS = 8
MAX_MODEL_LEN = 5000
BLOCK_SIZE = 4
MAX_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE


@pytest.mark.parametrize("seed", range(4))
def test_rows_have_the_written_values(seed: int) -> None:
    generator = np.random.default_rng(seed)
    token_ids = np.zeros((NUM_ROWS, MAX_MODEL_LEN), np.int32)
    table = np.zeros((NUM_ROWS, MAX_BLOCKS), np.int32)
    num_blocks = [0] * NUM_ROWS
    with torch.inference_mode():
        batch = DeviceBatch(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, torch.device("cuda"))
        for step in range(40):
            plan = StepPlan(step=step)
            for row in generator.permutation(NUM_ROWS)[: generator.integers(1, NUM_ROWS)].tolist():
                if generator.random() < 0.6:
                    known = generator.integers(0, 1 << 30, generator.choice([1, 5, 511, 512, 3000, MAX_MODEL_LEN]))
                    plan.admitted.append(RowInit(Row(row), known.astype(np.int32), len(known), SamplingParams()))
                    token_ids[row, : len(known)] = known
                    num_blocks[row] = 0
                count = min(int(generator.choice([0, 1, 3, 600])), MAX_BLOCKS - num_blocks[row])
                block_ids = generator.integers(0, 9999, count).tolist()
                plan.new_blocks.append((Row(row), [BlockId(block_id) for block_id in block_ids]))
                table[row, num_blocks[row] : num_blocks[row] + count] = block_ids
                num_blocks[row] += count
            batch.apply(plan)
    assert (batch.token_ids.cpu().numpy() == token_ids).all()
    assert (batch.block_table.cpu().numpy() == table).all()


@pytest.mark.parametrize("seed", range(2))
def test_rows_are_drawn_by_the_parameters_that_they_were_admitted_with(seed: int) -> None:
    generator = np.random.default_rng(seed)
    known = [SamplingParams()] * NUM_ROWS
    with torch.inference_mode():
        batch = DeviceBatch(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, torch.device("cuda"))
        sampler = DeviceSampler(NUM_ROWS, 1000, batch, torch.device("cuda"))
        admitted: set[int] = set()
        for _ in range(20):
            rows = generator.permutation(NUM_ROWS)[: generator.integers(1, NUM_ROWS)].tolist()
            admitted.update(rows)
            for row in rows:
                known[row] = SamplingParams(
                    temperature=float(generator.random()),
                    top_p=float(generator.random()),
                    min_p=float(generator.random()),
                    top_k=int(generator.integers(0, 2000)),
                    seed=int(generator.integers(-(2**63), 2**63 - 1)),
                )
            sampler.admit([RowInit(Row(row), np.zeros(9, np.int32), row + 1, known[row]) for row in rows])
    found = sampler.state.columns
    words = found.words.view(columns.NUM_COLUMNS, found.stride)[:, :NUM_ROWS].t().cpu().numpy()
    for row in admitted:
        init = RowInit(Row(row), np.zeros(9, np.int32), row + 1, known[row])
        expected = column_words([init], [row_lists(known[row], 1000)], [0], 1000)[0]
        lists = [columns.LISTS_LOW.value, columns.LISTS_HIGH.value]
        assert (np.delete(words[row], lists) == np.delete(expected, lists)).all()
