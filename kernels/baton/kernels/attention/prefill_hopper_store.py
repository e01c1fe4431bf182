"""Stores the rows of a warp group of Hopper's prefill attention, and merges the parts of tiles that are cut."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baton.kernels.attention.prefill_hopper_items import GROUP_ROWS
from baton.kernels.hopper import thread_barrier


@gluon.jit
def store_rows(
    out_ptr,
    acc,
    top,
    total,
    out_row,
    num_live,
    tile,
    head,
    num_q_heads,
    parts_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CUT: gl.constexpr,
):
    """Stores acc / total [64, HEAD_DIM]. If the tile is cut, stores a part, and the last one of a tile merges all."""
    layout: gl.constexpr = acc.type.layout
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    inverse = 1.0 / total
    if CUT:
        inverse = gl.where(total > 0, inverse, 0.0)  # a row that sees none of these keys
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, layout))[:, None]
    out_rows = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout)) + GROUP * GROUP_ROWS
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    live = out_rows < num_live
    at = ((out_row + out_rows).to(gl.int64) * num_q_heads + head) * HEAD_DIM
    out_at = out_ptr + at[:, None] + dims[None, :]
    if CUT:
        packed = gl.load(parts_ptr + tile * 4 + 2)
        part = packed & 0xFFFF
        num_parts = packed >> 16
        if num_parts == 1:
            gl.store(out_at, acc.to(dtype), mask=live[:, None])
        else:
            place = gl.load(parts_ptr + tile * 4 + 3)
            stride = num_q_heads * 2 * GROUP_ROWS  # rows from one part to the next
            first_row = (place * num_q_heads + head) * 2 * GROUP_ROWS
            own_row = first_row + part * stride
            gl.store(partial_ptr + (own_row + out_rows)[:, None] * HEAD_DIM + dims[None, :], acc, mask=live[:, None])
            lse_rows = gl.arange(0, GROUP_ROWS, layout=total.type.layout) + GROUP * GROUP_ROWS
            lse = gl.where(total > 0, top + gl.log2(total), float("-inf"))
            gl.store(lse_ptr + own_row + lse_rows, lse, mask=lse_rows < num_live)
            thread_barrier()
            arrived_at = arrived_ptr + (place * num_q_heads + head) * 2 + GROUP
            if gl.atomic_add(arrived_at, 1) == num_parts - 1:
                merged = _merge(
                    partial_ptr, lse_ptr, first_row + out_rows, stride, num_parts, live, dims, HEAD_DIM, layout
                )  # fmt: skip
                gl.store(out_at, merged.to(dtype), mask=live[:, None])
                gl.store(arrived_at, 0)
    else:
        gl.store(out_at, acc.to(dtype), mask=live[:, None])


@gluon.jit
def _merge(
    partial_ptr, lse_ptr, rows, stride, num_parts, live, dims, HEAD_DIM: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """sum_p 2^(lse_p - max) partial_p / sum_p 2^(lse_p - max), always in the order of the parts"""
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    top = gl.full([GROUP_ROWS], -1.0e30, gl.float32, row_layout)
    total = gl.zeros([GROUP_ROWS], gl.float32, row_layout)
    acc = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, layout)
    for part in range(num_parts):
        at = rows + part * stride
        lse = gl.load(lse_ptr + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        own_at = partial_ptr + at[:, None] * HEAD_DIM + dims[None, :]
        own = gl.load(own_at, mask=live[:, None], other=0.0, cache_modifier=".cg")
        new_top = gl.maximum(top, lse)
        shrink = gl.exp2(top - new_top)
        weight = gl.exp2(lse - new_top)
        acc = acc * shrink[:, None] + own * weight[:, None]
        total = total * shrink + weight
        top = new_top
    return acc / total[:, None]
