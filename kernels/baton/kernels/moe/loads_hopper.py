"""Loads the tiles of experts' grouped products on Hopper, and says which tiles a program computes.

Weights and arranged rows are loaded through TMA. Tokens' rows are gathered by single copies, because Hopper's TMA loads
only consecutive rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from baton.kernels.hopper import load_elements, load_tile, reinterpret

GROUPS = gl.constexpr(3)  # warp groups that multiply
GROUP_ROWS = gl.constexpr(64)  # places of one warp group
PANEL = gl.constexpr(64)  # elements of one 128-byte swizzled row
BLOCK_N = gl.constexpr(128)  # rows of one block of a matrix
LOADERS = gl.constexpr(128)  # threads that gather
PANEL_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_SHIFT = gl.constexpr(5)


@gluon.jit
def work_at(start, num_work, experts_ptr, NUM_N: gl.constexpr):
    """Returns a program's work item of a round, and its expert; -1: no item.

    Items shift among programs from round to round. Otherwise one program could get an expert's last tile, which has few
    pairs, in every round.
    """
    programs = gl.num_programs(0)
    work = start + (gl.program_id(0) + start // programs * _SHIFT) % programs
    expert = gl.load(experts_ptr + gl.minimum(work, num_work - 1) // NUM_N)
    return work, gl.where(work < num_work, expert, -1)


@gluon.jit
def tile_of(work, expert, spans_ptr, NUM_N: gl.constexpr):
    """Returns the tile and block of a work item. All tiles of an expert use one block of its matrix before the next."""
    first = gl.load(spans_ptr + expert * 2)
    count = gl.load(spans_ptr + expert * 2 + 1)
    turn = work - first * NUM_N
    return first + turn % count, turn // count


@gluon.jit
def load_tiles(
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
    """Loads each tile's steps of K as stages become free, in one warp."""
    steps: gl.constexpr = (K + PANEL - 1) // PANEL
    second: gl.constexpr = ROWS // 2 if GATED else BLOCK_N  # rows from the first block to the second
    stride: gl.constexpr = BLOCK_N if GATED else 2 * BLOCK_N
    halves = reinterpret(weight_buf, weight_buf.dtype, [STAGES * 2, BLOCK_N, PANEL], PANEL_LAYOUT)
    turn = 0
    for start in range(0, num_work, gl.num_programs(0)):
        work, expert = work_at(start, num_work, experts_ptr, NUM_N)
        if expert >= 0:
            tile, block = tile_of(work, expert, spans_ptr, NUM_N)
            place = tile * GROUPS * GROUP_ROWS
            row = expert * ROWS + block * stride
            live = 1
            for group in gl.static_range(1, GROUPS):
                live += (gl.load(pairs_ptr + place + group * GROUP_ROWS) < num_pairs).to(gl.int32)
            for step in range(steps):
                stage = turn % STAGES
                mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
                arrived = ready.index(stage)
                for count in gl.static_range(1, GROUPS + 1):
                    mbarrier.expect(arrived, (count * GROUP_ROWS + 2 * BLOCK_N) * PANEL * 2, live == count)
                k = step * PANEL
                load_tile(weight_desc, [row, k], arrived, halves.index(stage * 2))
                load_tile(weight_desc, [row + second, k], arrived, halves.index(stage * 2 + 1))
                for group in gl.static_range(GROUPS):
                    into = x_buf.index(stage * GROUPS + group)
                    load_tile(x_desc, [place + group * GROUP_ROWS, k], arrived, into, group < live)
                turn += 1


@gluon.jit
def gather_tiles(
    x_ptr,
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
    TOP_K: gl.constexpr,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    NUM_N: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `load_tiles`, of the rows of places' tokens, in four warps."""
    steps: gl.constexpr = (K + PANEL - 1) // PANEL
    second: gl.constexpr = ROWS // 2 if GATED else BLOCK_N
    stride: gl.constexpr = BLOCK_N if GATED else 2 * BLOCK_N
    halves = reinterpret(weight_buf, weight_buf.dtype, [STAGES * 2, BLOCK_N, PANEL], PANEL_LAYOUT)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # a thread copies 16 bytes at once
    rows = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout))
    ks = gl.arange(0, PANEL, layout=gl.SliceLayout(0, layout))
    turn = 0
    for start in range(0, num_work, gl.num_programs(0)):
        work, expert = work_at(start, num_work, experts_ptr, NUM_N)
        if expert >= 0:
            tile, block = tile_of(work, expert, spans_ptr, NUM_N)
            place = tile * GROUPS * GROUP_ROWS
            row = expert * ROWS + block * stride
            tokens0 = _tokens(pairs_ptr, place + rows, num_pairs, TOP_K)
            tokens1 = _tokens(pairs_ptr, place + GROUP_ROWS + rows, num_pairs, TOP_K)
            start0 = tokens0 * K
            start1 = tokens1 * K
            live1 = gl.load(pairs_ptr + place + GROUP_ROWS) < num_pairs
            tokens2 = _tokens(pairs_ptr, place + 2 * GROUP_ROWS + rows, num_pairs, TOP_K)
            start2 = tokens2 * K
            live2 = gl.load(pairs_ptr + place + 2 * GROUP_ROWS) < num_pairs
            for step in range(steps):
                stage = turn % STAGES
                mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
                arrived = ready.index(stage)
                mbarrier.expect(arrived, 2 * BLOCK_N * PANEL * 2)
                k = step * PANEL
                load_tile(weight_desc, [row, k], arrived, halves.index(stage * 2))
                load_tile(weight_desc, [row + second, k], arrived, halves.index(stage * 2 + 1))
                _copy(x_buf.index(stage * GROUPS), x_ptr, start0, ks, k, K)
                if live1:
                    _copy(x_buf.index(stage * GROUPS + 1), x_ptr, start1, ks, k, K)
                if live2:
                    _copy(x_buf.index(stage * GROUPS + 2), x_ptr, start2, ks, k, K)
                async_copy.mbarrier_arrive(arrived, increment_count=False)
                turn += 1


@gluon.jit
def _tokens(pairs_ptr, places, num_pairs, TOP_K: gl.constexpr):
    """Returns the tokens at places; an empty place has the last token."""
    return gl.minimum(gl.load(pairs_ptr + places), num_pairs - 1) // TOP_K


@gluon.jit
def _copy(into, x_ptr, starts, ks, k, K: gl.constexpr):
    """Starts the copies of a step of rows. Elements beyond K become zeros."""
    at = x_ptr + (starts[:, None] + (k + ks)[None, :])
    if K % PANEL == 0:
        load_elements(into, at)
    else:
        load_elements(into, at, mask=(k + ks < K)[None, :])
