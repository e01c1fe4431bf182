"""Computes experts in e4m3 of many tokens on Hopper: rounds and arranges tokens, then gate and up, down, and sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.moe.align import Alignment, align
from baton.kernels.moe.experts import run_rounded_experts
from baton.kernels.moe.experts_hopper import _sum_kernel
from baton.kernels.moe.grouped_hopper_fp8 import grouped_fp8_kernel
from baton.kernels.multiprocessors import num_multiprocessors
from baton.kernels.packed.launch import row_constants, row_pointers
from baton.kernels.packed.rounding import store_parts, unit_scale
from baton.kernels.packed.weight import ROUND_UNIT, PackedWeight
from baton.kernels.routing import Gate

_TILE = 128
_STAGES = 4
_WIDE = 1024  # columns that a program sums
_TMA_UNIT = 16  # bytes


@triton.jit(do_not_specialize=["num_places"])
def _round_kernel(
    out_ptr,  # [num_tiles * TILE, K] e4m3
    scale_ptr,  # [K / UNIT, num_tiles * TILE] fp32
    x_ptr,  # [num_tokens, K]
    places_ptr,  # [num_tokens, TOP_K] int32
    num_places,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """out_sk = x_tk / scale_s, scale_s = max_k |x_tk| / 448, for each place s of token t and each unit of columns"""
    # grid: (num_tokens)
    token = tl.program_id(0).to(tl.int64)
    units = tl.arange(0, UNITS)
    ks = units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    x = tl.load(x_ptr + token * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    scale = unit_scale(tl.max(tl.abs(x), 1), 1)
    x /= scale[:, None]
    for choice in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + choice).to(tl.int64)
        store_parts(out_ptr, x, place * K + ks, 0, ks < K, 1)
        tl.store(scale_ptr + units * num_places + place, scale, mask=units * UNIT < K)


def run_rounded_experts_hopper(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: PackedWeight, down: PackedWeight, gate: Gate
) -> Tensor:
    """As `run_rounded_experts`, for shapes of which tiles of 128 rows have one scale."""
    size, hidden = gate_up.num_rows // 2, down.num_rows
    if not (_suits(gate_up, hidden, size) and _suits(down, size, hidden)):
        return run_rounded_experts(x, weights, ids, gate_up, down, gate)
    top_k = ids.shape[1]
    aligned = align(ids, down.num_experts, _TILE)
    num_places, units = len(aligned.pairs), triton.cdiv(hidden, ROUND_UNIT)
    arranged = torch.empty(num_places, hidden, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(units, num_places, dtype=torch.float32, device=x.device)
    _round_kernel[(len(x),)](
        arranged,
        scale,
        x,
        aligned.places,
        num_places,
        K=hidden,
        UNIT=ROUND_UNIT,
        UNITS=triton.next_power_of_2(units),
        TOP_K=top_k,
        num_warps=8,
    )
    gated = torch.empty(num_places, size, dtype=torch.float8_e4m3fn, device=x.device)
    gated_scale = torch.empty(triton.cdiv(size, ROUND_UNIT), num_places, dtype=torch.float32, device=x.device)
    _multiply(gated, gated_scale, arranged, scale, gate_up, aligned, ids.numel(), gate)
    downs = torch.empty(num_places, hidden, dtype=x.dtype, device=x.device)
    _multiply(downs, gated_scale, gated, gated_scale, down, aligned, ids.numel(), None)
    out = torch.empty_like(x)
    grid = (len(x), triton.cdiv(hidden, _WIDE))
    _sum_kernel[grid](out, downs, aligned.places, weights, hidden, TOP_K=top_k, BLOCK=_WIDE, OVERLAP=False, num_warps=4)
    return out


def _suits(weight: PackedWeight, k: int, part_rows: int) -> bool:
    """Returns whether the kernel reads the weight: TMA its rows, and a block of 128 of them has one scale."""
    whole = weight.scale is None or (weight.scale_rows, weight.group, part_rows % ROUND_UNIT) == (
        ROUND_UNIT,
        ROUND_UNIT,
        0,
    )
    return whole and k % _TMA_UNIT == 0 and part_rows % _TMA_UNIT == 0


def _multiply(
    out: Tensor,
    out_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: PackedWeight,
    aligned: Alignment,
    num_pairs: int,
    gate: Gate | None,
) -> None:
    """Multiplies each place of x [num_places, k] by its expert's matrix into `out`, and gates it with `gate`."""
    (num_places, k), width, rows = x.shape, out.shape[1], weight.num_rows
    num_n = triton.cdiv(width, 128 if gate is not None else 256)
    num_work = len(aligned.experts) * num_n
    stacked = torch.as_strided(weight.stored, (weight.num_experts * rows, k), (k, 1))
    grid = (min(num_work, num_multiprocessors(x.device)),)
    grouped_fp8_kernel[grid](
        _descriptor(out, 64),
        out_scale,
        _descriptor(x, 64),
        x_scale,
        _descriptor(stacked, 128),
        x_scale if weight.scale is None else weight.scale,
        *row_pointers(weight, x_scale),
        aligned.pairs,
        aligned.experts,
        aligned.spans,
        num_pairs,
        num_places,
        num_work,
        0.0 if gate is None else gate.limit,
        0.0 if gate is None else gate.alpha,
        K=k,
        ROWS=rows,
        WIDTH=width,
        NUM_N=num_n,
        GATED=gate is not None,
        CLAMPED=gate is not None and gate.limit > 0,
        SCALED=weight.scale is not None,
        **row_constants(weight),
        STAGES=_STAGES,
        num_warps=4,
    )


def _descriptor(tensor: Tensor, num_rows: int) -> TensorDescriptor:
    """Returns a descriptor of boxes of so many rows of 128 bytes."""
    layout = gl.NVMMASharedLayout(128, 8 * tensor.element_size(), rank=2)
    box = [num_rows, 128 // tensor.element_size()]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)
