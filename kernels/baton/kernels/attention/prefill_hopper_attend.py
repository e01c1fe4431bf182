"""A warp group of Hopper's prefill attention: scores, weights and sums of 64 rows, and the merge of cut tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from baton.kernels.attention.prefill_hopper_load import GROUP_ROWS
from baton.kernels.hopper import reinterpret, thread_barrier


@gluon.jit
def _softmax(score, top, total, limit, scale_log2, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Returns a tile's weights, and the updated maximum and sum. `limit` is each row's last unmasked column."""
    if MASKED:
        cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        score = gl.where(cols[None, :] <= limit[:, None], score, float("-inf"))
    new_top = gl.maximum(top, gl.max(score, 1) * scale_log2)
    shrink = gl.exp2(top - new_top)
    weight = gl.exp2(score * scale_log2 - new_top[:, None])
    return weight, new_top, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def attend(
    out_ptr,
    query_buf,
    key_buf,
    value_buf,
    query_ready,
    key_ready,
    key_free,
    value_ready,
    value_free,
    out_row,
    num_live,
    first_position,
    num_tiles,
    num_q_heads,
    query_head,
    scale_log2,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    part,
    num_parts,
    place,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
):
    """One warp group: 64 rows; first_position counts from the first key.

    While a tile's weights multiply V, the next tile's scores are already computed.
    """
    dtype: gl.constexpr = query_buf.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    query_tile = reinterpret(query_buf, dtype, [2, GROUP_ROWS, HEAD_DIM], tile_layout).index(GROUP)
    key_tiles = reinterpret(key_buf, dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    value_tiles = reinterpret(value_buf, dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)

    rows = gl.arange(0, GROUP_ROWS, layout=row_layout)
    positions = first_position + GROUP * GROUP_ROWS + rows
    zero = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, score_layout)
    acc = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, out_layout)
    # Finite, so that a tile that is masked for a row gives 2^(-inf - top) = 0 and not NaN.
    top = gl.full([GROUP_ROWS], -1.0e30, gl.float32, row_layout)
    total = gl.zeros([GROUP_ROWS], gl.float32, row_layout)

    mbarrier.wait(query_ready, 0)
    mbarrier.wait(key_ready.index(0), 0)
    score = warpgroup_mma(query_tile, key_tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(key_free.index(0), count=1)
    last_tile = num_tiles - 1
    weight, top, total, _ = _softmax(
        score, top, total, positions - last_tile * BLOCK_N, scale_log2, True, BLOCK_N, score_layout
    )
    weight = gl.convert_layout(weight.to(dtype), weight_layout)

    # Tiles that are partly masked for some row need the mask: with 128 rows, the last few.
    num_masked = gl.minimum(num_tiles, num_tiles - (first_position + 1) // BLOCK_N)
    for turn in range(1, num_masked):
        acc, weight, top, total = _turn(
            acc, weight, top, total, query_tile, key_tiles, value_tiles, key_ready, key_free, value_ready, value_free,
            positions, num_tiles, turn, scale_log2, True, dtype, BLOCK_N, STAGES, score_layout, weight_layout, zero,
        )  # fmt: skip
    for turn in range(gl.maximum(num_masked, 1), num_tiles):
        acc, weight, top, total = _turn(
            acc, weight, top, total, query_tile, key_tiles, value_tiles, key_ready, key_free, value_ready, value_free,
            positions, num_tiles, turn, scale_log2, False, dtype, BLOCK_N, STAGES, score_layout, weight_layout, zero,
        )  # fmt: skip

    stage = last_tile % STAGES
    mbarrier.wait(value_ready.index(stage), last_tile // STAGES & 1)
    acc = warpgroup_mma(weight, value_tiles.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    inverse = 1.0 / total
    if CUT:
        inverse = gl.where(total > 0, inverse, 0.0)  # a row that sees none of these keys
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, out_layout))[:, None]
    out_rows = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, out_layout)) + GROUP * GROUP_ROWS
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, out_layout))
    live = out_rows < num_live
    at = ((out_row + out_rows).to(gl.int64) * num_q_heads + query_head) * HEAD_DIM
    out_at = out_ptr + at[:, None] + dims[None, :]
    if CUT:
        if num_parts == 1:
            gl.store(out_at, acc.to(dtype), mask=live[:, None])
        else:
            stride = num_q_heads * 2 * GROUP_ROWS  # rows from one part to the next
            first_row = (place * num_q_heads + query_head) * 2 * GROUP_ROWS
            own_row = first_row + part * stride
            gl.store(partial_ptr + (own_row + out_rows)[:, None] * HEAD_DIM + dims[None, :], acc, mask=live[:, None])
            lse_rows = rows + GROUP * GROUP_ROWS
            lse = gl.where(total > 0, top + gl.log2(total), float("-inf"))
            gl.store(lse_ptr + own_row + lse_rows, lse, mask=lse_rows < num_live)
            thread_barrier()
            arrived_at = arrived_ptr + (place * num_q_heads + query_head) * 2 + GROUP
            if gl.atomic_add(arrived_at, 1) == num_parts - 1:
                rows_of_first = first_row + out_rows
                merged = _merge(
                    partial_ptr, lse_ptr, rows_of_first, stride, num_parts, live, dims, HEAD_DIM, out_layout
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


@gluon.jit
def _turn(
    acc, weight, top, total, query_tile, key_tiles, value_tiles, key_ready, key_free, value_ready, value_free,
    positions, num_tiles, turn, scale_log2,
    MASKED: gl.constexpr, dtype: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    score_layout: gl.constexpr, weight_layout: gl.constexpr, zero,
):  # fmt: skip
    """Computes the scores of tile `turn`, and the previous tile's weights times V."""
    stage = turn % STAGES
    before = (turn - 1) % STAGES
    mbarrier.wait(key_ready.index(stage), turn // STAGES & 1)
    score = warpgroup_mma(query_tile, key_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(value_ready.index(before), (turn - 1) // STAGES & 1)
    acc = warpgroup_mma(weight, value_tiles.index(before), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(key_free.index(stage), count=1)
    limit = positions - (num_tiles - 1 - turn) * BLOCK_N
    next_weight, top, total, shrink = _softmax(score, top, total, limit, scale_log2, MASKED, BLOCK_N, score_layout)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(value_free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, gl.convert_layout(next_weight.to(dtype), weight_layout), top, total
