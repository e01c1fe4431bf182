"""The gate of a SwiGLU MLP whose result is rounded to e4m3 in the same launch, for a product with weights of e4m3."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.packed.rounding import Rounded, empty_rounded, store_parts, unit_scale

_BLOCK = 2048  # columns of a program, where scales are of groups


@triton.jit(do_not_specialize=["m"])
def _rounded_silu_mul_kernel(
    out_ptr,  # [m, SIZE] e4m3
    scale_ptr,  # [SIZE / UNIT, m] fp32
    gate_up_ptr,  # [num_tokens, 2 SIZE], gates first
    m,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y = gate / (1 + e^-gate) * up; out = y / scale, scale = max |y| / 448 of each unit of columns"""
    # grid: (num_tokens, SIZE / BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    row = token.to(tl.int64) * SIZE
    first = tl.program_id(1) * BLOCK
    units = tl.arange(0, BLOCK // UNIT)
    ks = first + units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    gate = tl.load(gate_up_ptr + 2 * row + ks, mask=ks < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + 2 * row + SIZE + ks, mask=ks < SIZE, other=0.0).to(tl.float32)
    dtype = gate_up_ptr.dtype.element_ty
    gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    # Rounded to the dtype first, as by a launch of its own.
    y = (gated * up).to(dtype).to(tl.float32)
    scale = unit_scale(tl.max(tl.abs(y), 1), 1)
    store_parts(out_ptr, y / scale[:, None], row + ks, 0, ks < SIZE, 1)
    own = first // UNIT + units
    tl.store(scale_ptr + own * m + token, scale, mask=own * UNIT < SIZE)


def rounded_silu_mul(gate_up: Tensor, group: int, *, row_unit: int = 1) -> Rounded:
    """Returns silu(first half) * second half of gate_up [num_tokens, 2 size] as `rounded` rounds it in groups of
    columns."""
    size, overlap = gate_up.shape[1] // 2, overlaps(gate_up)
    out = empty_rounded(gate_up[:, :size], group, row_unit)
    block = max(group, _BLOCK) if group else triton.next_power_of_2(size)
    _rounded_silu_mul_kernel[(len(gate_up), triton.cdiv(size, block))](
        out.values,
        out.scale,
        gate_up,
        len(out.values),
        SIZE=size,
        BLOCK=block,
        UNIT=group or block,
        OVERLAP=overlap,
        num_warps=4 if block <= _BLOCK else 8,
        launch_pdl=overlap,
    )
    return out
