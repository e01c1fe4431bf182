"""The gate of a SwiGLU MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps


@triton.jit
def _silu_mul_kernel(
    out_ptr,  # [num_tokens, size]
    gate_up_ptr,  # [num_tokens, 2 size], gates first
    size,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = gate / (1 + e^-gate) * up"""
    # grid: (num_tokens, size / BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < size
    gate = tl.load(gate_up_ptr + row * 2 * size + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + dims, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + dims, (gated * up).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(first half) * second half of gate_up [num_tokens, 2 size]."""
    num_tokens, width = gate_up.shape
    out = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    overlap = overlaps(gate_up)
    _silu_mul_kernel[(num_tokens, triton.cdiv(width // 2, 2048))](
        out, gate_up, width // 2, BLOCK=2048, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    return out
