"""Computes the grouped products of experts on Hopper: a loading warp feeds two warp groups through TMA.

Programs are persistent. A tile is 128 places of one expert. Each warp group multiplies 64 of them with two blocks of
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

from baton.kernels.hopper import load_tile, reinterpret, store_tile

GROUP_ROWS = gl.constexpr(64)  # places of one warp group
PANEL = gl.constexpr(64)  # elements of one 128-byte swizzled row
BLOCK_N = gl.constexpr(128)  # rows of one block of a matrix
SHIFT = gl.constexpr(5)


@gluon.jit
def grouped_kernel(
    out_desc,  # [num_tiles * 128, width], boxes of [64, 64]
    x_desc,  # [num_tiles * 128, K], boxes of [64, 64]
    weight_desc,  # [num_experts * ROWS, K], boxes of [128, 64]
    bias_ptr,  # [num_experts * ROWS]
    pairs_ptr,  # [num_tiles * 128] int32
    experts_ptr,  # [num_tiles] int32
    spans_ptr,  # [num_experts, 2] int32
    num_pairs,
    num_work,  # num_tiles * NUM_N
    limit,
    alpha,
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
    dtype: gl.constexpr = x_desc.dtype
    panel_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_buf = gl.allocate_shared_memory(dtype, [STAGES * 2, GROUP_ROWS, PANEL], panel_layout)
    weight_buf = gl.allocate_shared_memory(dtype, [STAGES * 2, BLOCK_N, PANEL], panel_layout)
    out_buf = gl.allocate_shared_memory(dtype, [2 * BLOCK_N // PANEL, GROUP_ROWS, PANEL], panel_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    gl.warp_specialize(
        [
            (_multiply, (
                out_desc, bias_ptr, x_buf, weight_buf, out_buf, ready, free, pairs_ptr, experts_ptr, spans_ptr,
                num_pairs, num_work, limit, alpha, 0, K, ROWS, WIDTH, NUM_N, GATED, CLAMPED, BIASED, STAGES,
            )),
            (_multiply, (
                out_desc, bias_ptr, x_buf, weight_buf, out_buf, ready, free, pairs_ptr, experts_ptr, spans_ptr,
                num_pairs, num_work, limit, alpha, 1, K, ROWS, WIDTH, NUM_N, GATED, CLAMPED, BIASED, STAGES,
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
def _work_at(start, num_work, experts_ptr, NUM_N: gl.constexpr):
    """Returns a program's work item of a round, and its expert; -1: no item.

    Items shift among programs from round to round. Otherwise one program could get an expert's last tile, which has few
    pairs, in every round.
    """
    programs = gl.num_programs(0)
    work = start + (gl.program_id(0) + start // programs * SHIFT) % programs
    expert = gl.load(experts_ptr + gl.minimum(work, num_work - 1) // NUM_N)
    return work, gl.where(work < num_work, expert, -1)


@gluon.jit
def _tile_of(work, expert, spans_ptr, NUM_N: gl.constexpr):
    """Returns the tile and block of a work item. All tiles of an expert use one block of its matrix before the next."""
    first = gl.load(spans_ptr + expert * 2)
    count = gl.load(spans_ptr + expert * 2 + 1)
    turn = work - first * NUM_N
    return first + turn % count, turn // count


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
    steps: gl.constexpr = (K + PANEL - 1) // PANEL
    second: gl.constexpr = ROWS // 2 if GATED else BLOCK_N  # rows from the first block to the second
    stride: gl.constexpr = BLOCK_N if GATED else 2 * BLOCK_N
    turn = 0
    for start in range(0, num_work, gl.num_programs(0)):
        work, expert = _work_at(start, num_work, experts_ptr, NUM_N)
        if expert >= 0:
            tile, block = _tile_of(work, expert, spans_ptr, NUM_N)
            place = tile * 2 * GROUP_ROWS
            row = expert * ROWS + block * stride
            both = gl.load(pairs_ptr + place + GROUP_ROWS) < num_pairs
            for step in range(steps):
                stage = turn % STAGES
                mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
                arrived = ready.index(stage)
                mbarrier.expect(arrived, (2 * GROUP_ROWS + 2 * BLOCK_N) * PANEL * 2, both)
                mbarrier.expect(arrived, (GROUP_ROWS + 2 * BLOCK_N) * PANEL * 2, both == 0)
                k = step * PANEL
                load_tile(x_desc, [place, k], arrived, x_buf.index(stage * 2))
                other = x_buf.index(stage * 2 + 1)
                load_tile(x_desc, [place + GROUP_ROWS, k], arrived, other, both)
                load_tile(weight_desc, [row, k], arrived, weight_buf.index(stage * 2))
                load_tile(weight_desc, [row + second, k], arrived, weight_buf.index(stage * 2 + 1))
                turn += 1


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
    zero = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, layout)
    cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    turn = 0
    for start in range(0, num_work, gl.num_programs(0)):
        work, expert = _work_at(start, num_work, experts_ptr, NUM_N)
        if expert >= 0:
            tile, block = _tile_of(work, expert, spans_ptr, NUM_N)
            place = (tile * 2 + GROUP) * GROUP_ROWS
            if gl.load(pairs_ptr + place) < num_pairs:
                first = zero
                second = zero
                for step in range(steps):
                    stage = (turn + step) % STAGES
                    mbarrier.wait(ready.index(stage), (turn + step) // STAGES & 1)
                    x = x_buf.index(stage * 2 + GROUP)
                    first = warpgroup_mma(x, weight_buf.index(stage * 2).permute((1, 0)), first, is_async=True)
                    second = warpgroup_mma(x, weight_buf.index(stage * 2 + 1).permute((1, 0)), second, is_async=True)
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
                        gated = first / (1.0 + gl.exp(-alpha * first)) * (second + 1.0)
                    else:
                        gated = first / (1.0 + gl.exp(-first)) * second
                    _store(out_desc, out_buf, gated.to(dtype), place, col, GROUP)
                else:
                    col = block * 2 * BLOCK_N
                    if BIASED:
                        at = bias_ptr + expert * ROWS + col + cols
                        first += gl.load(at, mask=col + cols < WIDTH, other=0.0).to(gl.float32)[None, :]
                        more = col + BLOCK_N + cols < WIDTH
                        second += gl.load(at + BLOCK_N, mask=more, other=0.0).to(gl.float32)[None, :]
                    _store(out_desc, out_buf, first.to(dtype), place, col, GROUP)
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
    """Stores [64, 128] at a place and column. Columns beyond the output's width are dropped."""
    panels: gl.constexpr = BLOCK_N // PANEL
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    tma.store_wait(0)
    reinterpret(out_buf, value.dtype, [2, GROUP_ROWS, BLOCK_N], tile_layout).index(GROUP).store(value)
    fence_async_shared()
    for panel in gl.static_range(panels):
        part = out_buf.index(GROUP * panels + panel)
        store_tile(out_desc, [place, col + panel * PANEL], part)
