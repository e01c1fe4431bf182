"""Shared helpers of kernel tests: cases by device, paged inputs with invalid values around them, and errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

WILD = 1e4  # value of the pool's elements outside of sequences
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", FP8: "fp8"}


class Shape(NamedTuple):
    """The shape that attention kernels are compiled for."""

    head_dim: int
    block_size: int
    dtype: torch.dtype
    group: int  # query heads per KV head
    num_kv_heads: int = 2

    def __str__(self) -> str:
        return f"d{self.head_dim}-b{self.block_size}-{NAMES[self.dtype]}-g{self.group}"


# Covers all pairs of head_dim, block_size and dtype with few shapes, because each one is compiled.
GRID = [
    Shape(128, 16, torch.bfloat16, 4),
    Shape(64, 16, torch.bfloat16, 1),
    Shape(64, 32, torch.float16, 4),
    Shape(64, 64, torch.float32, 8),
    Shape(96, 16, torch.float16, 2),
    Shape(96, 32, torch.float32, 16),
    Shape(96, 64, torch.bfloat16, 5),
    Shape(128, 16, torch.float32, 7),
    Shape(128, 32, torch.bfloat16, 8),
    Shape(128, 64, torch.float16, 3),
    Shape(256, 16, torch.bfloat16, 16),
    Shape(256, 32, torch.float16, 1),
    Shape(256, 64, torch.float32, 4),
]
# The interpreter multiplies bf16 matrices wrongly, so its shapes have other dtypes.
SMALL = [
    Shape(64, 16, torch.float32, 4),
    Shape(96, 32, torch.float16, 3),
    Shape(256, 16, torch.float32, 1),
    Shape(64, 64, torch.float16, 16),
]


def cases(small: Iterable[Any], grid: Iterable[Any]) -> list[Any]:
    """Returns parameters (case, device): the small ones for the interpreter on a CPU, the grid for a GPU."""
    return [
        *(pytest.param(case, "cpu", id=f"cpu-{_name(case)}", marks=pytest.mark.interpreted) for case in small),
        *(pytest.param(case, "cuda", id=f"cuda-{_name(case)}", marks=pytest.mark.gpu) for case in grid),
    ]


def _name(case: Any) -> str:
    parts = case if type(case) is tuple else (case,)
    return "-".join(NAMES.get(part, str(part)) if isinstance(part, torch.dtype) else str(part) for part in parts)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Returns ||out - expected|| / ||expected||; NaN if the output has one."""
    expected = expected.double()
    return float((out.double() - expected).norm() / expected.norm())


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Returns an output in which unwritten elements are visible."""
    return torch.full(shape, float("nan"), device=device).to(dtype)


class Paged(NamedTuple):
    """Sequences in a pool, with blocks and table rows in random order, and extreme values after every end."""

    cache: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_table: Tensor  # [num_rows, max_blocks] int32
    rows: Tensor  # [num_seqs] int32
    seq_lens: Tensor  # [num_seqs] int32

    @property
    def own_table(self) -> Tensor:
        """Returns the block table [num_seqs, max_blocks] for oracles."""
        return self.block_table[self.rows.long()]


def paged_kv(seq_lens: Sequence[int], shape: Shape, device: str, dtype: torch.dtype | None = None) -> Paged:
    """Returns random keys and values, in the shape's dtype or another."""
    wild = LARGEST_FP8 if dtype == FP8 else WILD
    block_size = shape.block_size
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(counts) + 3
    size = (num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
    cache = torch.randn(size, device=device)
    order = torch.randperm(num_blocks, device=device).int()
    num_rows = len(seq_lens) + 2
    rows = torch.randperm(num_rows)[: len(seq_lens)]
    table = torch.randint(num_blocks, (num_rows, max(*counts, 1) + 1), dtype=torch.int32, device=device)
    first = 0
    for row, seq_len, count in zip(rows.tolist(), seq_lens, counts, strict=True):
        table[row, :count] = order[first : first + count]
        if seq_len % block_size:
            cache[order[first + count - 1].long(), :, :, seq_len % block_size :] = wild
        first += count
    cache[order[first:].long()] = wild
    cache = cache.to(dtype or shape.dtype)
    return Paged(cache, table, rows.int().to(device), torch.tensor(seq_lens, dtype=torch.int32, device=device))


def edge_lengths(block_size: int) -> list[int]:
    """Returns lengths of one token, around block and tile boundaries, and some odd ones."""
    edges = [1, 2, block_size - 1, block_size, block_size + 1, 63, 64, 65, 127, 128, 129, 255, 257, 1000]
    return sorted({edge for edge in edges if edge > 0})


def ragged_lengths(count: int, most: int) -> list[int]:
    """Returns `count` random lengths from 1 to `most`."""
    return (torch.randint(most, (count,)) + 1).tolist()


def random_kv_scale(num_kv_heads: int, device: str) -> Tensor:
    """Returns scales [2, num_kv_heads], all different."""
    return torch.rand(2, num_kv_heads, device=device) + 0.5
