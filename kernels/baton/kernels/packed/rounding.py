"""Activations in e4m3, for products on the matrix unit's floats of 8 bits: rounded, or in two parts.

Two parts hold what bf16 has: the first is x rounded, the second what is missing, 16 times as large. Their scales are
powers of 2, so that no digit of 8 is lost, unless a value is 2^13 times smaller than the largest of its unit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps


@triton.jit
def unit_scale(largest, PARTS: tl.constexpr):
    """Returns the scale of numbers up to `largest`: of two parts, a power of 2."""
    scale = tl.maximum(largest, 1e-12) / 448.0
    if PARTS > 1:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def nearest(x):
    """Returns fp32 rounded to 4 digits, the even one of two that are as near."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFFF + (bits >> 20 & 1) & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def store_parts(out_ptr, x, at, stride, mask, PARTS: tl.constexpr):
    """Stores x, of at most 448, at `at`, and its second part `stride` behind."""
    first = nearest(tl.clamp(x, -448.0, 448.0))
    tl.store(out_ptr + at, first.to(out_ptr.dtype.element_ty), mask=mask)
    if PARTS > 1:
        second = nearest(tl.clamp((x - first) * 16.0, -448.0, 448.0))
        tl.store(out_ptr + at + stride, second.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_scales(scale_ptr, scale, at, mask, PARTS: tl.constexpr):
    """Stores the scales of all parts, which are neighbours."""
    tl.store(scale_ptr + at, scale, mask=mask)
    if PARTS > 1:
        tl.store(scale_ptr + at + 1, scale / 16.0, mask=mask)


@triton.jit(do_not_specialize=["m"])
def _round_kernel(
    out_ptr,  # [m, PARTS, K] e4m3
    scale_ptr,  # [K / UNIT, m, PARTS] fp32
    x_ptr,  # [m, K]
    m,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_mk = x_mk / scale_m, scale_m = max_k |x_mk| / 448, for each unit of columns"""
    # grid: (m)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    units = tl.arange(0, UNITS)
    ks = units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    x = tl.load(x_ptr + token.to(tl.int64) * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    scale = unit_scale(tl.max(tl.abs(x), 1), PARTS)
    store_parts(out_ptr, x / scale[:, None], token.to(tl.int64) * (PARTS * K) + ks, K, ks < K, PARTS)
    store_scales(scale_ptr, scale, (units * m + token) * PARTS, units * UNIT < K, PARTS)


class Rounded(NamedTuple):
    """Activations in e4m3, of one part."""

    values: Tensor  # [m, k], m at least num_tokens: further rows are undefined
    scale: Tensor  # [k / group, m] fp32, by which values are multiplied
    num_tokens: int
    dtype: torch.dtype  # of what was rounded


def empty_rounded(like: Tensor, group: int = 0, row_unit: int = 1) -> Rounded:
    """Returns memory for `like` [num_tokens, k], rounded in groups of columns (0: all), in a multiple of row_unit
    rows."""
    num_tokens, k = like.shape
    m, units = triton.cdiv(num_tokens, row_unit) * row_unit, triton.cdiv(k, group) if group else 1
    values = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=like.device)
    return Rounded(values, torch.empty(units, m, dtype=torch.float32, device=like.device), num_tokens, like.dtype)


def rounded_rows(x: Tensor | Rounded, group: int = 0, row_unit: int = 1) -> Rounded:
    """Returns x [num_tokens, k] rounded in groups of columns, or as it is if it is already."""
    if isinstance(x, Rounded):
        return x
    return Rounded(*rounded(x, group, row_unit=row_unit), len(x), x.dtype)


def rounded(x: Tensor, group: int = 0, parts: int = 1, row_unit: int = 1) -> tuple[Tensor, Tensor]:
    """Returns x [m, k] in e4m3, [m * parts, k], and the scales [k / group, m * parts] by which it is multiplied.

    Group 0: all columns. A row's parts are neighbours; their sum is x. Rows up to the next multiple of `row_unit`
    follow, which are undefined.
    """
    num_tokens, k = x.shape
    m = triton.cdiv(num_tokens, row_unit) * row_unit
    units = triton.cdiv(k, group) if group else 1
    out = torch.empty(m * parts, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(units, m * parts, dtype=torch.float32, device=x.device)
    unit, overlap = group or triton.next_power_of_2(k), overlaps(x)
    _round_kernel[(num_tokens,)](
        out,
        scale,
        x,
        m,
        K=k,
        UNIT=unit,
        UNITS=triton.next_power_of_2(units),
        PARTS=parts,
        OVERLAP=overlap,
        num_warps=8,
        launch_pdl=overlap,
    )
    return out, scale
