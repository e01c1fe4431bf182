"""Dequantizes a packed weight, for products of so many tokens that a second pass over the weight costs little."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.packed.launch import constants, pointers, row_constants, row_pointers
from baton.kernels.packed.unpack import finished, load_stored, tile_of
from baton.kernels.packed.weight import PackedWeight

_BLOCK_N, _BLOCK_K = 32, 128


@triton.jit
def _dequantize_kernel(
    out_ptr,  # [n, K]
    stored_ptr,
    scale_ptr,  # [n / SCALE_ROWS, NUM_GROUPS]
    zero_ptr,
    row_scale_ptr,  # [n] fp32
    bias_ptr,
    n,
    K: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    ZEROED: tl.constexpr,
    ZERO_PLUS: tl.constexpr,
    UNIT: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    DIVIDES: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out_nk = (stored_nk - zero_ng) * scale_ng * row_scale_n"""
    # grid: (n / BLOCK_N, K / BLOCK_K)
    first = tl.program_id(0) * BLOCK_N
    start = tl.program_id(1) * BLOCK_K
    rows = first + tl.arange(0, BLOCK_N)
    ks = start + tl.arange(0, BLOCK_K)
    stored = load_stored(stored_ptr, first, start, n, K, NUMBERS, BITS, BLOCK_N, BLOCK_K)
    tile, scale = tile_of(
        stored, scale_ptr, zero_ptr, first, start, n, K, NUMBERS, BITS, NUM_GROUPS, GROUP, SCALE_ROWS,
        SCALED, ZEROED, ZERO_PLUS, UNIT, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    out = finished(tile * scale, rows, row_scale_ptr, bias_ptr, n, ROW_SCALED, DIVIDES, False)
    at = rows.to(tl.int64)[:, None] * K + ks[None, :]
    inside = (rows < n)[:, None] & (ks < K)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize(weight: PackedWeight, k: int, dtype: torch.dtype) -> Tensor:
    """Returns the weight [n, k] in a dtype, its columns as they are stored."""
    n, device = weight.num_rows, weight.stored.device
    out = torch.empty(n, k, dtype=dtype, device=device)
    _dequantize_kernel[(triton.cdiv(n, _BLOCK_N), triton.cdiv(k, _BLOCK_K))](
        out,
        *pointers(weight, out),
        *row_pointers(weight, out),
        n,
        **constants(weight, k, _BLOCK_K, _BLOCK_K),
        **row_constants(weight),
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
    )
    return out
