"""Computes the experts of few tokens in two launches, which are bound by reading the experts' matrices.

Each pair of a token and an expert reads the expert's matrices itself, so no tiles are needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.routing import Gate


class Tiling(NamedTuple):
    """How one launch cuts a matrix product."""

    block_n: int  # rows of an expert's matrix per program
    block_k: int  # columns per step
    num_warps: int


@triton.jit
def _gate_up_kernel(
    out_ptr,  # [num_pairs, SIZE]
    x_ptr,  # [num_tokens, HIDDEN]
    weight_ptr,  # [num_experts, 2 SIZE, HIDDEN], gates first
    bias_ptr,  # [num_experts, 2 SIZE]
    ids_ptr,  # [num_pairs]
    norm_ptr,  # [HIDDEN]
    eps,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    NORM: tl.constexpr,
    CLAMPED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_p = gated(weight_e f(x_t) + bias_e) for pair p of token t and expert e; f is RMSNorm with NORM"""
    # grid: (SIZE / BLOCK_N, num_pairs)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # after the wait, because the next kernel reads ids before it waits
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    first_row = expert * 2 * SIZE + tl.minimum(rows, SIZE - 1)
    row_ptr = weight_ptr + first_row[:, None] * HIDDEN + ks[None, :]
    x_ptr += (pair // TOP_K).to(tl.int64) * HIDDEN
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_K):
        live = start + ks < HIDDEN
        gate = tl.load(row_ptr + start, mask=live[None, :], other=0.0)
        up = tl.load(row_ptr + SIZE * HIDDEN + start, mask=live[None, :], other=0.0)
        x = tl.load(x_ptr + start + ks, mask=live, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + start + ks, mask=live, other=0.0).to(tl.float32)
        gates += gate.to(tl.float32) * x[None, :]
        ups += up.to(tl.float32) * x[None, :]
    gate_sum = tl.sum(gates, 1)
    up_sum = tl.sum(ups, 1)
    if NORM:
        shrink = tl.rsqrt(tl.sum(squares, 0) / HIDDEN + eps)
        gate_sum *= shrink
        up_sum *= shrink
    if BIASED:
        gate_sum += tl.load(bias_ptr + first_row).to(tl.float32)
        up_sum += tl.load(bias_ptr + SIZE + first_row).to(tl.float32)
    if CLAMPED:
        gate_sum = tl.minimum(gate_sum, limit)
        up_sum = tl.minimum(tl.maximum(up_sum, -limit), limit)
        out = gate_sum / (1.0 + tl.exp(-alpha * gate_sum)) * (up_sum + 1.0)
    else:
        out = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
    tl.store(out_ptr + pair.to(tl.int64) * SIZE + rows, out.to(out_ptr.dtype.element_ty), mask=rows < SIZE)


@triton.jit
def _down_kernel(
    out_ptr,  # [num_tokens, HIDDEN]
    gated_ptr,  # [num_tokens, TOP_K, SIZE]
    weight_ptr,  # [num_experts, HIDDEN, SIZE]
    bias_ptr,  # [num_experts, HIDDEN]
    scale_ptr,  # [num_tokens, TOP_K] fp32
    ids_ptr,  # [num_tokens, TOP_K]
    residual_ptr,  # [num_tokens, HIDDEN]
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BIASED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_t = residual_t + sum_j scale_tj (weight_e gated_tj + bias_e) for choice j of token t, expert e"""
    # grid: (HIDDEN / BLOCK_N, num_tokens)
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    choices = tl.arange(0, TOP_K_PAD)
    chosen = choices < TOP_K
    pairs = token * TOP_K + choices
    # The preceding kernel starts this one after its own wait, when ids are written: weights are loaded without a wait.
    first_row = tl.load(ids_ptr + pairs, mask=chosen, other=0).to(tl.int64) * HIDDEN
    scale = tl.load(scale_ptr + pairs, mask=chosen, other=0.0)
    own_row = first_row[:, None] + tl.minimum(rows, HIDDEN - 1)[None, :]
    row_ptr = weight_ptr + own_row[:, :, None] * SIZE + ks[None, None, :]
    live = chosen[:, None] & (ks < SIZE)[None, :]
    weight = tl.load(row_ptr, mask=live[:, None, :], other=0.0)
    if OVERLAP:
        gdc_wait()
    out = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK_K):
        gated = tl.load(gated_ptr + pairs[:, None] * SIZE + start + ks[None, :], mask=live, other=0.0)
        gated = gated.to(tl.float32) * scale[:, None]
        out += tl.sum(tl.sum(weight.to(tl.float32) * gated[:, None, :], 2), 0)
        if start + BLOCK_K < SIZE:
            live = chosen[:, None] & (start + BLOCK_K + ks < SIZE)[None, :]
            weight = tl.load(row_ptr + start + BLOCK_K, mask=live[:, None, :], other=0.0)
    if BIASED:
        bias = tl.load(bias_ptr + own_row, mask=chosen[:, None], other=0.0).to(tl.float32)
        out += tl.sum(bias * scale[:, None], 0)
    at = token * HIDDEN + rows
    if RESIDUAL:
        out += tl.load(residual_ptr + at, mask=rows < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=rows < HIDDEN)


def run_few(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    tilings: tuple[Tiling, Tiling] | None = None,
) -> Tensor:
    """Returns the weighted sum of each token's experts, [num_tokens, hidden_size]. Takes the arguments of run_experts.

    With `norm` [hidden_size], applies RMSNorm to x first. With `residual` [num_tokens, hidden_size], which may be x,
    adds the sum to it in place and returns it.
    """
    num_tokens, top_k = ids.shape
    hidden, size = down.shape[1:]
    first, second = choose_tilings(hidden, size) if tilings is None else tilings
    gated = torch.empty(num_tokens * top_k, size, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x) if residual is None else residual
    overlap = overlaps(x)
    _gate_up_kernel[(triton.cdiv(size, first.block_n), num_tokens * top_k)](
        gated,
        x,
        gate_up,
        x if gate_up_bias is None else gate_up_bias,
        ids,
        x if norm is None else norm,
        eps,
        gate.limit,
        gate.alpha,
        TOP_K=top_k,
        SIZE=size,
        HIDDEN=hidden,
        NORM=norm is not None,
        CLAMPED=gate.limit > 0,
        BIASED=gate_up_bias is not None,
        BLOCK_N=first.block_n,
        BLOCK_K=first.block_k,
        OVERLAP=overlap,
        num_warps=first.num_warps,
        launch_pdl=overlap,
    )
    _down_kernel[(triton.cdiv(hidden, second.block_n), num_tokens)](
        out,
        gated,
        down,
        x if down_bias is None else down_bias,
        weights,
        ids,
        out,
        TOP_K=top_k,
        TOP_K_PAD=triton.next_power_of_2(top_k),
        SIZE=size,
        HIDDEN=hidden,
        BIASED=down_bias is not None,
        RESIDUAL=residual is not None,
        BLOCK_N=second.block_n,
        BLOCK_K=second.block_k,
        OVERLAP=overlap,
        num_warps=second.num_warps,
        launch_pdl=overlap,
    )
    return out


def choose_tilings(hidden: int, size: int) -> tuple[Tiling, Tiling]:
    """Returns the fastest tilings of both launches in a search on an H200."""
    return Tiling(2, _block_k(hidden, 2048, 1.1), 8), Tiling(8, _block_k(size, 512, 1.4), 8)


def _block_k(k: int, largest: int, waste: float) -> int:
    """Returns the largest step that covers k at once, or whose steps cover at most `waste` times k."""
    steps = [step for step in (2048, 1024, 512, 256, 128, 64, 32, 16) if step <= largest]
    return next((step for step in steps if step >= k > step // 2 or -(-k // step) * step <= waste * k), 16)
