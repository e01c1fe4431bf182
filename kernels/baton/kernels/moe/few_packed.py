"""Computes packed experts of few tokens in two launches, which are bound by reading the experts' matrices.

As in `few`, each pair of a token and an expert reads the expert's matrices itself.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.moe.grouped import gated
from baton.kernels.moe.tiling import Tiling, choose_few_tiling
from baton.kernels.overlap import overlaps
from baton.kernels.packed.four_bits import PARTS, FourBitTiling, multiply_four_bits, reads_four_bits
from baton.kernels.packed.launch import (
    LANE_COLUMNS,
    constants,
    expert_steps,
    pointers,
    row_constants,
    row_pointers,
)
from baton.kernels.packed.unpack import finished, load_stored, places_of, sums_of
from baton.kernels.packed.weight import PackedWeight
from baton.kernels.routing import Gate

# The fastest in a search on an H200.
_FOUR_BIT_GATE_UP, _FOUR_BIT_DOWN = FourBitTiling(4, 2, 1), FourBitTiling(4, 1, 12, shared=True)

_BYTE = 8  # bits
_DOWN_DEPTH = 4  # pieces of columns that are loaded ahead


@triton.jit
def _gate_up_kernel(
    out_ptr,  # [num_pairs, SIZE]
    x_ptr,  # [num_tokens, K]
    stored_ptr,  # [num_experts, 2 SIZE, K] as packed, gates first
    scale_ptr,  # [num_experts, 2 SIZE / SCALE_ROWS, NUM_GROUPS]
    zero_ptr,
    order_ptr,  # [num_experts, parts, K] int32
    row_scale_ptr,  # [num_experts, 2 SIZE] fp32
    bias_ptr,  # [num_experts, 2 SIZE]
    ids_ptr,  # [num_pairs]
    norm_ptr,  # [K]
    eps,
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
    NORM: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_p = gated(weight_e f(x_t) + bias_e) for pair p of token t and expert e; f is RMSNorm with NORM"""
    # grid: (SIZE / BLOCK_N, num_pairs)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # after the wait, because the next kernel reads ids before it waits
    n: tl.constexpr = 2 * SIZE
    units: tl.constexpr = BLOCK_K // UNIT
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    ks = tl.arange(0, units)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    x_ptr += pair // TOP_K * K
    stored_ptr += expert * STORED_STEP
    scale_ptr += expert * SCALE_STEP
    zero_ptr += expert * ZERO_STEP
    order_ptr += expert * ORDER_STEP
    gates = tl.zeros([BLOCK_N, units], tl.float32)
    ups = tl.zeros([BLOCK_N, units], tl.float32)
    squares = tl.zeros([units, UNIT], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        gate = load_stored(stored_ptr, first, start, n, K, NUMBERS, BITS, BLOCK_N, BLOCK_K)
        up = load_stored(stored_ptr, SIZE + first, start, n, K, NUMBERS, BITS, BLOCK_N, BLOCK_K)
        at = places_of(order_ptr, start + ks, K, ORDER_STEP > 0)
        x = tl.load(x_ptr + at, mask=start + ks < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + at, mask=start + ks < K, other=0.0).to(tl.float32)
        gates += sums_of(
            gate, x, scale_ptr, zero_ptr, first, start, n, K, NUMBERS, BITS, NUM_GROUPS, GROUP, SCALE_ROWS,
            SCALED, ZEROED, ZERO_PLUS, UNIT, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if ORDER_STEP > K:  # ups have an order of their own
            at = places_of(order_ptr + K, start + ks, K, True)
            x = tl.load(x_ptr + at, mask=start + ks < K, other=0.0).to(tl.float32)
            if NORM:
                x *= tl.load(norm_ptr + at, mask=start + ks < K, other=0.0).to(tl.float32)
        ups += sums_of(
            up, x, scale_ptr, zero_ptr, SIZE + first, start, n, K, NUMBERS, BITS, NUM_GROUPS, GROUP,
            SCALE_ROWS, SCALED, ZEROED, ZERO_PLUS, UNIT, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    shrink = 1.0
    if NORM:
        shrink = tl.rsqrt(tl.sum(squares) / K + eps)
    rows = first + tl.arange(0, BLOCK_N)
    row_scale_ptr += expert * n
    bias_ptr += expert * n
    gate_sum = tl.sum(gates, 1)[:, None] * shrink
    up_sum = tl.sum(ups, 1)[:, None] * shrink
    gate_sum = finished(gate_sum, rows, row_scale_ptr, bias_ptr, n, ROW_SCALED, DIVIDES, BIASED)
    up_sum = finished(up_sum, SIZE + rows, row_scale_ptr, bias_ptr, n, ROW_SCALED, DIVIDES, BIASED)
    out = gated(gate_sum, up_sum, limit, alpha, CLAMPED).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair * SIZE + rows[:, None], out, mask=(rows < SIZE)[:, None])


@triton.jit
def _load_piece(
    stored_ptr,
    ids_ptr,  # [TOP_K]
    first,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
    STORED_STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns what is stored of rows from `first` on, for one of the PIECES of one choice's columns."""
    expert = tl.load(ids_ptr + PIECE // PIECES).to(tl.int64)
    start: tl.constexpr = PIECE % PIECES * BLOCK_K
    return load_stored(stored_ptr + expert * STORED_STEP, first, start, N, K, NUMBERS, BITS, BLOCK_N, BLOCK_K)


@triton.jit
def _down_kernel(
    out_ptr,  # [num_tokens, N]
    gated_ptr,  # [num_tokens, TOP_K, K]
    stored_ptr,  # [num_experts, N, K] as packed
    scale_ptr,  # [num_experts, N / SCALE_ROWS, NUM_GROUPS]
    zero_ptr,
    order_ptr,  # [num_experts, K] int32
    row_scale_ptr,  # [num_experts, N] fp32
    bias_ptr,  # [num_experts, N]
    share_ptr,  # [num_tokens, TOP_K] fp32
    ids_ptr,  # [num_tokens, TOP_K]
    residual_ptr,  # [num_tokens, N]
    TOP_K: tl.constexpr,
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
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,  # pieces of columns that are loaded ahead
    OVERLAP: tl.constexpr,
):
    """out_t = residual_t + sum_j share_tj (weight_e gated_tj + bias_e) for choice j of token t, expert e"""
    # grid: (N / BLOCK_N, num_tokens)
    if OVERLAP:
        gdc_launch_dependents()
    units: tl.constexpr = BLOCK_K // UNIT
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, units)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    # The preceding kernel starts this one after its own wait, when ids are written: weights are loaded without a wait.
    own_ptr = ids_ptr + token * TOP_K
    pieces: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    ahead = ()
    for piece in tl.static_range(DEPTH):
        if piece < TOP_K * pieces:
            ahead = ahead + (  # type: ignore[assignment]  # noqa: RUF005 - kernels cannot unpack tuples
                _load_piece(
                    stored_ptr, own_ptr, first, piece, pieces, N, K, NUMBERS, BITS, STORED_STEP, BLOCK_N, BLOCK_K
                ),
            )
    if OVERLAP:
        gdc_wait()
    out = tl.zeros([BLOCK_N, 1], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        acc = tl.zeros([BLOCK_N, units], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            stored = ahead[0]  # type: ignore[misc]
            ahead = ahead[1:]
            if choice * pieces + start // BLOCK_K + DEPTH < TOP_K * pieces:
                ahead = ahead + (  # type: ignore[assignment]  # noqa: RUF005
                    _load_piece(
                        stored_ptr, own_ptr, first, choice * pieces + start // BLOCK_K + DEPTH, pieces, N, K, NUMBERS,
                        BITS, STORED_STEP, BLOCK_N, BLOCK_K,
                    ),
                )  # fmt: skip
            at = places_of(order_ptr + expert * ORDER_STEP, start + ks, K, ORDER_STEP > 0)
            x = tl.load(gated_ptr + pair * K + at, mask=start + ks < K, other=0.0).to(tl.float32)
            acc += sums_of(
                stored, x, scale_ptr + expert * SCALE_STEP, zero_ptr + expert * ZERO_STEP, first,
                start, N, K, NUMBERS, BITS, NUM_GROUPS, GROUP, SCALE_ROWS, SCALED, ZEROED, ZERO_PLUS, UNIT,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
        sums = finished(
            tl.sum(acc, 1)[:, None], rows, row_scale_ptr + expert * N, bias_ptr + expert * N, N, ROW_SCALED, DIVIDES,
            BIASED,
        )  # fmt: skip
        out += tl.load(share_ptr + pair) * sums
    if RESIDUAL:
        out += tl.load(residual_ptr + token * N + rows[:, None], mask=(rows < N)[:, None], other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + rows[:, None], out.to(out_ptr.dtype.element_ty), mask=(rows < N)[:, None])


def run_few_packed(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    gate: Gate,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """Returns the weighted sum of each token's experts, [num_tokens, hidden_size], as `run_experts`.

    With `norm` [hidden_size], applies RMSNorm to x first. With `residual` [num_tokens, hidden_size], which may be x,
    adds the sum to it in place and returns it.
    """
    num_tokens, top_k = ids.shape
    hidden, size = down.num_rows, gate_up.num_rows // 2
    gated_ups = torch.empty(num_tokens * top_k, size, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x) if residual is None else residual
    if reads_four_bits(gate_up, x, hidden):
        multiply_four_bits(gated_ups, x, gate_up, _FOUR_BIT_GATE_UP, norm=norm, eps=eps, gate=gate, ids=ids)
    else:
        _multiply_gate_up(gated_ups, x, ids, gate_up, gate, norm, eps)
    if reads_four_bits(down, x, size) and PARTS % top_k == 0:
        multiply_four_bits(out, gated_ups, down, _FOUR_BIT_DOWN, residual=residual, ids=ids, shares=weights)
    else:
        _multiply_down(out, gated_ups, weights, ids, down, has_residual=residual is not None)
    return out


def _multiply_gate_up(
    out: Tensor, x: Tensor, ids: Tensor, gate_up: PackedWeight, gate: Gate, norm: Tensor | None, eps: float
) -> None:
    """Fills out [num_tokens * top_k, size]."""
    (num_tokens, top_k), (_, size) = ids.shape, out.shape
    tiling, overlap = choose_few_tiling(gate_up, x.shape[1], 2), overlaps(x)
    _gate_up_kernel[(triton.cdiv(size, tiling.block_n), num_tokens * top_k)](
        out,
        x,
        *pointers(gate_up, x),
        ids if gate_up.order is None else gate_up.order,
        *row_pointers(gate_up, x),
        ids,
        x if norm is None else norm,
        eps,
        gate.limit,
        gate.alpha,
        TOP_K=top_k,
        SIZE=size,
        NORM=norm is not None,
        CLAMPED=gate.limit > 0,
        **_constants(gate_up, x.shape[1], tiling),
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )


def _multiply_down(
    out: Tensor, gated_ups: Tensor, weights: Tensor, ids: Tensor, down: PackedWeight, *, has_residual: bool
) -> None:
    """Fills out [num_tokens, hidden_size], or adds to it."""
    (num_tokens, top_k), (_, hidden), size = ids.shape, out.shape, gated_ups.shape[1]
    tiling, overlap = choose_few_tiling(down, size, 4), overlaps(out)
    _down_kernel[(triton.cdiv(hidden, tiling.block_n), num_tokens)](
        out,
        gated_ups,
        *pointers(down, out),
        ids if down.order is None else down.order,
        *row_pointers(down, out),
        weights,
        ids,
        out,
        TOP_K=top_k,
        N=hidden,
        RESIDUAL=has_residual,
        **_constants(down, size, tiling),
        DEPTH=_DOWN_DEPTH if down.bits == _BYTE else 1,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )


def _constants(weight: PackedWeight, k: int, tiling: Tiling) -> dict[str, Any]:
    return {
        **constants(weight, k, tiling.block_k, LANE_COLUMNS[weight.numbers]),
        **expert_steps(weight),
        **row_constants(weight),
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
    }
