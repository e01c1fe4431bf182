"""Blocks between the pool and one piece of memory, bit for bit as the reference moves them."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import FP8, Shape, cases, poisoned

from baton.kernels import reference
from baton.kernels.kv.blocks import gather_blocks, scatter_blocks

SMALL = [Shape(64, 16, torch.float32, 1), Shape(96, 16, torch.float16, 1, 1)]
GRID = [Shape(128, 16, torch.bfloat16, 1, 8), Shape(64, 64, torch.float32, 1), Shape(256, 32, FP8, 1, 1)]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("layers", [slice(0, 3), slice(1, 2)])
def test_blocks_move_as_the_reference_moves_them(shape: Shape, device: str, layers: slice) -> None:
    num_blocks = 7 if device == "cpu" else 300
    size = (3, num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    pool = torch.randn(size, device=device).to(shape.dtype)
    for count in (0, 1, num_blocks // 2):
        block_ids = torch.randperm(num_blocks, device=device)[:count].int()
        part = pool[layers]
        out = poisoned(count, *part[:, 0].shape, dtype=shape.dtype, device=device)
        assert gather_blocks(part, block_ids, out=out) is out
        assert torch.equal(raw(out), raw(reference.gather_blocks(part.view(torch.uint8), block_ids)))
        target, expected = (torch.zeros_like(pool) for _ in range(2))
        scatter_blocks(target[layers], block_ids, out)
        reference.scatter_blocks(expected[layers].view(torch.uint8), block_ids, out.view(torch.uint8))
        assert torch.equal(raw(target), raw(expected))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize(("count", "device"), cases([3], []))
def test_staging_of_another_shape_is_refused(count: int, device: str) -> None:
    pool = torch.zeros(2, 5, 2, 1, 16, 8, device=device)
    with pytest.raises(ValueError, match=r"must be \(3, 2, 2, 1, 16, 8\)"):
        scatter_blocks(pool, torch.arange(count), torch.zeros(count, 1, 2, 1, 16, 8))
