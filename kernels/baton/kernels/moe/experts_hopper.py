"""Computes the experts of many tokens on Hopper: sorts pairs into tiles, then gate and up, down, and sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.moe.align import Alignment, align
from baton.kernels.moe.grouped_hopper import grouped_kernel
from baton.kernels.multiprocessors import num_multiprocessors
from baton.kernels.overlap import overlaps
from baton.kernels.routing import Gate

TILE = 192
_STAGES = 3
_WIDE = 1024  # columns that a program sums
_MOST_GATHERED = 1 << 31  # elements of x, which the kernel counts in 32 bits


@triton.jit
def _sum_kernel(
    out_ptr,  # [num_tokens, hidden]
    downs_ptr,  # [num_tiles * TILE, hidden]
    places_ptr,  # [num_pairs] int32
    scale_ptr,  # [num_pairs] fp32
    hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_t = sum_j scale_tj downs_s for place s of choice j"""
    # grid: (num_tokens, hidden / BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + choice).to(tl.int64)
        scale = tl.load(scale_ptr + token * TOP_K + choice)
        total += scale * tl.load(downs_ptr + place * hidden + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + dims, total.to(out_ptr.dtype.element_ty), mask=inside)


def run_experts_hopper(
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

    Takes the arguments of run_experts, in bf16 or fp16, with widths that are multiples of 8.
    """
    (num_tokens, top_k), (num_experts, hidden, size) = ids.shape, down.shape
    aligned, overlap = align(ids, num_experts, TILE), overlaps(x)
    given, pairs_each = x, top_k
    if x.numel() >= _MOST_GATHERED:
        given, pairs_each = x[(aligned.pairs.clamp(0, ids.numel() - 1) // top_k).long()], 0
    gated = torch.empty(len(aligned.pairs), size, dtype=x.dtype, device=x.device)
    multiply(gated, given, gate_up, gate_up_bias, aligned, ids.numel(), gate, pairs_each)
    downs = torch.empty(len(aligned.pairs), hidden, dtype=x.dtype, device=x.device)
    multiply(downs, gated, down, down_bias, aligned, ids.numel(), None)
    out = torch.empty_like(x)
    _sum_kernel[(num_tokens, triton.cdiv(hidden, _WIDE))](
        out,
        downs,
        aligned.places,
        weights,
        hidden,
        TOP_K=top_k,
        BLOCK=_WIDE,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out


def multiply(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    aligned: Alignment,
    num_pairs: int,
    gate: Gate | None,
    top_k: int = 0,
) -> None:
    """Multiplies rows of x by the matrices of their experts in `weight` [num_experts, rows, k] into `out`.

    x [num_tokens, k] has the rows of tokens with `top_k` pairs each, or [num_places, k] those of places. With `gate`,
    the result is gated. `out` [num_places, width] is undefined at places without a pair.
    """
    (_, rows, k), width = weight.shape, out.shape[1]
    num_n = triton.cdiv(width, 128 if gate is not None else 256)
    num_work = len(aligned.experts) * num_n
    grid = (min(num_work, num_multiprocessors(x.device)),)
    grouped_kernel[grid](
        _descriptor(out, 64),
        _descriptor(x, 64),
        x,
        _descriptor(weight.view(-1, k), 128),
        out if bias is None else bias,
        aligned.pairs,
        aligned.experts,
        aligned.spans,
        num_pairs,
        num_work,
        0.0 if gate is None else gate.limit,
        0.0 if gate is None else gate.alpha,
        TOP_K=top_k,
        K=k,
        ROWS=rows,
        WIDTH=width,
        NUM_N=num_n,
        GATED=gate is not None,
        CLAMPED=gate is not None and gate.limit > 0,
        BIASED=bias is not None,
        STAGES=_STAGES,
        num_warps=4,
        launch_pdl=overlaps(x),
    )


def _descriptor(tensor: Tensor, num_rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [num_rows, 64], layout)
