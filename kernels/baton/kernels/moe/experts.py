"""Computes the experts of all tokens in three launches: gate and up, weighted down, and the sum of a token's experts.

Each output is one chain of multiply-adds over k in one fp32 accumulator, with the expert's matrix as the left operand,
and a token's experts are summed in the order of its choice. A token's result therefore does not depend on other tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.moe.align import Alignment, align
from baton.kernels.overlap import overlaps
from baton.kernels.routing import Gate
from baton.kernels.shared_memory import shared_memory

_SLACK = 2048  # bytes of shared memory that the stages leave free


class Tiling(NamedTuple):
    """How one launch cuts a matrix product."""

    block_n: int  # rows of an expert's matrix per program
    block_k: int  # columns per step
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    out_ptr,  # [num_tiles * TILE, SIZE]
    x_ptr,  # [num_tokens, HIDDEN]
    weight_ptr,  # [num_experts, 2 SIZE, HIDDEN], gates first
    bias_ptr,  # [num_experts, 2 SIZE]
    pairs_ptr,  # [num_tiles * TILE] int32
    experts_ptr,  # [num_tiles] int32
    num_pairs,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    CLAMPED: tl.constexpr,
    BIASED: tl.constexpr,
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
    tile = tl.program_id(0) // num_n
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        rows = tl.program_id(0) % num_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = rows < SIZE
        ks = tl.arange(0, BLOCK_K)
        places = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        pairs = tl.load(pairs_ptr + places)
        # Empty places recompute the last token, because a load without a mask is faster.
        tokens = (tl.minimum(pairs, num_pairs - 1) // TOP_K).to(tl.int64)
        first_row = expert * 2 * SIZE + tl.minimum(rows, SIZE - 1)
        row_ptr = weight_ptr + first_row[:, None] * HIDDEN + ks[None, :]
        col_ptr = x_ptr + tokens[None, :] * HIDDEN + ks[:, None]
        gates = tl.zeros([BLOCK_N, TILE], tl.float32)
        ups = tl.zeros([BLOCK_N, TILE], tl.float32)
        for start in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
            x = tl.load(col_ptr + start)
            gates = tl.dot(tl.load(row_ptr + start), x, gates, input_precision="ieee")
            ups = tl.dot(tl.load(row_ptr + SIZE * HIDDEN + start), x, ups, input_precision="ieee")
        if BIASED:
            gates += tl.load(bias_ptr + first_row).to(tl.float32)[:, None]
            ups += tl.load(bias_ptr + SIZE + first_row).to(tl.float32)[:, None]
        if CLAMPED:
            gates = tl.minimum(gates, limit)
            ups = tl.minimum(tl.maximum(ups, -limit), limit)
            out = gates / (1.0 + tl.exp(-alpha * gates)) * (ups + 1.0)
        else:
            out = gates / (1.0 + tl.exp(-gates)) * ups
        whole = inside[:, None] & (pairs < num_pairs)[None, :]
        tl.store(out_ptr + places[None, :] * SIZE + rows[:, None], out.to(out_ptr.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    out_ptr,  # [num_pairs, HIDDEN]
    gated_ptr,  # [num_tiles * TILE, SIZE]
    weight_ptr,  # [num_experts, HIDDEN, SIZE]
    bias_ptr,  # [num_experts, HIDDEN]
    scale_ptr,  # [num_pairs] fp32
    pairs_ptr,  # [num_tiles * TILE] int32
    experts_ptr,  # [num_tiles] int32
    num_pairs,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BIASED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_p = scale_p (weight_e gated_s + bias_e) for pair p at place s in a tile of expert e"""
    # grid: (num_tiles * HIDDEN / BLOCK_N)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    num_n: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // num_n
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        rows = tl.program_id(0) % num_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = rows < HIDDEN
        ks = tl.arange(0, BLOCK_K)
        places = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        pairs = tl.load(pairs_ptr + places)
        live = pairs < num_pairs
        first_row = expert * HIDDEN + tl.minimum(rows, HIDDEN - 1)
        row_ptr = weight_ptr + first_row[:, None] * SIZE + ks[None, :]
        col_ptr = gated_ptr + places[None, :] * SIZE + ks[:, None]
        acc = tl.zeros([BLOCK_N, TILE], tl.float32)
        for start in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
            gated = tl.load(col_ptr + start, mask=live[None, :], other=0.0)
            acc = tl.dot(tl.load(row_ptr + start), gated, acc, input_precision="ieee")
        if BIASED:
            acc += tl.load(bias_ptr + first_row).to(tl.float32)[:, None]
        acc *= tl.load(scale_ptr + pairs, mask=live, other=0.0)[None, :]
        at = pairs.to(tl.int64)[None, :] * HIDDEN + rows[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & live[None, :])


@triton.jit
def _sum_kernel(
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


def run_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Returns the weighted sum of each token's experts, [num_tokens, hidden_size].

    x [num_tokens, hidden_size], weights and ids [num_tokens, top_k], gate_up [num_experts, 2 size, hidden_size] with
    gates first, down [num_experts, hidden_size, size]; biases [num_experts, 2 size] and [num_experts, hidden_size].
    """
    aligned = align(ids, len(down), choose_tile(ids.numel(), len(down), x.element_size()))
    gated = gate_and_up(x, aligned, ids.shape[1], gate_up, gate, gate_up_bias)
    return down_and_sum(gated, aligned, weights, down, down_bias)


def gate_and_up(
    x: Tensor, aligned: Alignment, top_k: int, weight: Tensor, gate: Gate, bias: Tensor | None = None
) -> Tensor:
    """Returns the gated up projection of each place, [num_tiles * tile, size]; undefined at places without a pair."""
    size, hidden = weight.shape[1] // 2, weight.shape[2]
    out = torch.empty(len(aligned.pairs), size, dtype=x.dtype, device=x.device)
    tiling = choose_tiling(hidden, x.element_size(), aligned.tile, 2, shared_memory(x.device))
    overlap = overlaps(x)
    _gate_up_kernel[(len(aligned.experts) * triton.cdiv(size, tiling.block_n),)](
        out,
        x,
        weight,
        x if bias is None else bias,
        aligned.pairs,
        aligned.experts,
        len(x) * top_k,
        gate.limit,
        gate.alpha,
        TOP_K=top_k,
        SIZE=size,
        HIDDEN=hidden,
        CLAMPED=gate.limit > 0,
        BIASED=bias is not None,
        TILE=aligned.tile,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        STAGES=tiling.num_stages,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    return out


def down_and_sum(
    gated: Tensor, aligned: Alignment, weights: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Returns each token's down projections summed with `weights` [num_tokens, top_k]: [num_tokens, hidden_size]."""
    hidden, size = weight.shape[1:]
    num_tokens, top_k = weights.shape
    pairs = torch.empty(num_tokens * top_k, hidden, dtype=gated.dtype, device=gated.device)
    tiling = choose_tiling(size, gated.element_size(), aligned.tile, 1, shared_memory(gated.device))
    overlap = overlaps(gated)
    _down_kernel[(len(aligned.experts) * triton.cdiv(hidden, tiling.block_n),)](
        pairs,
        gated,
        weight,
        gated if bias is None else bias,
        weights,
        aligned.pairs,
        aligned.experts,
        len(pairs),
        SIZE=size,
        HIDDEN=hidden,
        BIASED=bias is not None,
        TILE=aligned.tile,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        STAGES=tiling.num_stages,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    out = torch.empty(num_tokens, hidden, dtype=gated.dtype, device=gated.device)
    _sum_kernel[(num_tokens, triton.cdiv(hidden, 1024))](
        out, pairs, hidden, TOP_K=top_k, BLOCK=1024, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    return out


def choose_tile(num_pairs: int, num_experts: int, itemsize: int = 2) -> int:
    """Returns the number of pairs per tile: slightly more than an expert has if all have equally many."""
    largest = 128 if itemsize < 4 else 64
    return min(largest, max(16, int(triton.next_power_of_2(triton.cdiv(5 * num_pairs, 4 * num_experts)))))


def choose_tiling(k: int, itemsize: int, tile: int, matrices: int = 1, shared_bytes: int = 227 * 1024) -> Tiling:
    """Returns the fastest tiling in a search on an H100, for products that read this many `matrices` at once.

    The step over k does not depend on the tile, so that sums keep their order. Small shared memory reduces the stages.
    """
    block_k, stages = (64, 4) if itemsize < 4 else (32, 2)
    block_n, num_warps = 64, 4  # rows: the fewest that Hopper's matrix unit supports
    if tile >= 64 and itemsize < 4:
        block_n, num_warps, stages = (128, 8, 4) if matrices == 2 else (128, 4, 3)
    while k % block_k:
        block_k //= 2
    step_bytes = (matrices * block_n + tile) * block_k * itemsize
    while stages > 2 and stages * step_bytes > shared_bytes - _SLACK:
        stages -= 1
    return Tiling(block_n, block_k, num_warps, stages)
