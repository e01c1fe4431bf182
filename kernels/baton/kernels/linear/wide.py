"""A small linear whose weights are fp32 and whose inputs are not, as of routers: as exact as in fp32, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps


@triton.jit(do_not_specialize=["num_tokens"])
def _wide_kernel(
    out_ptr,  # [num_tokens, num_rows] fp32
    x_ptr,  # [num_tokens, SIZE]
    weight_ptr,  # [num_rows, SIZE] fp32
    num_tokens,
    num_rows,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = x weight^T"""
    # grid: (num_tokens / TOKENS, num_rows / ROWS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK):
        dims = start + tl.arange(0, BLOCK)
        inside = (dims < SIZE)[None, :]
        x_at = x_ptr + tokens.to(tl.int64)[:, None] * SIZE + dims[None, :]
        x = tl.load(x_at, mask=(tokens < num_tokens)[:, None] & inside, other=0.0).to(tl.float32)
        weight_at = weight_ptr + rows[:, None] * SIZE + dims[None, :]
        weight = tl.load(weight_at, mask=(rows < num_rows)[:, None] & inside, other=0.0)
        acc += tl.sum(x[:, None, :] * weight[None, :, :], 2)
    at = out_ptr + tokens.to(tl.int64)[:, None] * num_rows + rows[None, :]
    tl.store(at, acc, mask=(tokens < num_tokens)[:, None] & (rows < num_rows)[None, :])


def multiply_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x weight^T [num_tokens, num_rows] in fp32, for x [num_tokens, size] and weight [num_rows, size] fp32,
    both contiguous. Products of many tokens are faster by BLAS."""
    (num_tokens, size), num_rows = x.shape, len(weight)
    out = torch.empty(num_tokens, num_rows, dtype=torch.float32, device=x.device)
    overlap = overlaps(x)
    block = min(512, triton.next_power_of_2(size))
    tokens, rows = min(4, triton.next_power_of_2(num_tokens)), 1 if num_tokens == 1 else 2
    _wide_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_rows, rows))](
        out,
        x,
        weight,
        num_tokens,
        num_rows,
        SIZE=size,
        TOKENS=tokens,
        ROWS=rows,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out
