"""Activations that are rounded to e4m3, for products on the matrix unit's floats of 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["m"])
def _round_kernel(
    out_ptr,  # [m, K] e4m3
    scale_ptr,  # [K / UNIT, m] fp32
    x_ptr,  # [m, K]
    m,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
):
    """out_mk = x_mk / scale_m, scale_m = max_k |x_mk| / 448, for each unit of columns"""
    # grid: (m)
    token = tl.program_id(0)
    units = tl.arange(0, UNITS)
    ks = units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    at = token.to(tl.int64) * K + ks
    x = tl.load(x_ptr + at, mask=ks < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-12) / 448.0
    rounded = tl.clamp(x / scale[:, None], -448.0, 448.0)
    tl.store(out_ptr + at, rounded.to(out_ptr.dtype.element_ty), mask=ks < K)
    tl.store(scale_ptr + units * m + token, scale, mask=units * UNIT < K)


def rounded(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """Returns x [m, k] in e4m3, and the scales [k / group, m] by which it is multiplied; group 0: all columns."""
    m, k = x.shape
    units = triton.cdiv(k, group) if group else 1
    out = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(units, m, dtype=torch.float32, device=x.device)
    unit = group or triton.next_power_of_2(k)
    _round_kernel[(m,)](out, scale, x, m, K=k, UNIT=unit, UNITS=triton.next_power_of_2(units), num_warps=8)
    return out, scale
