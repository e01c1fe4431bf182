"""Bidirectional attention within whole sequences that lie one after another, without padding and without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.attention.prefill import Blocks

_LOG2E = 1.4426950408889634
_SHORT = 64  # rows of a tile where no sequence is longer
_LONG = 128


@triton.jit
def _tile(
    acc,
    top,
    total,
    query,
    rows,
    key_base,
    start,
    seq_len,
    qkv_stride,
    value_offset,
    scale_log2,
    window,
    relative_ptr,
    buckets_ptr,
    num_q_heads,
    MASKED: tl.constexpr,
    RELATIVE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns acc, top and total of the online softmax in base 2 after one tile of keys."""
    tokens = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, DIM_PAD)
    where = tokens.to(tl.int64)[:, None] * qkv_stride + dims[None, :]
    if MASKED or DIM_PAD != HEAD_DIM:
        real = (tokens < seq_len)[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(key_base + where, mask=real, other=0.0)
        value = tl.load(key_base + value_offset + where, mask=real, other=0.0)
    else:
        key = tl.load(key_base + where)
        value = tl.load(key_base + value_offset + where)
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if RELATIVE:
        near = (rows < seq_len)[:, None] & (tokens < seq_len)[None, :]
        bucket = tl.load(buckets_ptr + tokens[None, :] - rows[:, None], mask=near, other=0)
        added = tl.load(relative_ptr + bucket * num_q_heads, mask=near, other=0.0).to(tl.float32)
        score = score * scale_log2 + added * 1.4426950408889634
        scale_log2 = 1.0
    if MASKED:
        hidden = (tokens >= seq_len)[None, :]
        distance = rows[:, None] - tokens[None, :]
        hidden |= (window > 0) & ((distance >= window) | (distance <= -window))
        score = tl.where(hidden, float("-inf"), score)
    new_top = tl.maximum(top, tl.max(score, 1) * scale_log2)
    weight = tl.exp2(score * scale_log2 - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@triton.jit(do_not_specialize_on_alignment=["starts_ptr", "tile_seq_ptr", "tile_start_ptr"])
def _whole_kernel(
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    qkv_ptr,  # [num_tokens, num_q_heads + 2 num_kv_heads, HEAD_DIM], rows of qkv_stride
    starts_ptr,  # [num_seqs + 1] int32, first token of each sequence
    tile_seq_ptr,  # [num_tiles] int32
    tile_start_ptr,  # [num_tiles] int32, within the sequence
    relative_ptr,  # [num_buckets, num_q_heads]
    buckets_ptr,  # [2 num_positions - 1] int32, by j - i + num_positions - 1
    num_positions,
    scale_log2,
    qkv_stride,
    num_kv_heads,
    window,  # keys that a query attends to on each side, including its own; 0: all
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,  # programs per tile
    STAGES: tl.constexpr,
    RELATIVE: tl.constexpr,
):
    """out_i = softmax_j(scale q_i k_j + r_ij) v_j over the tokens j of the sequence; with a window, |i - j| < window"""
    # grid: (num_q_heads, num_tiles * PARTS)
    head = tl.program_id(0)
    num_q_heads = tl.num_programs(0)
    tile = tl.program_id(1) // PARTS
    seq = tl.load(tile_seq_ptr + tile)
    offset = tl.load(tile_start_ptr + tile) + tl.program_id(1) % PARTS * BLOCK_M
    first = tl.load(starts_ptr + seq)
    seq_len = tl.load(starts_ptr + seq + 1) - first
    if offset >= seq_len:
        return

    rows = offset + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM_PAD)
    real = (rows < seq_len)[:, None] & (dims < HEAD_DIM)[None, :]
    token = (first + rows).to(tl.int64)[:, None]
    query = tl.load(qkv_ptr + token * qkv_stride + head * HEAD_DIM + dims[None, :], mask=real, other=0.0)
    key_base = qkv_ptr + first.to(tl.int64) * qkv_stride + (num_q_heads + head // GROUP) * HEAD_DIM
    value_offset = num_kv_heads * HEAD_DIM

    relative_ptr += head
    buckets_ptr += num_positions - 1
    begin = 0
    unmasked = seq_len // BLOCK_N * BLOCK_N
    last = seq_len
    if window > 0:
        # Every tile may have masked keys on both sides.
        begin = max(offset - window + 1, 0) // BLOCK_N * BLOCK_N
        unmasked = begin
        last = min(seq_len, offset + BLOCK_M - 1 + window)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    # Finite, so that a tile that is masked for a row gives 2^(-inf - top) = 0 and not NaN.
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(begin, unmasked, BLOCK_N, num_stages=STAGES):
        acc, top, total = _tile(
            acc, top, total, query, rows, key_base, start, seq_len, qkv_stride, value_offset, scale_log2, window,
            relative_ptr, buckets_ptr, num_q_heads, False, RELATIVE, HEAD_DIM, DIM_PAD, BLOCK_N,
        )  # fmt: skip
    for start in tl.range(unmasked, last, BLOCK_N, num_stages=1):
        acc, top, total = _tile(
            acc, top, total, query, rows, key_base, start, seq_len, qkv_stride, value_offset, scale_log2, window,
            relative_ptr, buckets_ptr, num_q_heads, True, RELATIVE, HEAD_DIM, DIM_PAD, BLOCK_N,
        )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # rows beyond the sequence may see no key of a window
    where = (token * num_q_heads + head) * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + where, acc.to(out_ptr.dtype.element_ty), mask=real)


class WholeTiles(NamedTuple):
    """The sequences of a step, and the rows of each program. Tensors are int32; tiles beyond a sequence are skipped."""

    starts: Tensor  # [num_seqs + 1], first token of each sequence
    seq: Tensor  # [num_tiles]
    start: Tensor  # [num_tiles], within the sequence
    rows: int  # of a tile


class TileColumns(NamedTuple):
    """WholeTiles on the host, one array after another."""

    flat: NDArray[np.int32]  # starts, seq, start
    num_seqs: int
    rows: int

    def on(self, flat: Tensor) -> WholeTiles:
        """Returns the tiles of a copy of `flat` on a device."""
        return tiles_over(flat, self.num_seqs, self.rows)


def tiles_over(flat: Tensor, num_seqs: int, rows: int) -> WholeTiles:
    """Returns the tiles in `flat`: starts, seq, start."""
    num_tiles = (len(flat) - num_seqs - 1) // 2
    starts, seq, start = flat.split([num_seqs + 1, num_tiles, num_tiles])
    return WholeTiles(starts, seq, start, rows)


def tile_columns(seq_lens: Sequence[int] | NDArray[np.int64], rows: int = 0) -> TileColumns:
    """Returns the tiles of sequences that lie in this order; those of long sequences come first.

    `rows` of a tile, 0: by the longest sequence.
    """
    lengths = np.asarray(seq_lens, np.int64)
    rows = rows or (_SHORT if lengths.max(initial=0) <= _SHORT else _LONG)
    order = np.argsort(-lengths, kind="stable")
    counts = -(-lengths[order] // rows)
    ends = np.cumsum(counts)
    seq = np.repeat(order, counts)
    start = (np.arange(len(seq)) - np.repeat(ends - counts, counts)) * rows
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    return TileColumns(np.concatenate((starts, seq, start)).astype(np.int32), len(lengths), rows)


def make_whole_tiles(seq_lens: Sequence[int], device: torch.device, rows: int = 0) -> WholeTiles:
    """Returns the tiles of sequences on a device. See tile_columns."""
    columns = tile_columns(seq_lens, rows)
    return columns.on(torch.from_numpy(columns.flat).to(device))


def choose_blocks(head_dim: int, itemsize: int, rows: int) -> Blocks:
    """Returns the largest blocks whose Q, K and V fit shared memory and registers."""
    if head_dim > 256:
        return Blocks(16, 16, 4, 1) if itemsize == 4 else Blocks(32, 32, 8, 2)
    if itemsize == 4:
        # Without matrix units, larger blocks do not fit the registers.
        return Blocks(32, 32 if head_dim <= 128 else 16, 4, 2)
    if rows <= _SHORT or head_dim > 128:
        return Blocks(64, 64 if head_dim <= 128 else 32, 4, 2)
    return Blocks(128, 64, 8, 3)


def whole_attention(
    qkv: Tensor,
    tiles: WholeTiles,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    *,
    relative: Tensor | None = None,
    buckets: Tensor | None = None,
    out: Tensor | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """Returns softmax_j(scale q_i K_j + r_ij) V_j over the tokens j of each sequence, [num_tokens, num_q_heads *
    head_dim].

    qkv [num_tokens, num_q_heads + 2 num_kv_heads, head_dim]. With a window, |i - j| < window. r_ij is 0, or
    relative [num_buckets, num_q_heads] of the bucket of j - i; buckets [2 n - 1] int32 begin with that of 1 - n. A
    row's result does not depend on the other sequences, if tiles have equally many rows.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    num_q_heads = num_heads - 2 * num_kv_heads
    if out is None:
        out = torch.empty(num_tokens, num_q_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    blocks = blocks or choose_blocks(head_dim, qkv.element_size(), tiles.rows)
    block_m = min(blocks.block_m, tiles.rows)
    parts = tiles.rows // block_m
    _whole_kernel[(num_q_heads, len(tiles.seq) * parts)](
        out,
        qkv,
        tiles.starts,
        tiles.seq,
        tiles.start,
        qkv if relative is None else relative,
        tiles.seq if buckets is None else buckets,
        0 if buckets is None else len(buckets) // 2 + 1,
        scale * _LOG2E,
        qkv.stride(0),
        num_kv_heads,
        window,
        GROUP=num_q_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_M=block_m,
        BLOCK_N=blocks.block_n,
        PARTS=parts,
        STAGES=blocks.num_stages,
        RELATIVE=relative is not None,
        num_warps=blocks.num_warps,
    )
    return out
