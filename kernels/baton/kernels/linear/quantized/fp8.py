"""The product of many tokens with a weight of e4m3 on the matrix unit's floats of 8 bits.

Tokens are rounded to e4m3 with a scale of their own, or one for each group of columns that shares a scale of the
weight. Sums of 128 products, which the matrix unit keeps in fewer bits, are added in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.packed.launch import row_constants, row_pointers
from baton.kernels.packed.rounding import Rounded, rounded_rows
from baton.kernels.packed.weight import ROUND_UNIT, PackedWeight

_BLOCK_M, _BLOCK_N, _BLOCK_K = 128, 128, 128
SCALED_MM_ROWS = 16  # of products with scales of blocks
_HOPPER = 9  # major version of the compute capability
_GROUP = 8  # row tiles that share a pass over the weight, so that it is read from L2


@triton.jit(do_not_specialize=["m"])
def _product_kernel(
    out_ptr,  # [m, n]
    x_ptr,  # [m, K] e4m3
    x_scale_ptr,  # [NUM_GROUPS, m] fp32
    stored_ptr,  # [n, K] e4m3
    scale_ptr,  # [n / SCALE_ROWS, NUM_GROUPS] fp32
    row_scale_ptr,  # [n] fp32
    bias_ptr,  # [n]
    m,
    n,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale; 0: all
    SCALE_ROWS: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    DIVIDES: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out_mn = row_scale_n sum_g x_scale_mg scale_ng sum_{k in g} x_mk stored_nk + bias_n"""
    # grid: (m / BLOCK_M * n / BLOCK_N)
    num_m = tl.cdiv(m, BLOCK_M)
    num_n = tl.cdiv(n, BLOCK_N)
    turn = tl.program_id(0) // (ROW_TILES * num_n)
    count = min(num_m - turn * ROW_TILES, ROW_TILES)
    place = tl.program_id(0) % (ROW_TILES * num_n)
    tokens = (turn * ROW_TILES + place % count) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = place // count * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # Tokens and features beyond the end read the last one's values, because loads without a mask are faster.
    own = tl.minimum(tokens, m - 1)
    row = tl.minimum(features, n - 1)
    x_at = x_ptr + own.to(tl.int64)[:, None] * K + ks[None, :]
    stored_at = stored_ptr + row.to(tl.int64)[None, :] * K + ks[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_at + start)
            stored = tl.load(stored_at + start)
        else:
            x = tl.load(x_at + start, mask=(start + ks < K)[None, :], other=0.0)
            stored = tl.load(stored_at + start, mask=(start + ks < K)[:, None], other=0.0)
        part = tl.dot(x, stored)
        if GROUP > 0:
            group = start // GROUP
            x_scale = tl.load(x_scale_ptr + group * m + own)
            if SCALE_ROWS == BLOCK_N:
                scale = tl.load(scale_ptr + place // count * NUM_GROUPS + group)
                acc += part * (x_scale * scale)[:, None]
            else:
                scales = tl.load(scale_ptr + (row // SCALE_ROWS).to(tl.int64) * NUM_GROUPS + group)
                acc += part * x_scale[:, None] * scales[None, :]
        else:
            acc += part
    if GROUP == 0:
        acc *= tl.load(x_scale_ptr + own)[:, None]
    if ROW_SCALED:
        row_scale = tl.load(row_scale_ptr + row)
        acc = acc / row_scale[None, :] if DIVIDES else acc * row_scale[None, :]
    if BIASED:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    at = tokens.to(tl.int64)[:, None] * n + features[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(tokens < m)[:, None] & (features < n)[None, :])


def fp8_linear(x: Tensor | Rounded, weight: PackedWeight, out: Tensor) -> Tensor:
    """Fills out [m, n] with the product of x [m, k], and returns it."""
    scaled = weight.scale is not None
    quantized, x_scale, *_ = rounded_rows(x, weight.group if scaled else 0)
    (m, k), n = quantized.shape, weight.num_rows
    _product_kernel[(triton.cdiv(m, _BLOCK_M) * triton.cdiv(n, _BLOCK_N),)](
        out,
        quantized,
        x_scale,
        weight.stored,
        x_scale if weight.scale is None else weight.scale,
        *row_pointers(weight, x_scale),
        m,
        n,
        K=k,
        NUM_GROUPS=1 if weight.scale is None else weight.scale.shape[1],
        GROUP=weight.group if scaled else 0,
        SCALE_ROWS=weight.scale_rows,
        **row_constants(weight),
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        ROW_TILES=_GROUP,
        STAGES=4,
        num_warps=8,
    )
    return out


def has_scaled_mm(x: Tensor) -> bool:
    """Returns whether PyTorch has such products for activations like x: in bfloat16 on Hopper."""
    if x.dtype != torch.bfloat16 or not x.is_cuda:
        return False
    return torch.cuda.get_device_capability(x.device)[0] == _HOPPER


def scaled_mm_linear(x: Tensor | Rounded, weight: PackedWeight, out: Tensor | None = None) -> Tensor:
    """As `fp8_linear`, by PyTorch, for a scale a row of the weight, or one for each block of 128x128.

    Products with blocks are of multiples of 16 rows, the last of which belong to no token.
    """
    if weight.scale is not None:
        quantized, x_scale, m, dtype = rounded_rows(x, ROUND_UNIT, SCALED_MM_ROWS)
        scale_a, scale_b = x_scale.t(), weight.scale.t()
    else:
        assert weight.row_scale is not None, "scales are of rows"
        quantized, x_scale, m, dtype = rounded_rows(x)
        scale_a, scale_b = x_scale.view(-1, 1), weight.row_scale.view(1, -1)
        scale_b = scale_b.reciprocal() if weight.divides else scale_b
    bias = None if weight.bias is None else weight.bias.to(dtype)
    whole = out
    if whole is None or len(quantized) > m:
        whole = torch.empty(len(quantized), weight.num_rows, dtype=dtype, device=quantized.device)
    torch._scaled_mm(
        quantized,
        weight.stored.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=bias if weight.scale is None else None,
        out_dtype=dtype,
        use_fast_accum=weight.scale is None,
        out=whole,
    )
    found = whole[:m] if out is None or out is whole else out.copy_(whole[:m])
    return found if bias is None or weight.scale is None else found.add_(bias)
