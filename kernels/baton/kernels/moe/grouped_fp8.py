"""Products of tiles of pairs with their experts' matrices in e4m3, on the matrix unit's floats of 8 bits.

As in `grouped`, with the matrices as the left operand, which go from memory to the matrix unit as they are. A place has
one column, rounded to e4m3, or two, whose sum it is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.moe.grouped import gated
from baton.kernels.packed.rounding import store_parts, store_scales, unit_scale
from baton.kernels.packed.unpack import finished


@triton.jit
def _times(
    acc,
    x,
    x_scale,
    stored_ptr,
    scale_ptr,
    first,
    start,
    n,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns acc + w x, for the rows of w from `first` on. Sums of BLOCK_K products are scaled and added in fp32."""
    rows = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1)
    ks = tl.arange(0, BLOCK_K)
    row_ptr = stored_ptr + rows[:, None] * K + ks[None, :]
    if K % BLOCK_K == 0:
        stored = tl.load(row_ptr + start)
    else:
        stored = tl.load(row_ptr + start, mask=(start + ks < K)[None, :], other=0.0)
    part = tl.dot(stored, x)
    if SCALED and WHOLE:
        x_scale *= tl.load(scale_ptr + first // SCALE_ROWS * NUM_GROUPS + start // GROUP)
    elif SCALED:
        part *= tl.load(scale_ptr + rows // SCALE_ROWS * NUM_GROUPS + start // GROUP)[:, None]
    return acc + part * x_scale[None, :]


@triton.jit
def _joined(acc, BLOCK_N: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr):
    """Returns the sums of each place's columns."""
    if PARTS > 1:
        acc = tl.sum(tl.reshape(acc, [BLOCK_N, TILE, PARTS]), 2)
    return acc


@triton.jit(do_not_specialize=["num_pairs"])
def fp8_gate_up_kernel(
    out_ptr,  # [num_tiles * TILE, PARTS, SIZE] e4m3
    out_scale_ptr,  # [SIZE / BLOCK_N, num_tiles * TILE, PARTS] fp32
    x_ptr,  # [num_tokens, PARTS, K] e4m3
    x_scale_ptr,  # [K / BLOCK_K, num_tokens, PARTS] fp32
    stored_ptr,  # [num_experts, 2 SIZE, K] e4m3, gates first
    scale_ptr,  # [num_experts, 2 SIZE / SCALE_ROWS, NUM_GROUPS] fp32
    row_scale_ptr,  # [num_experts, 2 SIZE] fp32
    bias_ptr,  # [num_experts, 2 SIZE]
    pairs_ptr,  # [num_tiles * TILE] int32
    experts_ptr,  # [num_tiles] int32
    num_pairs,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    STORED_STEP: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    DIVIDES: tl.constexpr,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_s = gated(weight_e x_t + bias_e) for place s of token t in a tile of expert e"""
    # grid: (num_tiles * SIZE / BLOCK_N)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    num_n: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    n: tl.constexpr = 2 * SIZE
    tile = tl.program_id(0) // num_n
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        first = tl.program_id(0) % num_n * BLOCK_N
        ks = tl.arange(0, BLOCK_K)
        columns = tl.arange(0, TILE * PARTS)
        first_place = tile.to(tl.int64) * TILE
        # Empty places recompute the last token, because a load without a mask is faster.
        tokens = tl.minimum(tl.load(pairs_ptr + first_place + columns // PARTS), num_pairs - 1) // TOP_K
        own = tokens.to(tl.int64) * PARTS + columns % PARTS
        col_ptr = x_ptr + own[None, :] * K + ks[:, None]
        stored_ptr += expert * STORED_STEP
        scale_ptr += expert * SCALE_STEP
        gates = tl.zeros([BLOCK_N, TILE * PARTS], tl.float32)
        ups = tl.zeros([BLOCK_N, TILE * PARTS], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if K % BLOCK_K == 0:
                x = tl.load(col_ptr + start)
            else:
                x = tl.load(col_ptr + start, mask=(start + ks < K)[:, None], other=0.0)
            x_scale = tl.load(x_scale_ptr + start // BLOCK_K * (num_pairs // TOP_K * PARTS) + own)
            gates = _times(
                gates, x, x_scale, stored_ptr, scale_ptr, first, start, n, K, NUM_GROUPS, GROUP, SCALE_ROWS, SCALED,
                WHOLE, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            ups = _times(
                ups, x, x_scale, stored_ptr, scale_ptr, SIZE + first, start, n, K, NUM_GROUPS, GROUP, SCALE_ROWS,
                SCALED, WHOLE, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        rows = first + tl.arange(0, BLOCK_N)
        row_scale_ptr += expert * n
        bias_ptr += expert * n
        gates = _joined(gates, BLOCK_N, TILE, PARTS)
        ups = _joined(ups, BLOCK_N, TILE, PARTS)
        gates = finished(gates, rows, row_scale_ptr, bias_ptr, n, ROW_SCALED, DIVIDES, BIASED)
        ups = finished(ups, SIZE + rows, row_scale_ptr, bias_ptr, n, ROW_SCALED, DIVIDES, BIASED)
        out = gated(gates, ups, limit, alpha, CLAMPED)
        places = first_place + tl.arange(0, TILE)
        live = tl.load(pairs_ptr + places) < num_pairs
        scale = unit_scale(tl.max(tl.where((rows < SIZE)[:, None], tl.abs(out), 0.0), 0), PARTS)
        num_places = tl.num_programs(0) // num_n * TILE
        store_scales(out_scale_ptr, scale, (first // BLOCK_N * num_places.to(tl.int64) + places) * PARTS, live, PARTS)
        at = places[None, :] * (PARTS * SIZE) + rows[:, None]
        store_parts(out_ptr, out / scale[None, :], at, SIZE, (rows < SIZE)[:, None] & live[None, :], PARTS)


@triton.jit(do_not_specialize=["num_pairs"])
def fp8_down_kernel(
    out_ptr,  # [num_pairs, N]
    gated_ptr,  # [num_tiles * TILE, PARTS, K] e4m3
    gated_scale_ptr,  # [K / BLOCK_K, num_tiles * TILE, PARTS] fp32
    stored_ptr,  # [num_experts, N, K] e4m3
    scale_ptr,  # [num_experts, N / SCALE_ROWS, NUM_GROUPS] fp32
    row_scale_ptr,  # [num_experts, N] fp32
    bias_ptr,  # [num_experts, N]
    share_ptr,  # [num_pairs] fp32
    pairs_ptr,  # [num_tiles * TILE] int32
    experts_ptr,  # [num_tiles] int32
    num_pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    STORED_STEP: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    DIVIDES: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_p = share_p (weight_e gated_s + bias_e) for pair p at place s in a tile of expert e"""
    # grid: (num_tiles * N / BLOCK_N)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // num_n
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        first = tl.program_id(0) % num_n * BLOCK_N
        ks = tl.arange(0, BLOCK_K)
        columns = tl.arange(0, TILE * PARTS)
        filled = tl.load(pairs_ptr + tile.to(tl.int64) * TILE + columns // PARTS) < num_pairs
        # Empty places have any values, of which only their own columns are made.
        own = tile.to(tl.int64) * (TILE * PARTS) + columns
        col_ptr = gated_ptr + own[None, :] * K + ks[:, None]
        num_columns = (tl.num_programs(0) // num_n * (TILE * PARTS)).to(tl.int64)
        stored_ptr += expert * STORED_STEP
        scale_ptr += expert * SCALE_STEP
        acc = tl.zeros([BLOCK_N, TILE * PARTS], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if K % BLOCK_K == 0:
                x = tl.load(col_ptr + start)
            else:
                x = tl.load(col_ptr + start, mask=(start + ks < K)[:, None], other=0.0)
            x_scale = tl.load(gated_scale_ptr + start // BLOCK_K * num_columns + own, mask=filled, other=0.0)
            acc = _times(
                acc, x, x_scale, stored_ptr, scale_ptr, first, start, N, K, NUM_GROUPS, GROUP, SCALE_ROWS, SCALED,
                WHOLE, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        rows = first + tl.arange(0, BLOCK_N)
        row_scale_ptr += expert * N
        bias_ptr += expert * N
        acc = _joined(acc, BLOCK_N, TILE, PARTS)
        acc = finished(acc, rows, row_scale_ptr, bias_ptr, N, ROW_SCALED, DIVIDES, BIASED)
        pairs = tl.load(pairs_ptr + tile.to(tl.int64) * TILE + tl.arange(0, TILE))
        live = pairs < num_pairs
        acc *= tl.load(share_ptr + pairs, mask=live, other=0.0)[None, :]
        at = pairs.to(tl.int64)[None, :] * N + rows[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(rows < N)[:, None] & live[None, :])
