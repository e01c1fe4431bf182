"""The wide half of LoRA updates: a product with the wide matrices of all adapters, added to a linear's output.

The gate of a SwiGLU MLP goes into the same launch, which then replaces the one that a step without adapters has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.adapters.shrink import block_r
from baton.kernels.overlap import overlaps

_MAX_PARTS = 3
_BLOCK_N = 128  # columns of a program
_MANY_ROWS = 32  # of a tile, from which programs have fewer columns
_BLOCK_N_OF_MANY = 64
_WARPS_OF_MANY = 4
_GATED_PROGRAMS = 400  # about as many as run at once, each of several blocks of columns
_MOST_STEPS = 16
_STEPS_OF_MANY = 4


@triton.jit
def _wide(b_row, cols, width, rs, rank):
    """Returns b [BLOCK_R, BLOCK_N]"""
    return tl.load(
        b_row + rs[:, None] * width + cols[None, :], mask=(rs < rank)[:, None] & (cols < width)[None, :], other=0.0
    )


@triton.jit
def _narrow(low_ptr, first, here, rs, rank, split_stride, SPLITS: tl.constexpr):
    """Returns sum over s of low_s [BLOCK_M, BLOCK_R]"""
    mask = here[:, None] & (rs < rank)[None, :]
    low = tl.load(low_ptr + first[:, None] + rs[None, :], mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        low += tl.load(low_ptr + split * split_stride + first[:, None] + rs[None, :], mask=mask, other=0.0)
    return low


@triton.jit(do_not_specialize=["factor", "num_rows"])
def _expand(
    out_ptr,  # [num_tokens, OUT], rows of out_stride
    low_ptr,  # [SPLITS, num_rows, PARTS, MAX_RANK] fp32
    slots_ptr,  # [num_slots, slot_size]
    offsets_ptr,  # [num_slots, PARTS, 2], rows of 2 TABLE
    ranks_ptr,  # [num_slots, PARTS], rows of TABLE
    scales_ptr,  # [num_slots, PARTS], rows of TABLE
    order_ptr,  # [num_rows]
    tiles_ptr,  # [num_tiles, 3]
    factor,
    out_stride,
    slot_size,
    num_rows,
    END_0: tl.constexpr,
    END_1: tl.constexpr,
    END_2: tl.constexpr,
    PARTS: tl.constexpr,
    TABLE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[order_i, n] += factor scales[slot, p] sum over r of b[slot, p, r, n] sum over s of low_s[i, p, r]"""
    # grid: (num_tiles, sum over parts of columns / BLOCK_N)
    if OVERLAP:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    block = tl.program_id(1)
    part = 0
    begin = 0
    end = END_0
    blocks_0: tl.constexpr = (END_0 + BLOCK_N - 1) // BLOCK_N
    blocks_1: tl.constexpr = (END_1 - END_0 + BLOCK_N - 1) // BLOCK_N
    if block >= blocks_0:
        part = 1
        begin = END_0
        end = END_1
        block -= blocks_0
        if block >= blocks_1:
            part = 2
            begin = END_1
            end = END_2
            block -= blocks_1
    width = end - begin
    if ALIGNED:
        width = tl.multiple_of(width, 16)
        begin = tl.multiple_of(begin, 16)
    slot = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    used = (count > 0) & (slot >= 0)
    entry = slot * TABLE + part
    rank = tl.load(ranks_ptr + entry, mask=used, other=0)
    offset = tl.load(offsets_ptr + entry * 2 + 1, mask=used, other=0)
    scale = tl.load(scales_ptr + entry, mask=used, other=0.0) * factor
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rs = tl.arange(0, BLOCK_R)
    places = tl.arange(0, BLOCK_M)
    here = places < count
    b_row = slots_ptr + slot.to(tl.int64) * slot_size + tl.multiple_of(offset, 64)
    rows = tl.load(order_ptr + start + places, mask=here, other=0).to(tl.int64)
    b = _wide(b_row, cols, width, rs, rank)  # before the wait: it does not depend on earlier launches
    if OVERLAP:
        gdc_wait()
    if rank == 0:
        return
    at = rows[:, None] * out_stride + (begin + cols)[None, :]
    whole = here[:, None] & (cols < width)[None, :]
    out = tl.load(out_ptr + at, mask=whole, other=0.0)  # here, so that it is on its way while the rest is
    first = (start + places).to(tl.int64) * (PARTS * MAX_RANK) + part * MAX_RANK
    split_stride = num_rows.to(tl.int64) * (PARTS * MAX_RANK)
    low = _narrow(low_ptr, first, here, rs, rank, split_stride, SPLITS)
    acc = tl.dot(low.to(b.dtype), b, input_precision="ieee")
    if MAX_RANK > BLOCK_R:
        for r in range(BLOCK_R, rank, BLOCK_R):
            low = _narrow(low_ptr, first, here, r + rs, rank, split_stride, SPLITS)
            b = _wide(b_row, cols, width, r + rs, rank)
            acc = tl.dot(low.to(b.dtype), b, acc, input_precision="ieee")
    tl.store(out_ptr + at, (out.to(tl.float32) + scale * acc).to(out_ptr.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["num_rows", "steps"])
def _expand_gated(
    out_ptr,  # [num_tokens, SIZE]
    gate_up_ptr,  # [num_tokens, 2 SIZE], gates first
    low_ptr,  # [SPLITS, num_rows, PARTS, MAX_RANK] fp32
    slots_ptr,  # [num_slots, slot_size]
    offsets_ptr,  # [num_slots, PARTS, 2], rows of 2 TABLE
    ranks_ptr,  # [num_slots, PARTS], rows of TABLE
    scales_ptr,  # [num_slots, PARTS], rows of TABLE
    order_ptr,  # [num_rows]
    tiles_ptr,  # [num_tiles, 3]
    slot_size,
    num_rows,
    steps,  # blocks of columns of a program
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,  # 2, or 1 of gates and ups
    TABLE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = silu(gate + its update) * (up + its update), also in rows without an adapter"""
    # grid: (num_tiles, SIZE / BLOCK_N / steps)
    if OVERLAP:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    slot = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    up_part: tl.constexpr = PARTS - 1
    used = (count > 0) & (slot >= 0)
    entry = slot * TABLE
    gate_rank = tl.load(ranks_ptr + entry, mask=used, other=0)
    gate_at = tl.load(offsets_ptr + entry * 2 + 1, mask=used, other=0)
    gate_scale = tl.load(scales_ptr + entry, mask=used, other=0.0)
    up_rank = tl.load(ranks_ptr + entry + up_part, mask=used, other=0)
    up_at = tl.load(offsets_ptr + (entry + up_part) * 2 + 1, mask=used, other=0)
    up_scale = tl.load(scales_ptr + entry + up_part, mask=used, other=0.0)
    rs = tl.arange(0, BLOCK_R)
    places = tl.arange(0, BLOCK_M)
    here = places < count
    rows = tl.load(order_ptr + start + places, mask=here, other=0).to(tl.int64)
    own = slots_ptr + slot.to(tl.int64) * slot_size
    gate_b = own + tl.multiple_of(gate_at, 64)
    up_b = own + tl.multiple_of(up_at, 64)
    width: tl.constexpr = SIZE * 2 // PARTS
    if OVERLAP:
        gdc_wait()
    if count == 0:
        return
    first = (start + places).to(tl.int64) * (PARTS * MAX_RANK)
    up_first = first + up_part * MAX_RANK
    split_stride = num_rows.to(tl.int64) * (PARTS * MAX_RANK)
    dtype = out_ptr.dtype.element_ty
    low = _narrow(low_ptr, first, here, rs, gate_rank, split_stride, SPLITS).to(slots_ptr.dtype.element_ty)
    up_low = _narrow(low_ptr, up_first, here, rs, up_rank, split_stride, SPLITS).to(slots_ptr.dtype.element_ty)
    begin = tl.program_id(1) * steps * BLOCK_N
    for col in tl.range(begin, min(SIZE, begin + steps * BLOCK_N), BLOCK_N, num_stages=STAGES):
        cols = tl.multiple_of(col, BLOCK_N) + tl.arange(0, BLOCK_N)
        if SIZE % BLOCK_N == 0:
            gate_cols = cols
            up_cols = cols + (2 - PARTS) * SIZE
            whole = here[:, None] & (cols >= 0)[None, :]
        else:  # columns beyond the matrix are masked
            gate_cols = tl.where(cols < SIZE, cols, width)
            up_cols = tl.where(cols < SIZE, cols + (2 - PARTS) * SIZE, width)
            whole = here[:, None] & (cols < SIZE)[None, :]
        b = _wide(gate_b, gate_cols, width, rs, gate_rank)
        b_up = _wide(up_b, up_cols, width, rs, up_rank)
        at = rows[:, None] * (2 * SIZE) + cols[None, :]
        gate = tl.load(gate_up_ptr + at, mask=whole, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + at + SIZE, mask=whole, other=0.0).to(tl.float32)
        acc = tl.dot(low, b, input_precision="ieee")
        up_acc = tl.dot(up_low, b_up, input_precision="ieee")
        if MAX_RANK > BLOCK_R:
            for r in range(BLOCK_R, max(gate_rank, up_rank), BLOCK_R):
                more = _narrow(low_ptr, first, here, r + rs, gate_rank, split_stride, SPLITS)
                b = _wide(gate_b, gate_cols, width, r + rs, gate_rank)
                acc = tl.dot(more.to(b.dtype), b, acc, input_precision="ieee")
                more = _narrow(low_ptr, up_first, here, r + rs, up_rank, split_stride, SPLITS)
                b = _wide(up_b, up_cols, width, r + rs, up_rank)
                up_acc = tl.dot(more.to(b.dtype), b, up_acc, input_precision="ieee")
        gate = (gate + gate_scale * acc).to(dtype).to(tl.float32)
        up = (up + up_scale * up_acc).to(dtype).to(tl.float32)
        gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        tl.store(out_ptr + rows[:, None] * SIZE + cols[None, :], (gated * up).to(dtype), mask=whole)


def _shape(tile_rows: int) -> tuple[int, int]:
    """Returns the columns that a program computes at once, and its warps."""
    return (_BLOCK_N, 4) if tile_rows <= _MANY_ROWS else (_BLOCK_N_OF_MANY, _WARPS_OF_MANY)


def expand_adapters(
    out: Tensor,
    low: Tensor,
    slots: Tensor,
    offsets: Tensor,
    ranks: Tensor,
    scales: Tensor,
    ends: Sequence[int],
    order: Tensor,
    tiles: Tensor,
    tile_rows: int,
    *,
    factor: float = 1.0,
    joined: bool = False,
) -> Tensor:
    """Adds the updates of at most three parts to `out`. `low`: of shrink_adapters. Arguments as in the reference.

    `joined`: it follows launches of two streams.
    """
    splits, num_rows, num_parts, max_rank = low.shape
    assert len(ends) == num_parts <= _MAX_PARTS, f"{num_parts} parts, ends {ends}"
    first, second, third = (*ends, ends[-1], ends[-1])[:3]
    widths = [end - begin for begin, end in zip((0, *ends), ends, strict=False)]
    overlap = overlaps(out) and not joined
    block_n, num_warps = _shape(tile_rows)
    _expand[(len(tiles), sum(triton.cdiv(width, block_n) for width in widths))](
        out,
        low,
        slots,
        offsets,
        ranks,
        scales,
        order,
        tiles,
        factor,
        out.stride(0),
        slots.stride(0),
        num_rows,
        END_0=first,
        END_1=second,
        END_2=third,
        PARTS=num_parts,
        TABLE=ranks.stride(0),
        MAX_RANK=max_rank,
        SPLITS=splits,
        BLOCK_M=max(16, triton.next_power_of_2(tile_rows)),
        BLOCK_N=block_n,
        BLOCK_R=block_r(max_rank),
        ALIGNED=all(width % 16 == 0 for width in widths),
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )
    return out


def expand_gated_adapters(
    gate_up: Tensor,
    low: Tensor,
    slots: Tensor,
    offsets: Tensor,
    ranks: Tensor,
    scales: Tensor,
    order: Tensor,
    tiles: Tensor,
    tile_rows: int,
    *,
    joined: bool = False,
) -> Tensor:
    """Returns silu(first half) * second half of the contiguous gate_up [num_tokens, 2 size] with its updates, of one
    or two parts. Every row is in a tile, those without an adapter in tiles of slot -1. `joined`: as above."""
    splits, num_rows, num_parts, max_rank = low.shape
    size = gate_up.shape[1] // 2
    assert num_parts in (1, 2), f"{num_parts} parts"
    out = torch.empty(len(gate_up), size, dtype=gate_up.dtype, device=gate_up.device)
    overlap = overlaps(gate_up) and not joined
    block_n, num_warps = _shape(tile_rows)
    blocks = triton.cdiv(size, block_n)
    most = _MOST_STEPS if tile_rows <= _MANY_ROWS else _STEPS_OF_MANY
    steps = max(1, min(most, len(tiles) * blocks // _GATED_PROGRAMS))
    stages = 3 if slots.itemsize == 2 else 1  # more of fp32 take more shared memory than there is
    _expand_gated[(len(tiles), triton.cdiv(blocks, steps))](
        out,
        gate_up,
        low,
        slots,
        offsets,
        ranks,
        scales,
        order,
        tiles,
        slots.stride(0),
        num_rows,
        steps,
        SIZE=size,
        PARTS=num_parts,
        TABLE=ranks.stride(0),
        MAX_RANK=max_rank,
        SPLITS=splits,
        BLOCK_M=max(16, triton.next_power_of_2(tile_rows)),
        BLOCK_N=block_n,
        BLOCK_R=block_r(max_rank),
        STAGES=stages,
        OVERLAP=overlap,
        num_warps=num_warps,
        num_stages=stages,
        launch_pdl=overlap,
    )
    return out
