"""Products of tiles of pairs with their experts' matrices: gate and up, weighted down; and sums of a token's experts.

Matrices are read as they are stored, by the loader of packed linears, and are the left operand.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.packed.rounding import nearest
from baton.kernels.packed.unpack import finished, times


@triton.jit
def _times_rounded(
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
    """Returns acc + x w^T for weights and x of e4m3. Sums of BLOCK_K products are scaled and added in fp32.

    x is the left operand, because a thread then needs few of the scales of its rows.
    """
    rows = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1)
    ks = tl.arange(0, BLOCK_K)
    row_ptr = stored_ptr + rows[None, :] * K + ks[:, None]
    if K % BLOCK_K == 0:
        stored = tl.load(row_ptr + start)
    else:
        stored = tl.load(row_ptr + start, mask=(start + ks < K)[:, None], other=0.0)
    part = tl.dot(x, stored)
    if SCALED and WHOLE:
        x_scale *= tl.load(scale_ptr + first // SCALE_ROWS * NUM_GROUPS + start // GROUP)
    elif SCALED:
        part *= tl.load(scale_ptr + rows // SCALE_ROWS * NUM_GROUPS + start // GROUP)[None, :]
    return acc + part * x_scale[:, None]


@triton.jit
def _in_order(x_ptr, row_starts, live, order_ptr, columns, K: tl.constexpr):
    """Returns what columns are multiplied with [columns, rows], and zeros for rows that are not `live`."""
    inside = columns < K
    at = tl.load(order_ptr + columns, mask=inside, other=0)
    return tl.load(x_ptr + row_starts[None, :] + at[:, None], mask=inside[:, None] & live[None, :], other=0.0)


@triton.jit
def gated(gates, ups, limit, alpha, CLAMPED: tl.constexpr):
    """silu(gate) * up, or gate * sigmoid(alpha * gate) * (up + 1) of clamped gates and ups"""
    if CLAMPED:
        gates = tl.minimum(gates, limit)
        ups = tl.minimum(tl.maximum(ups, -limit), limit)
        out = gates / (1.0 + tl.exp(-alpha * gates)) * (ups + 1.0)
    else:
        out = gates / (1.0 + tl.exp(-gates)) * ups
    return out


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_kernel(
    out_ptr,  # [num_tiles * TILE, SIZE]
    out_scale_ptr,  # [SIZE / BLOCK_N, num_tiles * TILE] fp32, with ROUNDED
    x_ptr,  # [num_tokens, K]
    x_scale_ptr,  # [K / BLOCK_K, num_tokens] fp32, with ROUNDED
    stored_ptr,  # [num_experts, 2 SIZE, K] as packed, gates first
    scale_ptr,  # [num_experts, 2 SIZE / SCALE_ROWS, NUM_GROUPS]
    zero_ptr,
    order_ptr,  # [num_experts, parts, K] int32
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
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    ZEROED: tl.constexpr,
    ZERO_PLUS: tl.constexpr,
    UNIT: tl.constexpr,
    STORED_STEP: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    ZERO_STEP: tl.constexpr,
    ORDER_STEP: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    DIVIDES: tl.constexpr,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ROUNDED: tl.constexpr,
    WHOLE: tl.constexpr,
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
        places = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        pairs = tl.load(pairs_ptr + places)
        # Empty places recompute the last token, because a load without a mask is faster.
        tokens = (tl.minimum(pairs, num_pairs - 1) // TOP_K).to(tl.int64)
        row_ptr = x_ptr + tokens[:, None] * K + ks[None, :]
        col_ptr = x_ptr + tokens[None, :] * K + ks[:, None]
        stored_ptr += expert * STORED_STEP
        scale_ptr += expert * SCALE_STEP
        zero_ptr += expert * ZERO_STEP
        order_ptr += expert * ORDER_STEP
        gates = tl.zeros([TILE, BLOCK_N] if ROUNDED else [BLOCK_N, TILE], tl.float32)
        ups = tl.zeros([TILE, BLOCK_N] if ROUNDED else [BLOCK_N, TILE], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if ROUNDED:
                if K % BLOCK_K == 0:
                    x = tl.load(row_ptr + start)
                else:
                    x = tl.load(row_ptr + start, mask=(start + ks < K)[None, :], other=0.0)
                x_scale = tl.load(x_scale_ptr + start // BLOCK_K * (num_pairs // TOP_K) + tokens)
                gates = _times_rounded(
                    gates, x, x_scale, stored_ptr, scale_ptr, first, start, n, K, NUM_GROUPS, GROUP, SCALE_ROWS, SCALED,
                    WHOLE, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                ups = _times_rounded(
                    ups, x, x_scale, stored_ptr, scale_ptr, SIZE + first, start, n, K, NUM_GROUPS, GROUP, SCALE_ROWS,
                    SCALED, WHOLE, BLOCK_N, BLOCK_K,
                )  # fmt: skip
            else:
                if ORDER_STEP > 0:
                    x = _in_order(x_ptr, tokens * K, tokens >= 0, order_ptr, start + ks, K)
                elif K % BLOCK_K == 0:
                    x = tl.load(col_ptr + start)
                else:
                    x = tl.load(col_ptr + start, mask=(start + ks < K)[:, None], other=0.0)
                gates = times(
                    gates, x, stored_ptr, scale_ptr, zero_ptr, first, start, n, K, NUMBERS, BITS,
                    NUM_GROUPS, GROUP, SCALE_ROWS, SCALED, ZEROED, ZERO_PLUS, UNIT, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                if ORDER_STEP > K:  # ups have an order of their own
                    x = _in_order(x_ptr, tokens * K, tokens >= 0, order_ptr + K, start + ks, K)
                ups = times(
                    ups, x, stored_ptr, scale_ptr, zero_ptr, SIZE + first, start, n, K, NUMBERS, BITS,
                    NUM_GROUPS, GROUP, SCALE_ROWS, SCALED, ZEROED, ZERO_PLUS, UNIT, BLOCK_N, BLOCK_K,
                )  # fmt: skip
        if ROUNDED:
            gates = tl.trans(gates)
            ups = tl.trans(ups)
        rows = first + tl.arange(0, BLOCK_N)
        row_scale_ptr += expert * n
        bias_ptr += expert * n
        gates = finished(gates, rows, row_scale_ptr, bias_ptr, n, ROW_SCALED, DIVIDES, BIASED)
        ups = finished(ups, SIZE + rows, row_scale_ptr, bias_ptr, n, ROW_SCALED, DIVIDES, BIASED)
        out = gated(gates, ups, limit, alpha, CLAMPED)
        live = pairs < num_pairs
        if ROUNDED:
            largest = tl.max(tl.where((rows < SIZE)[:, None], tl.abs(out), 0.0), 0)
            scale = tl.maximum(largest, 1e-12) / 448.0
            out = nearest(tl.clamp(out / scale[None, :], -448.0, 448.0))
            num_places = tl.num_programs(0) // num_n * TILE
            at = first // BLOCK_N * num_places.to(tl.int64) + places
            tl.store(out_scale_ptr + at, scale, mask=live)
        whole = (rows < SIZE)[:, None] & live[None, :]
        tl.store(out_ptr + places[None, :] * SIZE + rows[:, None], out.to(out_ptr.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["num_pairs"])
def down_kernel(
    out_ptr,  # [num_pairs, N]
    gated_ptr,  # [num_tiles * TILE, K]
    gated_scale_ptr,  # [K / BLOCK_K, num_tiles * TILE] fp32, with ROUNDED
    stored_ptr,  # [num_experts, N, K] as packed
    scale_ptr,  # [num_experts, N / SCALE_ROWS, NUM_GROUPS]
    zero_ptr,
    order_ptr,  # [num_experts, K] int32
    row_scale_ptr,  # [num_experts, N] fp32
    bias_ptr,  # [num_experts, N]
    share_ptr,  # [num_pairs] fp32
    pairs_ptr,  # [num_tiles * TILE] int32
    experts_ptr,  # [num_tiles] int32
    num_pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    ZEROED: tl.constexpr,
    ZERO_PLUS: tl.constexpr,
    UNIT: tl.constexpr,
    STORED_STEP: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    ZERO_STEP: tl.constexpr,
    ORDER_STEP: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    DIVIDES: tl.constexpr,
    BIASED: tl.constexpr,
    ROUNDED: tl.constexpr,
    WHOLE: tl.constexpr,
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
        places = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        pairs = tl.load(pairs_ptr + places)
        live = pairs < num_pairs
        row_ptr = gated_ptr + places[:, None] * K + ks[None, :]
        col_ptr = gated_ptr + places[None, :] * K + ks[:, None]
        stored_ptr += expert * STORED_STEP
        scale_ptr += expert * SCALE_STEP
        zero_ptr += expert * ZERO_STEP
        order_ptr += expert * ORDER_STEP
        acc = tl.zeros([TILE, BLOCK_N] if ROUNDED else [BLOCK_N, TILE], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if ROUNDED:
                x = tl.load(row_ptr + start, mask=live[:, None] & (start + ks < K)[None, :], other=0.0)
                num_places = tl.num_programs(0) // num_n * TILE
                scale_at = start // BLOCK_K * num_places.to(tl.int64) + places
                x_scale = tl.load(gated_scale_ptr + scale_at, mask=live, other=0.0)
                acc = _times_rounded(
                    acc, x, x_scale, stored_ptr, scale_ptr, first, start, N, K, NUM_GROUPS, GROUP, SCALE_ROWS, SCALED,
                    WHOLE, BLOCK_N, BLOCK_K,
                )  # fmt: skip
            else:
                if ORDER_STEP > 0:
                    x = _in_order(gated_ptr, places * K, live, order_ptr, start + ks, K)
                elif K % BLOCK_K == 0:
                    x = tl.load(col_ptr + start, mask=live[None, :], other=0.0)
                else:
                    x = tl.load(col_ptr + start, mask=live[None, :] & (start + ks < K)[:, None], other=0.0)
                acc = times(
                    acc, x, stored_ptr, scale_ptr, zero_ptr, first, start, N, K, NUMBERS, BITS, NUM_GROUPS,
                    GROUP, SCALE_ROWS, SCALED, ZEROED, ZERO_PLUS, UNIT, BLOCK_N, BLOCK_K,
                )  # fmt: skip
        if ROUNDED:
            acc = tl.trans(acc)
        rows = first + tl.arange(0, BLOCK_N)
        row_scale_ptr += expert * N
        bias_ptr += expert * N
        acc = finished(acc, rows, row_scale_ptr, bias_ptr, N, ROW_SCALED, DIVIDES, BIASED)
        acc *= tl.load(share_ptr + pairs, mask=live, other=0.0)[None, :]
        at = pairs.to(tl.int64)[None, :] * N + rows[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(rows < N)[:, None] & live[None, :])


@triton.jit
def sum_kernel(
    out_ptr,  # [num_tokens, hidden]
    pairs_ptr,  # [num_tokens, TOP_K, hidden]
    hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_t = sum_j pairs_tj"""
    # grid: (num_tokens, hidden / BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        at = (token * TOP_K + choice) * hidden + dims
        total += tl.load(pairs_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + dims, total.to(out_ptr.dtype.element_ty), mask=inside)
