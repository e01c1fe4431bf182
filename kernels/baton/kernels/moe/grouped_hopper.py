"""Computes the grouped products of experts on Hopper: loading warps feed three warp groups.

Programs are persistent. A tile is 192 places of one expert. Each warp group multiplies 64 of them with two blocks of
the expert's rows: the gates and ups of the same 128 features, or 256 rows of the down matrix. A group without pairs
multiplies nothing.
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

from baton.kernels.hopper import gdc_launch_dependents, gdc_wait, reinterpret, sigmoid, store_tile
from baton.kernels.moe.loads_hopper import (
    BLOCK_N,
    GROUP_ROWS,
    GROUPS,
    LOADERS,
    PANEL,
    PANEL_LAYOUT,
    gather_tiles,
    load_tiles,
    tile_of,
    work_at,
)

_PANELS = gl.constexpr(BLOCK_N.value // PANEL.value)  # of the columns that a warp group stores at once


@gluon.jit
def grouped_kernel(
    out_desc,  # [num_tiles * 192, width], boxes of [64, 64]
    x_desc,  # [num_tiles * 192, K], boxes of [64, 64], if TOP_K is 0
    x_ptr,  # [num_tokens, K] if TOP_K > 0
    weight_desc,  # [num_experts * ROWS, K], boxes of [128, 64]
    bias_ptr,  # [num_experts * ROWS]
    pairs_ptr,  # [num_tiles * 192] int32
    experts_ptr,  # [num_tiles] int32
    spans_ptr,  # [num_experts, 2] int32
    num_pairs,
    num_work,  # num_tiles * NUM_N
    limit,
    alpha,
    TOP_K: gl.constexpr,  # pairs of a token, if x has a row for each token; 0: x has a row for each place
    K: gl.constexpr,
    ROWS: gl.constexpr,  # of one expert's matrix
    WIDTH: gl.constexpr,
    NUM_N: gl.constexpr,
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    BIASED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out_s = gated(weight_e x_s + bias_e), or without a gate, for place s in a tile of expert e"""
    # grid: one program per multiprocessor
    gdc_launch_dependents()
    dtype: gl.constexpr = x_desc.dtype
    x_buf = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, GROUP_ROWS, PANEL], PANEL_LAYOUT)
    weight_buf = gl.allocate_shared_memory(dtype, [STAGES, 2 * BLOCK_N, PANEL], PANEL_LAYOUT)
    out_buf = gl.allocate_shared_memory(dtype, [GROUPS * _PANELS, GROUP_ROWS, PANEL], PANEL_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + LOADERS * (TOP_K > 0))
        mbarrier.init(free.index(stage), count=GROUPS)
    gdc_wait()
    if TOP_K > 0:
        gl.warp_specialize(
            [
                (_multiply, (
                    out_desc, bias_ptr, x_buf, weight_buf, out_buf, ready, free, pairs_ptr, experts_ptr, spans_ptr,
                    num_pairs, num_work, limit, alpha, 0, TOP_K, K, ROWS, WIDTH, NUM_N, GATED, CLAMPED, BIASED, STAGES,
                )),
                (_multiply, (
                    out_desc, bias_ptr, x_buf, weight_buf, out_buf, ready, free, pairs_ptr, experts_ptr, spans_ptr,
                    num_pairs, num_work, limit, alpha, 1, TOP_K, K, ROWS, WIDTH, NUM_N, GATED, CLAMPED, BIASED, STAGES,
                )),
                (_multiply, (
                    out_desc, bias_ptr, x_buf, weight_buf, out_buf, ready, free, pairs_ptr, experts_ptr, spans_ptr,
                    num_pairs, num_work, limit, alpha, 2, TOP_K, K, ROWS, WIDTH, NUM_N, GATED, CLAMPED, BIASED, STAGES,
                )),
                (gather_tiles, (
                    x_ptr, weight_desc, x_buf, weight_buf, ready, free, pairs_ptr, experts_ptr, spans_ptr, num_pairs,
                    num_work, TOP_K, K, ROWS, NUM_N, GATED, STAGES,
                )),
            ],
            [4, 4, 4],
            [160, 160, 32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    out_desc, bias_ptr, x_buf, weight_buf, out_buf, ready, free, pairs_ptr, experts_ptr, spans_ptr,
                    num_pairs, num_work, limit, alpha, 0, TOP_K, K, ROWS, WIDTH, NUM_N, GATED, CLAMPED, BIASED, STAGES,
                )),
                (_multiply, (
                    out_desc, bias_ptr, x_buf, weight_buf, out_buf, ready, free, pairs_ptr, experts_ptr, spans_ptr,
                    num_pairs, num_work, limit, alpha, 1, TOP_K, K, ROWS, WIDTH, NUM_N, GATED, CLAMPED, BIASED, STAGES,
                )),
                (_multiply, (
                    out_desc, bias_ptr, x_buf, weight_buf, out_buf, ready, free, pairs_ptr, experts_ptr, spans_ptr,
                    num_pairs, num_work, limit, alpha, 2, TOP_K, K, ROWS, WIDTH, NUM_N, GATED, CLAMPED, BIASED, STAGES,
                )),
                (load_tiles, (
                    x_desc, weight_desc, x_buf, weight_buf, ready, free, pairs_ptr, experts_ptr, spans_ptr, num_pairs,
                    num_work, K, ROWS, NUM_N, GATED, STAGES,
                )),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip


@gluon.jit
def _multiply(
    out_desc,
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
    num_work,
    limit,
    alpha,
    GROUP: gl.constexpr,
    TOP_K: gl.constexpr,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    NUM_N: gl.constexpr,
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    BIASED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiplies 64 places of each tile, in one warp group."""
    steps: gl.constexpr = (K + PANEL - 1) // PANEL
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dtype: gl.constexpr = x_buf.dtype
    cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    halves = reinterpret(weight_buf, weight_buf.dtype, [STAGES * 2, BLOCK_N, PANEL], PANEL_LAYOUT)
    zero = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, layout)
    turn = 0
    for start in range(0, num_work, gl.num_programs(0)):
        work, expert = work_at(start, num_work, experts_ptr, NUM_N)
        if expert >= 0:
            tile, block = tile_of(work, expert, spans_ptr, NUM_N)
            place = (tile * GROUPS + GROUP) * GROUP_ROWS
            if gl.load(pairs_ptr + place) < num_pairs:
                first = zero
                second = zero
                for step in range(steps):
                    stage = (turn + step) % STAGES
                    mbarrier.wait(ready.index(stage), (turn + step) // STAGES & 1)
                    if TOP_K > 0:
                        fence_async_shared()  # gathered rows were not written by TMA
                    x = x_buf.index(stage * GROUPS + GROUP)
                    first = warpgroup_mma(x, halves.index(stage * 2).permute((1, 0)), first, is_async=True)
                    second = warpgroup_mma(x, halves.index(stage * 2 + 1).permute((1, 0)), second, is_async=True)
                    first, second = warpgroup_mma_wait(0, deps=[first, second])
                    mbarrier.arrive(free.index(stage), count=1)
                if GATED:
                    col = block * BLOCK_N
                    if BIASED:
                        at = bias_ptr + expert * ROWS + col + cols
                        inside = col + cols < WIDTH
                        first += gl.load(at, mask=inside, other=0.0).to(gl.float32)[None, :]
                        second += gl.load(at + WIDTH, mask=inside, other=0.0).to(gl.float32)[None, :]
                    if CLAMPED:
                        first = gl.minimum(first, limit)
                        second = gl.minimum(gl.maximum(second, -limit), limit)
                        gated = first * sigmoid(alpha * first) * (second + 1.0)
                    else:
                        gated = first * sigmoid(first) * second
                    _store(out_desc, out_buf, gated.to(dtype), place, col, GROUP)
                else:
                    col = block * 2 * BLOCK_N
                    if BIASED:
                        at = bias_ptr + expert * ROWS + col + cols
                        first += gl.load(at, mask=col + cols < WIDTH, other=0.0).to(gl.float32)[None, :]
                    _store(out_desc, out_buf, first.to(dtype), place, col, GROUP)
                    if BIASED:
                        at = bias_ptr + expert * ROWS + col + BLOCK_N + cols
                        more = col + BLOCK_N + cols < WIDTH
                        second += gl.load(at, mask=more, other=0.0).to(gl.float32)[None, :]
                    _store(out_desc, out_buf, second.to(dtype), place, col + BLOCK_N, GROUP)
            else:
                for step in range(steps):
                    stage = (turn + step) % STAGES
                    mbarrier.wait(ready.index(stage), (turn + step) // STAGES & 1)
                    mbarrier.arrive(free.index(stage), count=1)
            turn += steps
    tma.store_wait(0)


@gluon.jit
def _store(out_desc, out_buf, value, place, col, GROUP: gl.constexpr):
    """Stores [64, 128] at a place and column, in halves. Columns beyond the output's width are dropped."""
    low, high = value.reshape([GROUP_ROWS, _PANELS, PANEL]).permute((0, 2, 1)).split()
    _store_panel(out_desc, out_buf.index(GROUP * _PANELS), low, place, col)
    _store_panel(out_desc, out_buf.index(GROUP * _PANELS + 1), high, place, col + PANEL)


@gluon.jit
def _store_panel(out_desc, panel, value, place, col):
    """Stores [64, 64] through shared memory, which the last store but one has read."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PANEL, 16])
    tma.store_wait(1)
    panel.store(gl.convert_layout(value, layout, assert_trivial=True))
    fence_async_shared()
    store_tile(out_desc, [place, col], panel)
