"""LayerNorm, fused with the addition to the residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps


@triton.jit
def _layer_norm_kernel(
    out_ptr,  # [num_rows, size]
    x_ptr,  # [num_rows, size]
    residual_ptr,  # [num_rows, size]
    weight_ptr,  # [weight_rows, size]
    bias_ptr,  # [size]
    size,
    weight_rows,
    eps,
    RESIDUAL: tl.constexpr,
    KEEP_SUM: tl.constexpr,
    BIAS: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """sum = residual + x; out = (sum - mean(sum)) / sqrt(var(sum) + eps) * weight + bias; KEEP_SUM: residual = sum"""
    # grid: (num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * size
    dims = tl.arange(0, SIZE_PAD)
    inside = dims < size
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row + dims, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row + dims, mask=inside, other=0.0).to(tl.float32)
        if KEEP_SUM:
            tl.store(residual_ptr + row + dims, x.to(dtype), mask=inside)
        x = x.to(dtype).to(tl.float32)
    centered = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    scaled = centered * tl.rsqrt(tl.sum(centered * centered, 0) / size + eps)
    weight_row = weight_ptr + tl.program_id(0) % weight_rows * size
    scaled *= tl.load(weight_row + dims, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        scaled += tl.load(bias_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + dims, scaled.to(dtype), mask=inside)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    keep_sum: bool = True,
) -> Tensor:
    """Returns LayerNorm of x [num_rows, size]. With `residual`, adds x to it and returns the norm of the sum.

    weight [size], or [k, size], whose row r % k belongs to row r of x; bias [size]. Without `keep_sum`, the values of
    `residual` are undefined afterwards, which saves a write.
    """
    out = torch.empty_like(x)
    size = x.shape[-1]
    overlap = overlaps(x)
    _layer_norm_kernel[(x.shape[0],)](
        out,
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        size,
        weight.numel() // size,
        eps,
        RESIDUAL=residual is not None,
        KEEP_SUM=keep_sum,
        BIAS=bias is not None,
        SIZE_PAD=triton.next_power_of_2(size),
        OVERLAP=overlap,
        num_warps=8 if size >= 2048 else 4,
        launch_pdl=overlap,
    )
    return out
