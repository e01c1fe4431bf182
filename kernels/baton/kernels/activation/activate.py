"""Activations of MLPs other than SwiGLU, with and without a gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps

_BLOCK = 2048


@triton.jit
def _gelu(x):
    """x (1 + erf(x / sqrt(2))) / 2"""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_of_half(x):
    """The same within 4e-7, by formula 7.1.26 of Abramowitz and Stegun, in half as many instructions and no branch."""
    size = tl.abs(x)
    t = 1.0 / (1.0 + 0.23164188 * size)
    power = tl.exp2(x * x * -0.7213475204444817)  # e^(-x^2 / 2)
    factor = 0.5307027145 * t - 0.7265760135
    factor = factor * t + 0.7107068705
    factor = factor * t - 0.142248368
    factor = (factor * t + 0.127414796) * t
    return tl.maximum(x, 0.0) - size * factor * power


@triton.jit
def _activate_kernel(
    out_ptr,  # [num_tokens, size]
    x_ptr,  # [num_tokens, size], or [num_tokens, 2 size] with gates first
    size,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = act(x), or act(gate) * up"""
    # grid: (num_tokens, size / BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < size
    dtype = out_ptr.dtype.element_ty
    width = 2 * size if GATED else size
    x = tl.load(x_ptr + row * width + dims, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0)
        y *= y
    elif ACTIVATION == "gelu":
        y = _gelu(x) if dtype == tl.float32 else _gelu_of_half(x)
    else:
        # x (1 + tanh(z)) / 2 = x / (1 + e^-2z), whose power of e is kept below 1.
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        power = tl.exp(-2.0 * tl.abs(z))
        y = x * tl.where(z < 0, power, 1.0) / (1.0 + power)
    if GATED:
        y = y.to(dtype).to(tl.float32)
        y *= tl.load(x_ptr + row * width + size + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + dims, y.to(dtype), mask=inside)


def activate(x: Tensor, activation: str, *, gated: bool) -> Tensor:
    """Returns silu, gelu, gelu_tanh or relu2 (squared ReLU) of x [num_tokens, size].

    If `gated`, of its first half, times the second.
    """
    num_tokens, width = x.shape
    size = width // 2 if gated else width
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    overlap = overlaps(x)
    _activate_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
        out,
        x,
        size,
        GATED=gated,
        ACTIVATION=activation,
        BLOCK=_BLOCK,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out
