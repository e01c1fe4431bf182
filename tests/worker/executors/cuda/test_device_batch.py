"""The persistent batch equals a plain table for updates of any length. Needs no GPU: pinned memory is a stand-in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.worker.core import BlockId, MoreBlocks, Row, RowInit, SamplingParams, StepPlan
from baton.worker.executors.cuda.inputs.batch import DeviceBatch

NUM_ROWS = 8
MAX_MODEL_LEN = 5000
MAX_BLOCKS = 1250


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> DeviceBatch:
    empty, to = torch.empty, torch.Tensor.to
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **how: empty(*sizes, **how))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *where, **how: to(self, *where, **how).clone())
    return DeviceBatch(NUM_ROWS, MAX_MODEL_LEN, 4, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(4))
def test_rows_have_the_written_values(batch: DeviceBatch, seed: int) -> None:
    generator = np.random.default_rng(seed)
    token_ids = np.zeros((NUM_ROWS, MAX_MODEL_LEN), np.int32)
    table = np.zeros((NUM_ROWS, MAX_BLOCKS), np.int32)
    num_blocks = [0] * NUM_ROWS
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
    assert (batch.token_ids.numpy() == token_ids).all()
    assert (batch.block_table.numpy() == table).all()


@pytest.mark.usefixtures("batch")
def test_groups_have_tables_of_their_own() -> None:
    generator = np.random.default_rng(7)
    batch = DeviceBatch(NUM_ROWS, MAX_MODEL_LEN, 4, torch.device("cpu"), num_groups=3)
    tables = np.zeros((3, NUM_ROWS, MAX_BLOCKS), np.int32)
    for step in range(30):
        plan = StepPlan(step=step)
        for row in generator.permutation(NUM_ROWS)[:5].tolist():
            plan.admitted.append(RowInit(Row(row), np.zeros(3, np.int32), 3, SamplingParams()))
            plan.new_blocks.append((Row(row), [BlockId(step), BlockId(row)]))
            tables[0, row, :2] = step, row
            for group in (1, 2):
                start, count = int(generator.integers(0, 600)), int(generator.choice([1, 3, 600]))
                block_ids = generator.integers(0, 9999, count).tolist()
                plan.more_blocks.append(MoreBlocks(Row(row), group, start, [BlockId(one) for one in block_ids]))
                tables[group, row, start : start + count] = block_ids
        batch.apply(plan)
    assert all((found.numpy() == table).all() for found, table in zip(batch.block_tables, tables, strict=True))


def test_rows_of_a_failed_launch_are_left_out_until_they_are_admitted_again(batch: DeviceBatch) -> None:
    plan = StepPlan(step=1, rows=np.array([2, 5]))
    batch.distrust(plan)
    later = StepPlan(step=2, rows=np.array([1, 2, 5]))
    assert batch.rows_of(later).tolist() == [1, -1, -1]
    batch.apply(StepPlan(step=3, admitted=[RowInit(Row(2), np.array([7], np.int32), 1, SamplingParams())]))
    assert batch.rows_of(later).tolist() == [1, 2, -1]
