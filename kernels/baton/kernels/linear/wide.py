"""A small linear whose weights are fp32 and whose inputs are not, as of routers: as exact as in fp32, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps

_FEW = 64  # tokens, up to which products on matrix units are slower
_SOME = 1024  # tokens, up to which small tiles fill more of the device
_BLAS = range(65, 257)  # tokens whose product BLAS computes faster, on an H100


@triton.jit(do_not_specialize=["num_tokens"])
def _few_kernel(
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


@triton.jit(do_not_specialize=["num_tokens"])
def _many_kernel(
    out_ptr,  # [num_tokens, num_rows] fp32
    x_ptr,  # [num_tokens, SIZE] bf16
    weight_ptr,  # [num_rows, SIZE] fp32
    num_tokens,
    num_rows,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = x a^T + x b^T + x c^T for bf16 a + b + c = weight, which have all of its 24 bits"""
    # grid: (num_tokens / TOKENS, num_rows / ROWS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    small = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        dims = start + tl.arange(0, BLOCK)
        inside = (dims < SIZE)[None, :]
        x_at = x_ptr + tokens.to(tl.int64)[:, None] * SIZE + dims[None, :]
        x = tl.load(x_at, mask=(tokens < num_tokens)[:, None] & inside, other=0.0)
        weight_at = weight_ptr + rows[:, None] * SIZE + dims[None, :]
        weight = tl.load(weight_at, mask=(rows < num_rows)[:, None] & inside, other=0.0)
        high = weight.to(tl.bfloat16)
        rest = weight - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(x, tl.trans(high), acc)
        small = tl.dot(x, tl.trans(middle), small)
        small = tl.dot(x, tl.trans(low), small)
    at = out_ptr + tokens.to(tl.int64)[:, None] * num_rows + rows[None, :]
    tl.store(at, acc + small, mask=(tokens < num_tokens)[:, None] & (rows < num_rows)[None, :])


def beats_blas(num_tokens: int) -> bool:
    """Returns whether `multiply_wide` is faster than casts and a product in fp32."""
    return num_tokens not in _BLAS


def multiply_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x weight^T [num_tokens, num_rows] in fp32, for x [num_tokens, size] and weight [num_rows, size] fp32,
    both contiguous. More than 64 tokens must be bf16."""
    (num_tokens, size), num_rows = x.shape, len(weight)
    out = torch.empty(num_tokens, num_rows, dtype=torch.float32, device=x.device)
    overlap = overlaps(x)
    if num_tokens <= _FEW:
        block = min(512, triton.next_power_of_2(size))
        tokens, rows = min(4, triton.next_power_of_2(num_tokens)), 1 if num_tokens == 1 else 2
        _few_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_rows, rows))](
            out, x, weight, num_tokens, num_rows, SIZE=size, TOKENS=tokens, ROWS=rows, BLOCK=block, OVERLAP=overlap,
            num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
        return out
    tokens, rows = (16, 16) if num_tokens <= _SOME else (64, min(64, max(16, triton.next_power_of_2(num_rows))))
    _many_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_rows, rows))](
        out, x, weight, num_tokens, num_rows, SIZE=size, TOKENS=tokens, ROWS=rows, BLOCK=128 if tokens == 16 else 64,
        STAGES=3, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out
