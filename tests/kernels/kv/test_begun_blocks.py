"""Blocks that a step begins are cleared before it writes them; others keep every bit."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import FP8, Shape, cases

from baton.kernels.kv.begun_blocks import clear_begun

SMALL = [Shape(64, 16, torch.float32, 1), Shape(96, 16, torch.float16, 1, 1)]
GRID = [Shape(128, 16, torch.bfloat16, 1, 8), Shape(64, 64, torch.float32, 1), Shape(256, 32, FP8, 1, 1)]
# Tokens before and after the step, in blocks, and the block of the row's table that is cleared; None: none.
SEQUENCES = [
    (0.0, 0.5, 0),
    (0.0, 1.0, 0),
    (0.0, 2.25, 2),
    (0.5, 0.75, None),
    (1.0, 1.0625, 1),
    (0.9375, 1.0, None),
    (0.5, 2.5, 2),
    (3.0, 4.0, 3),
    (2.0, 2.0, None),
]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
def test_the_last_block_is_cleared_if_the_step_begins_it(shape: Shape, device: str) -> None:
    size, count = shape.block_size, len(SEQUENCES)
    pool = torch.randn(3, 4 * count + 4, 2, shape.num_kv_heads, size, shape.head_dim, device=device).to(shape.dtype)
    table = torch.randperm(4 * count + 4, device=device).int().view(count + 1, 4)
    rows = torch.tensor([*reversed(range(count)), -1], dtype=torch.int32, device=device)
    before, after = (
        torch.tensor([*(int(each[side] * size) for each in SEQUENCES), end], dtype=torch.int32, device=device)
        for side, end in ((0, 0), (1, 0))
    )
    expected = pool.clone()
    for (_, _, place), row in zip(SEQUENCES, rows.tolist(), strict=False):
        if place is not None:
            expected[:, int(table[row, place])] = 0
    clear_begun(pool, table, rows, before, after)
    assert torch.equal(pool.view(torch.uint8), expected.view(torch.uint8))
