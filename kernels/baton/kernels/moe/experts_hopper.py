"""Computes the experts of many tokens on Hopper: arranges tokens in tiles, then gate and up, down, and sums."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.moe.align import Alignment, align
from baton.kernels.moe.grouped_hopper import grouped_kernel
from baton.kernels.routing import Gate

TILE = 128
_STAGES = 3
_WIDE = 1024  # columns that a program copies or sums


@triton.jit
def _arrange_kernel(
    out_ptr,  # [num_tiles * TILE, hidden]
    x_ptr,  # [num_tokens, hidden]
    places_ptr,  # [num_pairs] int32
    hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out_s = x_t for each place s of token t"""
    # grid: (num_tokens, hidden / BLOCK)
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < hidden
    x = tl.load(x_ptr + token * hidden + dims, mask=inside, other=0.0)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + choice).to(tl.int64)
        tl.store(out_ptr + place * hidden + dims, x, mask=inside)


@triton.jit
def _gather_kernel(
    out_ptr,  # [num_tokens, hidden]
    downs_ptr,  # [num_tiles * TILE, hidden]
    places_ptr,  # [num_pairs] int32
    scale_ptr,  # [num_pairs] fp32
    hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out_t = sum_j scale_tj downs_s for place s of choice j"""
    # grid: (num_tokens, hidden / BLOCK)
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
    aligned = align(ids, num_experts, TILE)
    arranged = torch.empty(len(aligned.pairs), hidden, dtype=x.dtype, device=x.device)
    grid = (num_tokens, triton.cdiv(hidden, _WIDE))
    _arrange_kernel[grid](arranged, x, aligned.places, hidden, TOP_K=top_k, BLOCK=_WIDE, num_warps=4)
    gated = torch.empty(len(aligned.pairs), size, dtype=x.dtype, device=x.device)
    multiply(gated, arranged, gate_up, gate_up_bias, aligned, ids.numel(), gate)
    downs = torch.empty_like(arranged)
    multiply(downs, gated, down, down_bias, aligned, ids.numel(), None)
    out = torch.empty_like(x)
    _gather_kernel[grid](out, downs, aligned.places, weights, hidden, TOP_K=top_k, BLOCK=_WIDE, num_warps=4)
    return out


def multiply(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    aligned: Alignment,
    num_pairs: int,
    gate: Gate | None,
    num_stages: int = _STAGES,
) -> None:
    """Multiplies each place of x [num_places, k] by its expert's matrix in `weight` [num_experts, rows, k] into `out`.

    With `gate`, the result is gated. `out` [num_places, width] is undefined at places without a pair.
    """
    (_, rows, k), width = weight.shape, out.shape[1]
    num_n = triton.cdiv(width, 128 if gate is not None else 256)
    num_work = len(aligned.experts) * num_n
    grid = (min(num_work, _num_multiprocessors(x.device)),)
    grouped_kernel[grid](
        _descriptor(out, 64),
        _descriptor(x, 64),
        _descriptor(weight.view(-1, k), 128),
        out if bias is None else bias,
        aligned.pairs,
        aligned.experts,
        aligned.spans,
        num_pairs,
        num_work,
        0.0 if gate is None else gate.limit,
        0.0 if gate is None else gate.alpha,
        K=k,
        ROWS=rows,
        WIDTH=width,
        NUM_N=num_n,
        GATED=gate is not None,
        CLAMPED=gate is not None and gate.limit > 0,
        BIASED=bias is not None,
        STAGES=num_stages,
        num_warps=4,
    )


def _descriptor(tensor: Tensor, num_rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [num_rows, 64], layout)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
