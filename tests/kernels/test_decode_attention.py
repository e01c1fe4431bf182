"""Decode attention against its oracle in float64."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_harness import (
    BOUNDS,
    GRID,
    SMALL,
    Paged,
    Shape,
    cases,
    edge_lengths,
    paged_kv,
    poisoned,
    ragged_lengths,
    relative_error,
)
from torch import Tensor

from baton.kernels import reference
from baton.kernels.decode_attention import DecodeWorkspace, decode_attention

LONG = [1, 131_072, 131_071, 70_000]


def make_workspace(shape: Shape, num_seqs: int, device: str) -> DecodeWorkspace:
    num_q_heads = shape.group * shape.num_kv_heads
    workspace = DecodeWorkspace(num_seqs, num_q_heads, shape.num_kv_heads, shape.head_dim, torch.device(device))
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    return workspace


def make_query(shape: Shape, num_seqs: int, device: str) -> Tensor:
    """A part of wider rows, as the query of a qkv product is."""
    num_q_heads = shape.group * shape.num_kv_heads
    wide = torch.randn(num_seqs, num_q_heads + 2 * shape.num_kv_heads, shape.head_dim, device=device)
    return wide.to(shape.dtype)[:, :num_q_heads]


def decode_error(shape: Shape, seq_lens: list[int], device: str, splits: int | None = None, window: int = 0) -> float:
    paged, query = paged_kv(seq_lens, shape, device), make_query(shape, len(seq_lens), device)
    out = poisoned(*query.shape, dtype=shape.dtype, device=device)
    workspace = make_workspace(shape, max(len(seq_lens), 1), device)
    scale = 1 / math.sqrt(shape.head_dim)
    decode_attention(query, *paged, scale, workspace, out=out, splits=splits, window=window)
    return relative_error(out, oracle(query, paged, scale, window))


def oracle(query: Tensor, paged: Paged, scale: float, window: int = 0) -> Tensor:
    wide = paged.cache.double()
    return reference.decode_attention(query.double(), wide, paged.own_table, paged.seq_lens, scale, window=window)


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
def test_one_sequence_of_any_length(shape: Shape, device: str) -> None:
    lengths = [1, shape.block_size, 200] if device == "cpu" else [1, shape.block_size, shape.block_size + 1, 4097]
    for length in lengths:
        assert decode_error(shape, [length], device) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
def test_lengths_at_every_edge_share_a_batch(shape: Shape, device: str) -> None:
    lengths = [1, shape.block_size, shape.block_size + 1, 130] if device == "cpu" else edge_lengths(shape.block_size)
    for splits in (1, 4) if device == "cpu" else (1, 64):
        assert decode_error(shape, lengths, device, splits) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([], GRID))
def test_a_thousand_sequences(shape: Shape, device: str) -> None:
    assert decode_error(shape, ragged_lengths(1000, 300), device) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([], [GRID[0], GRID[3], GRID[11]]))
def test_sequences_of_131072_tokens(shape: Shape, device: str) -> None:
    assert decode_error(shape, LONG, device, 64) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0]], [GRID[0], GRID[12]]))
@pytest.mark.parametrize("window", [1, 20, 128])
def test_a_window_hides_all_but_the_last_keys(shape: Shape, device: str, window: int) -> None:
    for splits in (1, 4) if device == "cpu" else (1, 64):
        assert decode_error(shape, [1, 17, 130], device, splits, window) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0]], [GRID[0]]))
def test_rows_of_padding_stay_unwritten(shape: Shape, device: str) -> None:
    paged, query = paged_kv([40, 7, 33], shape, device), make_query(shape, 3, device)
    paged.seq_lens[1] = 0
    paged.rows[1] = -1
    # A row of -1 lies in front of the table: padding reads nothing of it.
    padded = torch.cat((paged.block_table[:1], paged.block_table))
    out = poisoned(*query.shape, dtype=shape.dtype, device=device)
    workspace = make_workspace(shape, 3, device)
    decode_attention(query, paged.cache, padded[1:], paged.rows, paged.seq_lens, 0.1, workspace, out=out)
    assert out[1].isnan().all()
    live = torch.tensor([0, 2], device=device)
    own = Paged(paged.cache, paged.block_table, paged.rows[live], paged.seq_lens[live])
    assert relative_error(out[live], oracle(query[live], own, 0.1)) <= BOUNDS[shape.dtype]
