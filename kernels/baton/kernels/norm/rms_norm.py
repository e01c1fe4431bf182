"""RMSNorm, fused with the addition to the residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps


@triton.jit
def _rms_norm_kernel(
    out_ptr,  # [num_tokens, size]
    x_ptr,  # [num_tokens, size]
    residual_ptr,  # [num_tokens, size], updated
    weight_ptr,  # [size]
    size,
    eps,
    RESIDUAL: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """residual += x; out = residual / sqrt(mean(residual^2) + eps) * weight"""
    # grid: (num_tokens)
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
        tl.store(residual_ptr + row + dims, x.to(dtype), mask=inside)
        x = x.to(dtype).to(tl.float32)
    scaled = (x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + dims, (scaled * weight).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
    """Returns RMSNorm of x [num_tokens, size]. With `residual`, adds x to it and returns the norm of the sum."""
    out = torch.empty_like(x)
    size = x.shape[-1]
    overlap = overlaps(x)
    _rms_norm_kernel[(x.shape[0],)](
        out,
        x,
        x if residual is None else residual,
        weight,
        size,
        eps,
        RESIDUAL=residual is not None,
        SIZE_PAD=triton.next_power_of_2(size),
        OVERLAP=overlap,
        num_warps=8 if size >= 2048 else 4,
        launch_pdl=overlap,
    )
    return out
