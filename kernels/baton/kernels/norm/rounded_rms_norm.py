"""RMSNorm whose result is rounded to e4m3 in the same launch, for products with weights of e4m3."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.packed.rounding import Rounded, empty_rounded, store_parts, unit_scale


@triton.jit(do_not_specialize=["m"])
def _rounded_rms_norm_kernel(
    out_ptr,  # [m, SIZE] e4m3
    scale_ptr,  # [SIZE / UNIT, m] fp32
    x_ptr,  # [num_tokens, SIZE]
    residual_ptr,  # [num_tokens, SIZE], updated
    weight_ptr,  # [SIZE]
    m,
    eps,
    RESIDUAL: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """residual += x; y = residual / sqrt(mean(residual^2) + eps) * weight; out = y / scale, scale = max |y| / 448 of
    each unit of columns"""
    # grid: (num_tokens)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    row = token.to(tl.int64) * SIZE
    dims = tl.arange(0, SIZE_PAD)
    inside = dims < SIZE
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row + dims, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row + dims, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + row + dims, x.to(dtype), mask=inside)
        x = x.to(dtype).to(tl.float32)
    scaled = (x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    # Rounded to the dtype first, as by a launch of its own.
    y = tl.reshape((scaled * weight).to(dtype).to(tl.float32), [SIZE_PAD // UNIT, UNIT])
    scale = unit_scale(tl.max(tl.abs(y), 1), 1)
    units = tl.arange(0, SIZE_PAD // UNIT)
    ks = units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    store_parts(out_ptr, y / scale[:, None], row + ks, 0, ks < SIZE, 1)
    tl.store(scale_ptr + units * m + token, scale, mask=units * UNIT < SIZE)


def rounded_rms_norm(
    x: Tensor, weight: Tensor, eps: float, group: int, *, residual: Tensor | None = None, row_unit: int = 1
) -> Rounded:
    """Returns RMSNorm of x [num_tokens, size] as `rounded` rounds it in groups of columns. With `residual`, adds x to
    it and returns the norm of the sum."""
    size, overlap = x.shape[-1], overlaps(x)
    out = empty_rounded(x, group, row_unit)
    size_pad = triton.next_power_of_2(size)
    _rounded_rms_norm_kernel[(len(x),)](
        out.values,
        out.scale,
        x,
        x if residual is None else residual,
        weight,
        len(out.values),
        eps,
        RESIDUAL=residual is not None,
        SIZE=size,
        SIZE_PAD=size_pad,
        UNIT=min(group, size_pad) if group else size_pad,
        OVERLAP=overlap,
        num_warps=8 if size >= 2048 else 4,
        launch_pdl=overlap,
    )
    return out
