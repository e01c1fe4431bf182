"""Rows of a packed matrix, dequantized: the embeddings of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.packed.launch import constants, pointers, row_constants, row_pointers
from baton.kernels.packed.unpack import finished, load_stored, tile_of
from baton.kernels.packed.weight import PackedWeight

_BLOCK_K = 512


@triton.jit
def _take_kernel(
    out_ptr,  # [num_ids, K]
    ids_ptr,  # [num_ids]
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
    BLOCK_K: tl.constexpr,
):
    """out_ik = (stored_nk - zero_ng) * scale_ng * row_scale_n for n = ids_i"""
    # grid: (num_ids, K / BLOCK_K)
    row = tl.load(ids_ptr + tl.program_id(0)).to(tl.int32)
    start = tl.program_id(1) * BLOCK_K
    stored = load_stored(stored_ptr, row, start, n, K, NUMBERS, BITS, 1, BLOCK_K)
    tile, scale = tile_of(
        stored, scale_ptr, zero_ptr, row, start, n, K, NUMBERS, BITS, NUM_GROUPS, GROUP, SCALE_ROWS, SCALED, ZEROED,
        ZERO_PLUS, UNIT, 1, BLOCK_K,
    )  # fmt: skip
    out = finished(tile * scale, row + tl.arange(0, 1), row_scale_ptr, bias_ptr, n, ROW_SCALED, DIVIDES, False)
    ks = start + tl.arange(0, BLOCK_K)
    at = tl.program_id(0).to(tl.int64) * K + ks[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(ks < K)[None, :])


def take_rows(weight: PackedWeight, ids: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Returns the rows `ids` of the weight [n, k], [num_ids, k] in a dtype. `bias` is not added."""
    out = torch.empty(len(ids), k, dtype=dtype, device=ids.device)
    block_k = min(_BLOCK_K, int(triton.next_power_of_2(k)))
    _take_kernel[(len(ids), triton.cdiv(k, block_k))](
        out,
        ids,
        *pointers(weight, out),
        *row_pointers(weight, out),
        weight.num_rows,
        **constants(weight, k, block_k, block_k),
        **row_constants(weight),
        BLOCK_K=block_k,
        num_warps=4 if block_k == _BLOCK_K else 1,
    )
    return out if weight.order is None else torch.empty_like(out).index_copy_(1, weight.order[0].long(), out)
