"""RMSNorm over groups of features, with a gate before or after it."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.recurrence.tiles import token_stride

_ELEMENTS = 1024  # of a program: groups of heads are small


@triton.jit
def _gated_norm_kernel(
    out_ptr,  # [num_rows, GROUPS * SIZE]
    x_ptr,  # [num_rows, GROUPS * SIZE], rows of x_stride
    gate_ptr,  # [num_rows, GROUPS * SIZE], rows of gate_stride
    weight_ptr,  # [GROUPS * SIZE] or [SIZE]
    num_groups,  # of all rows
    x_stride,
    gate_stride,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,  # all groups have the same weights
    NORM_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = norm(x) weight act(gate), or norm(x act(gate)) weight; norm(y) = y / sqrt(mean(y^2) + eps)"""
    # grid: (num_groups / BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (group // GROUPS).to(tl.int64)[:, None]
    dims = tl.arange(0, SIZE_PAD)[None, :]
    inside = (group < num_groups)[:, None] & (dims < SIZE)
    column = (group % GROUPS)[:, None] * SIZE + dims
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate)
    if SILU:
        opened *= gate
    if not NORM_FIRST:
        x *= opened
    x *= tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    x *= tl.load(weight_ptr + (dims if SHARED else column), mask=inside, other=0.0).to(tl.float32)
    if NORM_FIRST:
        x *= opened
    tl.store(out_ptr + row * (GROUPS * SIZE) + column, x.to(out_ptr.dtype.element_ty), mask=inside)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int,
    norm_first: bool,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> Tensor:
    """Returns RMSNorm(x) weight act(gate), or, without `norm_first`, RMSNorm(x act(gate)) weight, of [num_rows, size].

    weight [size], or [group_size] of each group.
    """
    num_rows, size = x.shape
    groups = size // group_size
    size_pad = triton.next_power_of_2(group_size)
    block = max(1, min(_ELEMENTS // size_pad, triton.next_power_of_2(groups)))
    overlap = overlaps(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    _gated_norm_kernel[(triton.cdiv(num_rows * groups, block),)](
        out,
        x,
        gate,
        weight,
        num_rows * groups,
        token_stride(x),
        token_stride(gate),
        eps,
        GROUPS=groups,
        SIZE=group_size,
        SIZE_PAD=size_pad,
        BLOCK=block,
        SHARED=weight.numel() == group_size,
        NORM_FIRST=norm_first,
        SILU=activation == "silu",
        OVERLAP=overlap,
        num_warps=8 if size_pad >= 4096 else 4,
        launch_pdl=overlap,
    )
    return out
