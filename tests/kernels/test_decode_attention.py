"""Decode attention against its oracle in float64."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_harness import (
    BOUNDS,
    FP8,
    GRID,
    SMALL,
    Paged,
    Shape,
    cases,
    edge_lengths,
    paged_kv,
    poisoned,
    ragged_lengths,
    random_kv_scale,
    relative_error,
)
from torch import Tensor

from baton.kernels import reference
from baton.kernels.decode_attention import DecodeWorkspace, decode_attention

LONG = [1, 131_072, 131_071, 70_000]


def make_workspace(shape: Shape, num_seqs: int, device: str, *, batch_invariant: bool = False) -> DecodeWorkspace:
    num_q_heads, num_kv_heads = shape.group * shape.num_kv_heads, shape.num_kv_heads
    where = torch.device(device)
    workspace = DecodeWorkspace(
        num_seqs, num_q_heads, num_kv_heads, shape.head_dim, where, batch_invariant=batch_invariant
    )
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    return workspace


def make_query(shape: Shape, num_seqs: int, device: str) -> Tensor:
    """A part of wider rows, as the query of a qkv product is."""
    num_q_heads = shape.group * shape.num_kv_heads
    wide = torch.randn(num_seqs, num_q_heads + 2 * shape.num_kv_heads, shape.head_dim, device=device)
    return wide.to(shape.dtype)[:, :num_q_heads]


def decode_error(
    shape: Shape,
    seq_lens: list[int],
    device: str,
    splits: int | None = None,
    window: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> float:
    paged = paged_kv(seq_lens, shape, device, cache_dtype)
    query = make_query(shape, len(seq_lens), device)
    kv_scale = random_kv_scale(shape.num_kv_heads, device) if cache_dtype == FP8 else None
    out = poisoned(*query.shape, dtype=shape.dtype, device=device)
    workspace = make_workspace(shape, len(seq_lens) * (splits or 1), device)
    scale = 1 / math.sqrt(shape.head_dim)
    decode_attention(query, *paged, scale, workspace, out=out, kv_scale=kv_scale, splits=splits, window=window)
    return relative_error(out, oracle(query, paged, scale, window, kv_scale))


def oracle(query: Tensor, paged: Paged, scale: float, window: int = 0, kv_scale: Tensor | None = None) -> Tensor:
    wide = paged.cache.double() if kv_scale is None else paged.cache
    return reference.decode_attention(
        query.double(), wide, paged.own_table, paged.seq_lens, scale, kv_scale=kv_scale, window=window
    )


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
def test_few_sequences_of_any_length(shape: Shape, device: str) -> None:
    block_size = shape.block_size
    batches = [[1], [block_size], [block_size + 1], [200]]
    if device == "cuda":
        batches += [[4097], [1, 130, 1000], [1, 2, block_size - 1, block_size, 255, 256, 257, 3000]]
    for lengths in batches:
        assert decode_error(shape, lengths, device) <= BOUNDS[shape.dtype]


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


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], [GRID[0], GRID[5], GRID[6], GRID[10]]))
def test_keys_and_values_in_8_bits_count_with_their_heads_scale(shape: Shape, device: str) -> None:
    lengths = [1, shape.block_size + 1, 130] if device == "cpu" else edge_lengths(shape.block_size)
    for splits in (1, 4) if device == "cpu" else (1, 64):
        assert decode_error(shape, lengths, device, splits, cache_dtype=FP8) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0]], [GRID[0], GRID[11]]))
def test_a_batch_invariant_result_is_bit_identical_alone_and_among_others(shape: Shape, device: str) -> None:
    lengths = [1, 70, 300] if device == "cpu" else [*edge_lengths(shape.block_size), *ragged_lengths(200, 9000)]
    num_seqs = len(lengths)
    paged, query = paged_kv(lengths, shape, device), make_query(shape, num_seqs, device)
    workspace = make_workspace(shape, num_seqs, device, batch_invariant=True)

    def attend(picked: Tensor) -> Tensor:
        rows, seq_lens = paged.rows[picked], paged.seq_lens[picked]
        arguments = (query[picked], paged.cache, paged.block_table, rows, seq_lens, 0.1, workspace)
        return decode_attention(*arguments, batch_invariant=True)

    together = attend(torch.arange(num_seqs, device=device))
    assert relative_error(together, oracle(query, paged, 0.1)) <= BOUNDS[shape.dtype]
    for first in range(0, num_seqs, max(1, num_seqs // 20)):
        for others in (1, 2, 7):
            picked = torch.arange(first, min(first + others, num_seqs), device=device)
            assert torch.equal(attend(picked), together[picked])


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0]], []))
def test_a_workspace_that_is_too_small_is_refused(shape: Shape, device: str) -> None:
    workspace = make_workspace(shape, 1, device)
    query = make_query(shape, 1, device)
    with pytest.raises(ValueError, match="128 splits of 1 sequences need 1024 rows"):
        decode_attention(query, *paged_kv([5], shape, device), 0.1, workspace, splits=128)
