"""LoRA updates of a linear's output: a product with the narrow matrices, then one with the wide ones, for all adapters.

A tile is some rows of one adapter. Adapters of any ranks share a launch; programs beyond a tile's rank end at once, and
rows without an adapter are in no tile. With few rows the first product is split over k, so that it fills the GPU, and
the second adds the splits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_M = 16
_BLOCK_N = 64
_MAX_BLOCK_R = 64
_FEW_PROGRAMS = 264  # two a multiprocessor of an H100
_MAX_PARTS = 3


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    low_ptr,  # [SPLITS, num_rows, PARTS, MAX_RANK] fp32
    x_ptr,  # [num_tokens, K], rows of x_stride
    a_ptr,  # [num_slots, PARTS, MAX_RANK, K]
    ranks_ptr,  # [num_slots, PARTS]
    order_ptr,  # [num_rows]
    tiles_ptr,  # [num_tiles, 3]
    x_stride,
    num_rows,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """low_s[i, p, r] = sum over k in split s of x[order_i, k] a[slot, p, r, k]"""
    # grid: (num_tiles, PARTS * MAX_RANK / BLOCK_R, SPLITS)
    tile = tl.program_id(0)
    num_r = tl.cdiv(MAX_RANK, BLOCK_R)
    part = tl.program_id(1) // num_r
    split = tl.program_id(2)
    slot = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    first_rank = tl.program_id(1) % num_r * BLOCK_R
    rank = 0
    if count > 0:
        rank = tl.load(ranks_ptr + slot * PARTS + part)
    if first_rank >= rank:
        return
    rs = first_rank + tl.arange(0, BLOCK_R)
    ks = tl.arange(0, BLOCK_K)
    a_row = a_ptr + ((slot.to(tl.int64) * PARTS + part) * MAX_RANK + rs)[:, None] * K
    length = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    for row in range(0, count, BLOCK_M):
        places = row + tl.arange(0, BLOCK_M)
        here = places < count
        rows = tl.load(order_ptr + start + places, mask=here, other=0).to(tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for k in range(split * length, min(K, (split + 1) * length), BLOCK_K):
            inside = k + ks < K
            x = tl.load(x_ptr + rows[:, None] * x_stride + (k + ks)[None, :], mask=here[:, None] & inside, other=0.0)
            a = tl.load(a_row + (k + ks)[None, :], mask=(rs < rank)[:, None] & inside, other=0.0)
            acc = tl.dot(x.to(a.dtype), tl.trans(a), acc, input_precision="ieee")
        at = (split * num_rows + start + places).to(tl.int64)[:, None] * (PARTS * MAX_RANK) + part * MAX_RANK + rs
        tl.store(low_ptr + at, acc, mask=here[:, None] & (rs < rank))


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    out_ptr,  # [num_tokens, OUT], rows of out_stride
    low_ptr,  # [SPLITS, num_rows, PARTS, MAX_RANK] fp32
    b_ptr,  # [num_slots, OUT, MAX_RANK]
    ranks_ptr,  # [num_slots, PARTS]
    scales_ptr,  # [num_slots, PARTS]
    order_ptr,  # [num_rows]
    tiles_ptr,  # [num_tiles, 3]
    out_stride,
    num_rows,
    OUT: tl.constexpr,
    END_0: tl.constexpr,
    END_1: tl.constexpr,
    END_2: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[order_i, n] += scales[slot, p] sum over r of b[slot, n, r] sum over s of low_s[i, p, r]"""
    # grid: (num_tiles, PARTS, widest part / BLOCK_N)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    begin = 0
    end = END_0
    if part == 1:
        begin = END_0
        end = END_1
    if part == 2:
        begin = END_1
        end = END_2
    first = begin + tl.program_id(2) * BLOCK_N
    rank = 0
    if count > 0:
        rank = tl.load(ranks_ptr + slot * PARTS + part)
    if rank == 0 or first >= end:
        return
    scale = tl.load(scales_ptr + slot * PARTS + part)
    cols = first + tl.arange(0, BLOCK_N)
    rs = tl.arange(0, BLOCK_R)
    b_row = b_ptr + (slot.to(tl.int64) * OUT + cols)[:, None] * MAX_RANK
    for row in range(0, count, BLOCK_M):
        places = row + tl.arange(0, BLOCK_M)
        here = places < count
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for r in range(0, rank, BLOCK_R):
            ranked = r + rs < rank
            low = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for split in range(SPLITS):
                at = (split * num_rows + start + places).to(tl.int64)[:, None] * (PARTS * MAX_RANK)
                at += part * MAX_RANK + r + rs
                low += tl.load(low_ptr + at, mask=here[:, None] & ranked, other=0.0)
            b = tl.load(b_row + r + rs, mask=(cols < end)[:, None] & ranked, other=0.0)
            acc = tl.dot(low.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
        rows = tl.load(order_ptr + start + places, mask=here, other=0).to(tl.int64)
        at = rows[:, None] * out_stride + cols
        whole = here[:, None] & (cols < end)
        out = tl.load(out_ptr + at, mask=whole, other=0.0).to(tl.float32) + scale * acc
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=whole)


def add_adapters(
    x: Tensor,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    ends: Sequence[int],
    order: Tensor,
    tiles: Tensor,
) -> Tensor:
    """Computes reference.adapters.add.add_adapters, of at most three parts."""
    num_parts, max_rank, k = a.shape[1:]
    assert len(ends) == num_parts <= _MAX_PARTS, f"{num_parts} parts, ends {ends}"
    block_r = max(16, min(_MAX_BLOCK_R, triton.next_power_of_2(max_rank)))
    block_k = 64 if a.element_size() == 4 else 128
    num_tiles, num_rows = len(tiles), len(order)
    programs = num_tiles * num_parts * triton.cdiv(max_rank, block_r)
    splits = max(1, min(_FEW_PROGRAMS // max(1, programs), triton.cdiv(k, block_k), 16))
    low = torch.empty(splits, num_rows, num_parts, max_rank, dtype=torch.float32, device=x.device)
    _shrink[(num_tiles, num_parts * triton.cdiv(max_rank, block_r), splits)](
        low,
        x,
        a,
        ranks,
        order,
        tiles,
        x.stride(0),
        num_rows,
        K=k,
        PARTS=num_parts,
        MAX_RANK=max_rank,
        SPLITS=splits,
        BLOCK_M=_BLOCK_M,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
    )
    first, second, third = (*ends, ends[-1], ends[-1])[:3]
    widest = max(end - begin for begin, end in zip((0, *ends), ends, strict=False))
    _expand[(num_tiles, num_parts, triton.cdiv(widest, _BLOCK_N))](
        out,
        low,
        b,
        ranks,
        scales,
        order,
        tiles,
        out.stride(0),
        num_rows,
        OUT=b.shape[1],
        END_0=first,
        END_1=second,
        END_2=third,
        PARTS=num_parts,
        MAX_RANK=max_rank,
        SPLITS=splits,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_R=block_r,
    )
    return out
