"""A warp group of Hopper's prefill attention: scores, weights and sums of 64 rows of each item."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from baton.kernels.attention.prefill_hopper_items import GROUP_ROWS, count_items, item_at, read_item
from baton.kernels.attention.prefill_hopper_store import store_rows
from baton.kernels.hopper import reinterpret


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
def _await_turn(GROUP: gl.constexpr):
    """Waits until the other warp group has started its products. Triton uses none of the barriers 8 and 9."""
    if GROUP == 0:
        gl.inline_asm_elementwise("bar.sync 8, 256; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 9, 256; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(GROUP: gl.constexpr):
    """Lets the other warp group start its products."""
    if GROUP == 0:
        gl.inline_asm_elementwise("bar.arrive 9, 256; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 8, 256; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def attend(
    out_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    tile_seq_ptr,
    tile_start_ptr,
    parts_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    query_buf,
    query_ready,
    query_free,
    key_buf,
    key_ready,
    key_free,
    value_buf,
    value_ready,
    value_free,
    num_items,
    num_q_heads,
    scale_log2,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
):
    """One warp group: 64 rows of each item.

    A tile's scores are computed beside the product of the previous tile's weights and V. The two groups start their
    products in turns, so that one computes weights while the matrix unit works for the other.
    """
    dtype: gl.constexpr = query_buf.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    query_tiles = reinterpret(query_buf, dtype, [4, GROUP_ROWS, HEAD_DIM], tile_layout)
    key_tiles = reinterpret(key_buf, dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    value_tiles = reinterpret(value_buf, dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    rows = gl.arange(0, GROUP_ROWS, layout=row_layout)
    zero = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, score_layout)

    _seq, out_row, num_live, first_position, num_tiles, _key = read_item(
        item_at(0), num_items, num_q_heads, seq_lens_ptr, query_start_loc_ptr, tile_seq_ptr, tile_start_ptr, parts_ptr,
        BLOCK_N, CUT,
    )  # fmt: skip
    if GROUP == 1:
        _pass_turn(1)
    base = 0  # tiles before this item
    for turn in range(count_items(num_items)):
        item = item_at(turn)
        query_slot = turn % 2
        query_tile = query_tiles.index(query_slot * 2 + GROUP)
        positions = first_position + GROUP * GROUP_ROWS + rows
        acc = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, out_layout)
        # Finite, so that a tile that is masked for a row gives 2^(-inf - top) = 0 and not NaN.
        top = gl.full([GROUP_ROWS], -1.0e30, gl.float32, row_layout)
        total = gl.zeros([GROUP_ROWS], gl.float32, row_layout)

        mbarrier.wait(query_ready.index(query_slot), turn // 2 & 1)
        stage = base % STAGES
        mbarrier.wait(key_ready.index(stage), base // STAGES & 1)
        score = warpgroup_mma(query_tile, key_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        # The next item is read here, where the group would only wait for the scores.
        _seq, next_row, next_live, next_position, next_tiles, _key = read_item(
            item_at(turn + 1), num_items, num_q_heads, seq_lens_ptr, query_start_loc_ptr, tile_seq_ptr, tile_start_ptr,
            parts_ptr, BLOCK_N, CUT,
        )  # fmt: skip
        score = warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(key_free.index(stage), count=1)
        last_tile = num_tiles - 1
        weight, top, total, _shrink = _softmax(
            score, top, total, positions - last_tile * BLOCK_N, scale_log2, True, BLOCK_N, score_layout
        )
        weight = gl.convert_layout(weight.to(dtype), weight_layout)

        # Tiles that are partly masked for some row need the mask: with 128 rows, the last few.
        num_masked = gl.minimum(num_tiles, num_tiles - (first_position + 1) // BLOCK_N)
        for step in range(1, num_masked):
            acc, weight, top, total = _step(
                acc, weight, top, total, query_tile, key_tiles, value_tiles, key_ready, key_free, value_ready,
                value_free, positions - (last_tile - step) * BLOCK_N, base + step, scale_log2, zero,
                GROUP, True, dtype, BLOCK_N, STAGES, score_layout, weight_layout,
            )  # fmt: skip
        for step in range(gl.maximum(num_masked, 1), num_tiles):
            acc, weight, top, total = _step(
                acc, weight, top, total, query_tile, key_tiles, value_tiles, key_ready, key_free, value_ready,
                value_free, positions, base + step, scale_log2, zero,
                GROUP, False, dtype, BLOCK_N, STAGES, score_layout, weight_layout,
            )  # fmt: skip
        mbarrier.arrive(query_free.index(query_slot), count=1)

        stage = (base + last_tile) % STAGES
        mbarrier.wait(value_ready.index(stage), (base + last_tile) // STAGES & 1)
        acc = warpgroup_mma(weight, value_tiles.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(value_free.index(stage), count=1)
        store_rows(
            out_ptr, acc, top, total, out_row, num_live, item // num_q_heads, item % num_q_heads, num_q_heads,
            parts_ptr, partial_ptr, lse_ptr, arrived_ptr, GROUP, HEAD_DIM, CUT,
        )  # fmt: skip
        base += num_tiles
        out_row = next_row
        num_live = next_live
        first_position = next_position
        num_tiles = next_tiles
    if GROUP == 0:
        _await_turn(0)  # which the other group has passed last


@gluon.jit
def _step(
    acc, weight, top, total, query_tile, key_tiles, value_tiles, key_ready, key_free, value_ready, value_free,
    limit, tile, scale_log2, zero, GROUP: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, score_layout: gl.constexpr, weight_layout: gl.constexpr,
):  # fmt: skip
    """Computes the scores of `tile`, which counts all tiles of the program, and the previous tile's weights times V."""
    stage = tile % STAGES
    before = (tile - 1) % STAGES
    mbarrier.wait(key_ready.index(stage), tile // STAGES & 1)
    _await_turn(GROUP)
    score = warpgroup_mma(query_tile, key_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(value_ready.index(before), (tile - 1) // STAGES & 1)
    acc = warpgroup_mma(weight, value_tiles.index(before), acc, is_async=True)
    _pass_turn(GROUP)
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(key_free.index(stage), count=1)
    next_weight, top, total, shrink = _softmax(score, top, total, limit, scale_log2, MASKED, BLOCK_N, score_layout)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(value_free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, gl.convert_layout(next_weight.to(dtype), weight_layout), top, total
