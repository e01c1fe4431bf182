"""LoRA updates of embedded tokens: a column of the narrow matrix, times the wide one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_M = 16
_BLOCK_N = 64
_MAX_BLOCK_R = 64


@triton.jit
def _embed(
    out_ptr,  # [num_tokens, OUT]
    ids_ptr,  # [num_tokens]
    a_ptr,  # [num_slots, MAX_RANK, VOCAB]
    b_ptr,  # [num_slots, OUT, MAX_RANK]
    ranks_ptr,  # [num_slots]
    scales_ptr,  # [num_slots]
    order_ptr,  # [num_rows]
    tiles_ptr,  # [num_tiles, 3]
    VOCAB: tl.constexpr,
    OUT: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[t, n] += scales[slot] sum over r of b[slot, n, r] a[slot, r, ids_t], for rows t = order_i"""
    # grid: (num_tiles, OUT / BLOCK_N)
    tile = tl.program_id(0)
    slot = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    rank = 0
    if count > 0:
        rank = tl.load(ranks_ptr + slot)
    if rank == 0:
        return
    scale = tl.load(scales_ptr + slot)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rs = tl.arange(0, BLOCK_R)
    for row in range(0, count, BLOCK_M):
        places = row + tl.arange(0, BLOCK_M)
        here = places < count
        rows = tl.load(order_ptr + start + places, mask=here, other=0).to(tl.int64)
        ids = tl.load(ids_ptr + rows, mask=here, other=0).to(tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for r in range(0, rank, BLOCK_R):
            ranked = r + rs < rank
            narrow = a_ptr + (slot.to(tl.int64) * MAX_RANK + r + rs)[None, :] * VOCAB + ids[:, None]
            a = tl.load(narrow, mask=here[:, None] & ranked, other=0.0)
            wide = b_ptr + (slot.to(tl.int64) * OUT + cols)[:, None] * MAX_RANK + r + rs
            b = tl.load(wide, mask=(cols < OUT)[:, None] & ranked, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        at = rows[:, None] * OUT + cols
        whole = here[:, None] & (cols < OUT)
        out = tl.load(out_ptr + at, mask=whole, other=0.0).to(tl.float32) + scale * acc
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=whole)


def embed_adapters(
    token_ids: Tensor,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    order: Tensor,
    tiles: Tensor,
) -> Tensor:
    """Computes reference.adapters.add.embed_adapters, for a contiguous `out`."""
    max_rank, vocab = a.shape[2:]
    _embed[(len(tiles), triton.cdiv(b.shape[1], _BLOCK_N))](
        out,
        token_ids,
        a,
        b,
        ranks,
        scales,
        order,
        tiles,
        VOCAB=vocab,
        OUT=b.shape[1],
        MAX_RANK=max_rank,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_R=max(16, min(_MAX_BLOCK_R, triton.next_power_of_2(max_rank))),
    )
    return out
