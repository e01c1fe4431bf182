"""Computes the grouped products of experts in e4m3 on Hopper: a loading warp feeds two warp groups through TMA.

As `grouped_hopper`, with steps of 128 columns, whose sums are scaled and added in fp32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from baton.kernels.hopper import load_tile, reinterpret, sigmoid, store_tile
from baton.kernels.moe.loads_hopper import tile_of, work_at

GROUP_ROWS = gl.constexpr(64)  # places of one warp group
STEP = gl.constexpr(128)  # columns, which have one scale
BLOCK_N = gl.constexpr(128)  # rows of one block of a matrix
_BF16_PANEL = gl.constexpr(64)  # elements of one 128-byte swizzled row


@gluon.jit
def grouped_fp8_kernel(
    out_desc,  # [num_tiles * 128, width]; GATED: e4m3, boxes of [64, 128], or boxes of [64, 64]
    out_scale_ptr,  # [width / 128, num_tiles * 128] fp32, with GATED
    x_desc,  # [num_tiles * 128, K] e4m3, boxes of [64, 128]
    x_scale_ptr,  # [K / 128, num_tiles * 128] fp32
    weight_desc,  # [num_experts * ROWS, K] e4m3, boxes of [128, 128]
    scale_ptr,  # [num_experts, ROWS / 128, K / 128] fp32, with SCALED
    row_scale_ptr,  # [num_experts * ROWS] fp32
    bias_ptr,  # [num_experts * ROWS]
    pairs_ptr,  # [num_tiles * 128] int32
    experts_ptr,  # [num_tiles] int32
    spans_ptr,  # [num_experts, 2] int32
    num_pairs,
    num_places,
    num_work,  # num_tiles * NUM_N
    limit,
    alpha,
    K: gl.constexpr,
    ROWS: gl.constexpr,  # of one expert's matrix
    WIDTH: gl.constexpr,
    NUM_N: gl.constexpr,
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    SCALED: gl.constexpr,
    ROW_SCALED: gl.constexpr,
    DIVIDES: gl.constexpr,
    BIASED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out_s = gated(weight_e x_s + bias_e), or without a gate, for place s in a tile of expert e"""
    # grid: one program per multiprocessor
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, GROUP_ROWS, STEP], layout)
    weight_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, BLOCK_N, STEP], layout)
    if GATED:
        out_buf = gl.allocate_shared_memory(out_desc.dtype, [2, GROUP_ROWS, BLOCK_N], layout)
    else:
        out_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        panels: gl.constexpr = 2 * BLOCK_N // _BF16_PANEL
        out_buf = gl.allocate_shared_memory(out_desc.dtype, [panels, GROUP_ROWS, _BF16_PANEL], out_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    gl.warp_specialize(
        [
            (_multiply, (
                out_desc, out_scale_ptr, x_scale_ptr, scale_ptr, row_scale_ptr, bias_ptr, x_buf, weight_buf, out_buf,
                ready, free, pairs_ptr, experts_ptr, spans_ptr, num_pairs, num_places, num_work, limit, alpha, 0, K,
                ROWS, WIDTH, NUM_N, GATED, CLAMPED, SCALED, ROW_SCALED, DIVIDES, BIASED, STAGES,
            )),
            (_multiply, (
                out_desc, out_scale_ptr, x_scale_ptr, scale_ptr, row_scale_ptr, bias_ptr, x_buf, weight_buf, out_buf,
                ready, free, pairs_ptr, experts_ptr, spans_ptr, num_pairs, num_places, num_work, limit, alpha, 1, K,
                ROWS, WIDTH, NUM_N, GATED, CLAMPED, SCALED, ROW_SCALED, DIVIDES, BIASED, STAGES,
            )),
            (_load, (
                x_desc, weight_desc, x_buf, weight_buf, ready, free, pairs_ptr, experts_ptr, spans_ptr, num_pairs,
                num_work, K, ROWS, NUM_N, GATED, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _load(
    x_desc,
    weight_desc,
    x_buf,
    weight_buf,
    ready,
    free,
    pairs_ptr,
    experts_ptr,
    spans_ptr,
    num_pairs,
    num_work,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    NUM_N: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Loads each tile's steps of K as stages become free, in the loading warp."""
    steps: gl.constexpr = (K + STEP - 1) // STEP
    second: gl.constexpr = ROWS // 2 if GATED else BLOCK_N  # rows from the first block to the second
    stride: gl.constexpr = BLOCK_N if GATED else 2 * BLOCK_N
    turn = 0
    for start in range(0, num_work, gl.num_programs(0)):
        work, expert = work_at(start, num_work, experts_ptr, NUM_N)
        if expert >= 0:
            tile, block = tile_of(work, expert, spans_ptr, NUM_N)
            place = tile * 2 * GROUP_ROWS
            row = expert * ROWS + block * stride
            both = gl.load(pairs_ptr + place + GROUP_ROWS) < num_pairs
            for step in range(steps):
                stage = turn % STAGES
                mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
                arrived = ready.index(stage)
                mbarrier.expect(arrived, (2 * GROUP_ROWS + 2 * BLOCK_N) * STEP, both)
                mbarrier.expect(arrived, (GROUP_ROWS + 2 * BLOCK_N) * STEP, both == 0)
                k = step * STEP
                load_tile(x_desc, [place, k], arrived, x_buf.index(stage * 2))
                load_tile(x_desc, [place + GROUP_ROWS, k], arrived, x_buf.index(stage * 2 + 1), both)
                load_tile(weight_desc, [row, k], arrived, weight_buf.index(stage * 2))
                load_tile(weight_desc, [row + second, k], arrived, weight_buf.index(stage * 2 + 1))
                turn += 1


@gluon.jit
def _multiply(
    out_desc,
    out_scale_ptr,
    x_scale_ptr,
    scale_ptr,
    row_scale_ptr,
    bias_ptr,
    x_buf,
    weight_buf,
    out_buf,
    ready,
    free,
    pairs_ptr,
    experts_ptr,
    spans_ptr,
    num_pairs,
    num_places,
    num_work,
    limit,
    alpha,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    NUM_N: gl.constexpr,
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    SCALED: gl.constexpr,
    ROW_SCALED: gl.constexpr,
    DIVIDES: gl.constexpr,
    BIASED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiplies 64 places of each tile, in one warp group."""
    steps: gl.constexpr = (K + STEP - 1) // STEP
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    zero = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, layout)
    cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    rows = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout))
    second: gl.constexpr = ROWS // 2 if GATED else BLOCK_N
    stride: gl.constexpr = BLOCK_N if GATED else 2 * BLOCK_N
    turn = 0
    for start in range(0, num_work, gl.num_programs(0)):
        work, expert = work_at(start, num_work, experts_ptr, NUM_N)
        if expert >= 0:
            tile, block = tile_of(work, expert, spans_ptr, NUM_N)
            place = (tile * 2 + GROUP) * GROUP_ROWS
            if gl.load(pairs_ptr + place) < num_pairs:
                first = zero
                other = zero
                part = zero
                x_scale_at = x_scale_ptr + place + rows
                scale_at = scale_ptr + (expert * ROWS + block * stride) // BLOCK_N * steps
                first_next, other_next = _scales(x_scale_at, scale_at, second // BLOCK_N * steps, SCALED)
                for step in range(steps):
                    first_scale = first_next
                    other_scale = other_next
                    after = gl.minimum(step + 1, steps - 1)
                    first_next, other_next = _scales(
                        x_scale_at + after * num_places, scale_at + after, second // BLOCK_N * steps, SCALED
                    )
                    stage = (turn + step) % STAGES
                    mbarrier.wait(ready.index(stage), (turn + step) // STAGES & 1)
                    x = x_buf.index(stage * 2 + GROUP)
                    # Both products take the same registers: with more, the compiler spills.
                    part = warpgroup_mma(
                        x, weight_buf.index(stage * 2).permute((1, 0)), part, use_acc=False, is_async=True
                    )
                    part = warpgroup_mma_wait(0, deps=[part])
                    first += part * first_scale[:, None]
                    part = warpgroup_mma(
                        x, weight_buf.index(stage * 2 + 1).permute((1, 0)), part, use_acc=False, is_async=True
                    )
                    part = warpgroup_mma_wait(0, deps=[part])
                    mbarrier.arrive(free.index(stage), count=1)
                    other += part * other_scale[:, None]
                row = expert * ROWS + block * stride
                inside = block * stride + cols < WIDTH
                first = _finished(first, row_scale_ptr, bias_ptr, row + cols, inside, ROW_SCALED, DIVIDES, BIASED)
                if not GATED:
                    inside = block * stride + BLOCK_N + cols < WIDTH
                other = _finished(
                    other, row_scale_ptr, bias_ptr, row + second + cols, inside, ROW_SCALED, DIVIDES, BIASED
                )
                if GATED:
                    if CLAMPED:
                        first = gl.minimum(first, limit)
                        other = gl.minimum(gl.maximum(other, -limit), limit)
                        gated = first * sigmoid(alpha * first) * (other + 1.0)
                    else:
                        gated = first * sigmoid(first) * other
                    largest = gl.max(gl.where(inside[None, :], gl.abs(gated), 0.0), 1)
                    scale = gl.maximum(largest, 1e-12) / 448.0
                    gl.store(out_scale_ptr + block * num_places + place + rows, scale)
                    gated = gl.minimum(gl.maximum(gated / scale[:, None], -448.0), 448.0)
                    tma.store_wait(0)
                    own = out_buf.index(GROUP)
                    own.store(gated.to(out_desc.dtype))
                    fence_async_shared()
                    store_tile(out_desc, [place, block * BLOCK_N], own)
                else:
                    _store(out_desc, out_buf, first.to(out_desc.dtype), place, block * stride, GROUP)
                    _store(out_desc, out_buf, other.to(out_desc.dtype), place, block * stride + BLOCK_N, GROUP)
            else:
                for step in range(steps):
                    stage = (turn + step) % STAGES
                    mbarrier.wait(ready.index(stage), (turn + step) // STAGES & 1)
                    mbarrier.arrive(free.index(stage), count=1)
            turn += steps
    tma.store_wait(0)


@gluon.jit
def _scales(x_scale_at, scale_at, step: gl.constexpr, SCALED: gl.constexpr):
    """Returns the scales of places with both blocks."""
    x_scale = gl.load(x_scale_at)
    first = x_scale
    other = x_scale
    if SCALED:
        first = x_scale * gl.load(scale_at)
        other = x_scale * gl.load(scale_at + step)
    return first, other


@gluon.jit
def _finished(
    acc, row_scale_ptr, bias_ptr, at, inside, ROW_SCALED: gl.constexpr, DIVIDES: gl.constexpr, BIASED: gl.constexpr
):
    """Returns sums with what belongs to whole rows of a matrix."""
    if ROW_SCALED:
        scale = gl.load(row_scale_ptr + at, mask=inside, other=1.0)
        acc = acc / scale[None, :] if DIVIDES else acc * scale[None, :]
    if BIASED:
        acc += gl.load(bias_ptr + at, mask=inside, other=0.0).to(gl.float32)[None, :]
    return acc


@gluon.jit
def _store(out_desc, out_buf, value, place, col, GROUP: gl.constexpr):
    """Stores [64, 128] at a place and column. Columns beyond the output's width are dropped."""
    panels: gl.constexpr = BLOCK_N // _BF16_PANEL
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    tma.store_wait(0)
    reinterpret(out_buf, value.dtype, [2, GROUP_ROWS, BLOCK_N], layout).index(GROUP).store(value)
    fence_async_shared()
    for panel in gl.static_range(panels):
        part = out_buf.index(GROUP * panels + panel)
        store_tile(out_desc, [place, col + panel * _BF16_PANEL], part)
