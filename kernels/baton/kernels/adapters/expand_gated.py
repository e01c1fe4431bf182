"""The wide half of the updates of a SwiGLU MLP's first linear, and its gate: one launch in place of the gate's own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.adapters.shrink import block_r
from baton.kernels.adapters.wide import SMALL_RANK, gated_shape, narrow_block, wide_block
from baton.kernels.overlap import overlaps


@triton.jit
def _gate_columns(
    out_ptr,  # [num_tokens, SIZE]
    gate_up_ptr,  # [num_tokens, 2 SIZE]
    rows,  # [BLOCK_M] int64
    here,  # [BLOCK_M]
    low_ptr,  # [SPLITS, num_rows, PARTS, MAX_RANK] fp32
    first,  # [BLOCK_M], places in low of the rows
    split_stride,
    gate_b,  # [gate_rank, 2 SIZE / PARTS]
    up_b,
    gate_rank,
    up_rank,
    gate_scale,
    up_scale,
    begin,
    end,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKS: tl.constexpr,  # whether ranks may be above BLOCK_R
):
    """Computes columns `begin` to `end` of the rows of a tile."""
    rs = tl.arange(0, BLOCK_R)
    up_first = first + (PARTS - 1) * MAX_RANK
    width: tl.constexpr = SIZE * 2 // PARTS
    dtype = out_ptr.dtype.element_ty
    kept = gate_b.dtype.element_ty
    low = narrow_block(low_ptr, first, here, rs, gate_rank, split_stride, SPLITS).to(kept)
    up_low = narrow_block(low_ptr, up_first, here, rs, up_rank, split_stride, SPLITS).to(kept)
    for col in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        cols = tl.multiple_of(col, BLOCK_N) + tl.arange(0, BLOCK_N)
        whole = here[:, None] & (cols < SIZE)[None, :]
        # Columns beyond the matrix are masked.
        gate_cols = tl.where(cols < SIZE, cols, width) if SIZE % BLOCK_N else cols
        up_cols = tl.where(cols < SIZE, cols + (2 - PARTS) * SIZE, width) if SIZE % BLOCK_N else cols + width - SIZE
        b = wide_block(gate_b, gate_cols, width, rs, gate_rank)
        b_up = wide_block(up_b, up_cols, width, rs, up_rank)
        at = rows[:, None] * (2 * SIZE) + cols[None, :]
        gate = tl.load(gate_up_ptr + at, mask=whole, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + at + SIZE, mask=whole, other=0.0).to(tl.float32)
        acc = tl.dot(low, b, input_precision="ieee")
        up_acc = tl.dot(up_low, b_up, input_precision="ieee")
        if BLOCKS:
            for r in tl.range(BLOCK_R, max(gate_rank, up_rank), BLOCK_R, num_stages=1):
                more = narrow_block(low_ptr, first, here, r + rs, gate_rank, split_stride, SPLITS).to(kept)
                acc = tl.dot(more, wide_block(gate_b, gate_cols, width, r + rs, gate_rank), acc, input_precision="ieee")
                more = narrow_block(low_ptr, up_first, here, r + rs, up_rank, split_stride, SPLITS).to(kept)
                b_up = wide_block(up_b, up_cols, width, r + rs, up_rank)
                up_acc = tl.dot(more, b_up, up_acc, input_precision="ieee")
        gate = (gate + gate_scale * acc).to(dtype).to(tl.float32)
        up = (up + up_scale * up_acc).to(dtype).to(tl.float32)
        gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        tl.store(out_ptr + rows[:, None] * SIZE + cols[None, :], (gated * up).to(dtype), mask=whole)


@triton.jit(do_not_specialize=["num_rows", "columns"])
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
    columns,  # of a program of a rank that is not small
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,  # 2, or 1 of gates and ups
    TABLE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SMALL_N: tl.constexpr,
    SMALL_BY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = silu(gate + its update) * (up + its update), also in rows without an adapter"""
    # grid: (num_tiles, SIZE / columns)
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
    rank = max(gate_rank, up_rank)
    if rank <= SMALL_RANK:
        columns *= SMALL_BY
    begin = tl.multiple_of(tl.program_id(1) * columns, 64)
    if OVERLAP:
        gdc_wait()
    if (count == 0) | (begin >= SIZE):
        return
    end = min(SIZE, begin + columns)
    places = tl.arange(0, BLOCK_M)
    here = places < count
    rows = tl.load(order_ptr + start + places, mask=here, other=0).to(tl.int64)
    own = slots_ptr + slot.to(tl.int64) * slot_size
    gate_b = own + tl.multiple_of(gate_at, 64)
    up_b = own + tl.multiple_of(up_at, 64)
    first = (start + places).to(tl.int64) * (PARTS * MAX_RANK)
    stride = num_rows.to(tl.int64) * (PARTS * MAX_RANK)
    # fmt: off
    if rank <= SMALL_RANK:
        _gate_columns(out_ptr, gate_up_ptr, rows, here, low_ptr, first, stride, gate_b, up_b, gate_rank, up_rank,
                      gate_scale, up_scale, begin, end, SIZE, PARTS, MAX_RANK, SPLITS, SMALL_RANK, SMALL_N, STAGES,
                      False)
    elif MAX_RANK <= BLOCK_R:
        _gate_columns(out_ptr, gate_up_ptr, rows, here, low_ptr, first, stride, gate_b, up_b, gate_rank, up_rank,
                      gate_scale, up_scale, begin, end, SIZE, PARTS, MAX_RANK, SPLITS, BLOCK_R, BLOCK_N, STAGES, False)
    else:
        if rank <= BLOCK_R:
            _gate_columns(out_ptr, gate_up_ptr, rows, here, low_ptr, first, stride, gate_b, up_b, gate_rank, up_rank,
                          gate_scale, up_scale, begin, end, SIZE, PARTS, MAX_RANK, SPLITS, BLOCK_R, BLOCK_N, STAGES,
                          False)
        else:
            _gate_columns(out_ptr, gate_up_ptr, rows, here, low_ptr, first, stride, gate_b, up_b, gate_rank, up_rank,
                          gate_scale, up_scale, begin, end, SIZE, PARTS, MAX_RANK, SPLITS, BLOCK_R, BLOCK_N // 2, 1,
                          True)
    # fmt: on


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
    or two parts. Every row is in a tile, those without an adapter in tiles of slot -1.

    `joined`: it follows launches of two streams.
    """
    splits, num_rows, num_parts, max_rank = low.shape
    size = gate_up.shape[1] // 2
    assert num_parts in (1, 2), f"{num_parts} parts"
    out = torch.empty(len(gate_up), size, dtype=gate_up.dtype, device=gate_up.device)
    overlap = overlaps(gate_up) and not joined
    shape = gated_shape(tile_rows, max_rank, slots.itemsize)
    columns = shape.columns(len(tiles), size)
    _expand_gated[(len(tiles), triton.cdiv(size, columns))](
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
        columns,
        SIZE=size,
        PARTS=num_parts,
        TABLE=ranks.stride(0),
        MAX_RANK=max_rank,
        SPLITS=splits,
        BLOCK_M=max(16, triton.next_power_of_2(tile_rows)),
        BLOCK_N=shape.block,
        SMALL_N=shape.small_block,
        SMALL_BY=shape.small_by,
        BLOCK_R=block_r(max_rank),
        STAGES=shape.stages,
        OVERLAP=overlap,
        num_warps=shape.warps,
        num_stages=shape.stages,
        launch_pdl=overlap,
    )
    return out
