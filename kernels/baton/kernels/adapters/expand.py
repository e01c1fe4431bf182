"""The wide half of LoRA updates: a product with the wide matrices of all adapters, added to a linear's output."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.adapters.shrink import block_r
from baton.kernels.adapters.wide import SMALL_RANK, narrow_block, wide_block, wide_shape
from baton.kernels.overlap import overlaps

_MAX_PARTS = 3


@triton.jit
def _add_columns(
    out_row,  # [BLOCK_M, 1] pointers to the first column of a part
    here,  # [BLOCK_M]
    low_ptr,  # [SPLITS, num_rows, PARTS, MAX_RANK] fp32
    first,  # [BLOCK_M], places in low of the rows
    split_stride,
    b_row,  # [rank, width]
    width,
    rank,
    scale,
    begin,
    end,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKS: tl.constexpr,  # whether ranks may be above BLOCK_R
):
    """Adds the update to columns `begin` to `end` of the rows of a tile."""
    rs = tl.arange(0, BLOCK_R)
    dtype = b_row.dtype.element_ty
    low = narrow_block(low_ptr, first, here, rs, rank, split_stride, SPLITS).to(dtype)
    for col in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        cols = tl.multiple_of(col, BLOCK_N) + tl.arange(0, BLOCK_N)
        b = wide_block(b_row, cols, width, rs, rank)
        whole = here[:, None] & (cols < width)[None, :]
        out = tl.load(out_row + cols[None, :], mask=whole, other=0.0)
        acc = tl.dot(low, b, input_precision="ieee")
        if BLOCKS:
            for r in tl.range(BLOCK_R, rank, BLOCK_R, num_stages=1):
                more = narrow_block(low_ptr, first, here, r + rs, rank, split_stride, SPLITS).to(dtype)
                acc = tl.dot(more, wide_block(b_row, cols, width, r + rs, rank), acc, input_precision="ieee")
        added = (out.to(tl.float32) + scale * acc).to(out_row.dtype.element_ty)
        tl.store(out_row + cols[None, :], added, mask=whole)


@triton.jit(do_not_specialize=["factor", "num_rows", "columns"])
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
    columns,  # of a program of a rank that is not small
    END_0: tl.constexpr,
    END_1: tl.constexpr,
    END_2: tl.constexpr,
    PARTS: tl.constexpr,
    TABLE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SMALL_N: tl.constexpr,
    SMALL_BY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[order_i, n] += factor scales[slot, p] sum over r of b[slot, p, r, n] sum over s of low_s[i, p, r]"""
    # grid: (num_tiles, sum over parts of width / columns)
    if OVERLAP:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    block = tl.program_id(1)
    part = 0
    begin = 0
    end = END_0
    blocks_0 = tl.cdiv(END_0, columns)
    blocks_1 = tl.cdiv(END_1 - END_0, columns)
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
    if rank <= SMALL_RANK:
        columns *= SMALL_BY
    from_col = tl.multiple_of(block * columns, 64)
    if OVERLAP:
        gdc_wait()
    if (rank == 0) | (from_col >= width):
        return
    to_col = min(width, from_col + columns)
    places = tl.arange(0, BLOCK_M)
    here = places < count
    b_row = slots_ptr + slot.to(tl.int64) * slot_size + tl.multiple_of(offset, 64)
    rows = tl.load(order_ptr + start + places, mask=here, other=0).to(tl.int64)
    out_row = out_ptr + rows[:, None] * out_stride + begin
    first = (start + places).to(tl.int64) * (PARTS * MAX_RANK) + part * MAX_RANK
    stride = num_rows.to(tl.int64) * (PARTS * MAX_RANK)
    # fmt: off
    if rank <= SMALL_RANK:
        _add_columns(out_row, here, low_ptr, first, stride, b_row, width, rank, scale, from_col, to_col,
                     SPLITS, SMALL_RANK, SMALL_N, STAGES, False)
    elif MAX_RANK <= BLOCK_R:
        _add_columns(out_row, here, low_ptr, first, stride, b_row, width, rank, scale, from_col, to_col,
                     SPLITS, BLOCK_R, BLOCK_N, STAGES, False)
    else:
        if rank <= BLOCK_R:
            _add_columns(out_row, here, low_ptr, first, stride, b_row, width, rank, scale, from_col, to_col,
                         SPLITS, BLOCK_R, BLOCK_N, STAGES, False)
        else:
            _add_columns(out_row, here, low_ptr, first, stride, b_row, width, rank, scale, from_col, to_col,
                         SPLITS, BLOCK_R, BLOCK_N // 2, 1, True)
    # fmt: on


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
    shape = wide_shape(tile_rows, max_rank, slots.itemsize)
    columns = shape.columns(len(tiles), ends[-1])
    _expand[(len(tiles), sum(triton.cdiv(width, columns) for width in widths))](
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
        columns,
        END_0=first,
        END_1=second,
        END_2=third,
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
        ALIGNED=all(width % 16 == 0 for width in widths),
        OVERLAP=overlap,
        num_warps=shape.warps,
        num_stages=shape.stages,
        launch_pdl=overlap,
    )
    return out
