"""LoRA updates of embedded tokens: a column of the narrow matrix, times the wide one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.adapters.shrink import block_r

_BLOCK_N = 128


@triton.jit
def _embed(
    out_ptr,  # [num_tokens, OUT]
    ids_ptr,  # [num_tokens]
    slots_ptr,  # [num_slots, slot_size]
    offsets_ptr,  # [num_slots, 1, 2], rows of 2 TABLE
    ranks_ptr,  # [num_slots, 1], rows of TABLE
    scales_ptr,  # [num_slots, 1], rows of TABLE
    order_ptr,  # [num_rows]
    tiles_ptr,  # [num_tiles, 3]
    slot_size,
    VOCAB: tl.constexpr,
    OUT: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[t, n] += scales[slot] sum over r of a[slot, r, ids_t] b[slot, r, n], for rows t = order_i"""
    # grid: (num_tiles, OUT / BLOCK_N)
    tile = tl.program_id(0)
    slot = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    rank = 0
    if (count > 0) & (slot >= 0):
        rank = tl.load(ranks_ptr + slot * TABLE)
    if rank == 0:
        return
    scale = tl.load(scales_ptr + slot * TABLE)
    narrow = slots_ptr + slot.to(tl.int64) * slot_size + tl.load(offsets_ptr + slot * TABLE * 2)
    wide = slots_ptr + slot.to(tl.int64) * slot_size + tl.load(offsets_ptr + slot * TABLE * 2 + 1)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rs = tl.arange(0, BLOCK_R)
    places = tl.arange(0, BLOCK_M)
    here = places < count
    rows = tl.load(order_ptr + start + places, mask=here, other=0).to(tl.int64)
    ids = tl.load(ids_ptr + rows, mask=here, other=0).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for r in range(0, rank, BLOCK_R):
        ranked = r + rs < rank
        a_at = (r + rs).to(tl.int64)[None, :] * VOCAB + ids[:, None]
        a = tl.load(narrow + a_at, mask=here[:, None] & ranked[None, :], other=0.0)
        b_at = (r + rs)[:, None] * OUT + cols[None, :]
        b = tl.load(wide + b_at, mask=ranked[:, None] & (cols < OUT)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    at = rows[:, None] * OUT + cols[None, :]
    whole = here[:, None] & (cols < OUT)[None, :]
    out = tl.load(out_ptr + at, mask=whole, other=0.0).to(tl.float32) + scale * acc
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=whole)


def embed_adapters(
    token_ids: Tensor,
    out: Tensor,
    slots: Tensor,
    offsets: Tensor,
    ranks: Tensor,
    scales: Tensor,
    max_rank: int,
    vocab_size: int,
    order: Tensor,
    tiles: Tensor,
    tile_rows: int,
) -> Tensor:
    """Computes reference.adapters.add.embed_adapters, for a contiguous `out`."""
    hidden_size = out.shape[1]
    _embed[(len(tiles), triton.cdiv(hidden_size, _BLOCK_N))](
        out,
        token_ids,
        slots,
        offsets,
        ranks,
        scales,
        order,
        tiles,
        slots.stride(0),
        VOCAB=vocab_size,
        OUT=hidden_size,
        TABLE=ranks.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(tile_rows)),
        BLOCK_N=_BLOCK_N,
        BLOCK_R=block_r(max_rank),
    )
    return out
