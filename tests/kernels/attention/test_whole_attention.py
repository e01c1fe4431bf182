"""Attention within whole sequences against its oracle in float64, and against PyTorch's on each sequence."""

from __future__ import annotations

import math

import pytest
import torch
from support.kernels.harness import BOUNDS, Shape, cases, edge_lengths, poisoned, ragged_lengths, relative_error

from baton.kernels.attention.whole import make_whole_tiles, tile_columns, whole_attention
from baton.kernels.reference.attention import whole_attention as oracle

SMALL = [Shape(32, 0, torch.float32, 2), Shape(64, 0, torch.float16, 1), Shape(24, 0, torch.float16, 1)]
SMALL += [Shape(512, 0, torch.float32, 1, 1)]
GRID = [
    Shape(head_dim, 0, dtype, group)
    for head_dim, group in ((32, 1), (64, 1), (64, 4), (96, 2), (128, 1), (128, 8), (256, 1), (512, 2))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
]


def error(
    shape: Shape, seq_lens: list[int], device: str, window: int = 0, rows: int = 0, relative: bool = False
) -> float:
    num_q_heads, num_tokens = shape.group * shape.num_kv_heads, sum(seq_lens)
    size = (num_tokens, num_q_heads + 2 * shape.num_kv_heads, shape.head_dim)
    qkv = torch.randn(size, device=device).to(shape.dtype)
    scale = 1 / math.sqrt(shape.head_dim)
    out = poisoned(num_tokens, num_q_heads * shape.head_dim, dtype=shape.dtype, device=device)
    tiles = make_whole_tiles(seq_lens, torch.device(device), rows)
    scores: dict[str, torch.Tensor] = {}
    wide = scores
    if relative:
        table = torch.randn(7, num_q_heads, device=device).to(shape.dtype)
        buckets = torch.randint(7, (2 * max(seq_lens) + 3,), dtype=torch.int32, device=device)
        scores, wide = {"relative": table, "buckets": buckets}, {"relative": table.double(), "buckets": buckets}
    assert whole_attention(qkv, tiles, shape.num_kv_heads, scale, window, out=out, **scores) is out
    runs = oracle.runs_of(seq_lens)
    expected = oracle.whole_attention(qkv.double(), runs, shape.num_kv_heads, scale, window, **wide)
    return relative_error(out, expected)


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("window", [0, 3, 20, 65])
def test_sequences_of_any_length_see_themselves(shape: Shape, device: str, window: int) -> None:
    lengths = [33, 1, 2, 70] if device == "cpu" else [*edge_lengths(16), 512, 1, 3]
    assert error(shape, lengths, device, window) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], [GRID[3], GRID[7], GRID[11]]))
def test_scores_of_distances_are_added(shape: Shape, device: str) -> None:
    lengths = [33, 1, 2, 70] if device == "cpu" else [*edge_lengths(16), 512, 1, 3]
    assert error(shape, lengths, device, relative=True) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:1], GRID[:3]))
def test_short_sequences_have_short_tiles(shape: Shape, device: str) -> None:
    lengths = [5, 64, 1, 17]
    assert make_whole_tiles(lengths, torch.device(device)).rows == 64
    assert error(shape, lengths, device) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([], [GRID[3], GRID[0], GRID[12]]))
@pytest.mark.parametrize("window", [0, 65])
def test_a_thousand_sequences_and_one_of_8192(shape: Shape, device: str, window: int) -> None:
    assert error(shape, [*ragged_lengths(1000, 40), 8192], device, window) <= BOUNDS[shape.dtype]


def test_tiles_cover_each_sequence_once_and_the_longest_first() -> None:
    columns = tile_columns([3, 300, 130], 128)
    tiles = columns.on(torch.from_numpy(columns.flat))
    assert tiles.starts.tolist() == [0, 3, 303, 433]
    assert list(zip(tiles.seq.tolist(), tiles.start.tolist(), strict=True)) == [
        (1, 0), (1, 128), (1, 256), (2, 0), (2, 128), (0, 0)
    ]  # fmt: skip
    assert (tile_columns([64, 1]).rows, tile_columns([65]).rows) == (64, 128)


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:1], GRID[3:4]))
def test_a_sequence_does_not_depend_on_its_neighbours(shape: Shape, device: str) -> None:
    qkv = torch.randn(40, 8, shape.head_dim, device=device).to(shape.dtype)
    alone = whole_attention(qkv[:17].clone(), make_whole_tiles([17], torch.device(device)), 2, 0.2)
    beside = whole_attention(qkv, make_whole_tiles([17, 23], torch.device(device)), 2, 0.2)
    assert torch.equal(alone, beside[:17])
