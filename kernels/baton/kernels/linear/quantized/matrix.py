"""The product of several tokens with a packed weight, which is dequantized tile by tile in registers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.linear.small_linear import Workspace
from baton.kernels.overlap import overlaps
from baton.kernels.packed.launch import constants, pointers, row_constants, row_pointers
from baton.kernels.packed.unpack import finished, times
from baton.kernels.packed.weight import PackedWeight


class MatrixTiling(NamedTuple):
    """The cut of the weight and of the tokens for one launch."""

    block_m: int  # tokens per program
    block_n: int  # output features per program
    block_k: int  # input features per step
    splits: int  # programs that share the input features of one output tile
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["m"])
def _matrix_kernel(
    out_ptr,  # [m, n]
    x_ptr,  # [m, K]
    stored_ptr,
    scale_ptr,  # [n / SCALE_ROWS, NUM_GROUPS]
    zero_ptr,
    row_scale_ptr,  # [n] fp32
    bias_ptr,  # [n]
    partial_ptr,  # [SPLITS, m, n] fp32
    arrived_ptr,  # [m / BLOCK_M * n / BLOCK_N] int32, zeros before and after
    m,
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
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_mn = row_scale_n sum_g scale_ng sum_{k in g} (stored_nk - zero_ng) x_mk + bias_n"""
    # grid: (n / BLOCK_N, SPLITS, m / BLOCK_M)
    first = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    rows = first + tl.arange(0, BLOCK_N)
    cols = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    k_share: tl.constexpr = (tl.cdiv(K, BLOCK_K) + SPLITS - 1) // SPLITS * BLOCK_K
    begin = split * k_share
    end = min(begin + k_share, K)
    col_ptr = x_ptr + cols.to(tl.int64)[None, :] * K + ks[:, None]
    live = (cols < m)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(col_ptr + start, mask=live, other=0.0)
        else:
            x = tl.load(col_ptr + start, mask=live & (start + ks < K)[:, None], other=0.0)
        acc = times(
            acc, x, stored_ptr, scale_ptr, zero_ptr, first, start, n, K, NUMBERS, BITS, NUM_GROUPS, GROUP,
            SCALE_ROWS, SCALED, ZEROED, ZERO_PLUS, UNIT, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    at = cols.to(tl.int64)[None, :] * n + rows[:, None]
    whole = (rows < n)[:, None] & live
    finish = True
    if SPLITS > 1:
        place = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        stride = m.to(tl.int64) * n
        tl.store(partial_ptr + split * stride + at, acc, mask=whole)
        tl.debug_barrier()
        finish = tl.atomic_add(arrived_ptr + place, 1) == SPLITS - 1
        if finish:
            # Partial sums are always added in the same order.
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for s in range(SPLITS):
                acc += tl.load(partial_ptr + s * stride + at, mask=whole, other=0.0, cache_modifier=".cg")
            tl.store(arrived_ptr + place, 0)
    if finish:
        out = finished(acc, rows, row_scale_ptr, bias_ptr, n, ROW_SCALED, DIVIDES, BIASED)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=whole)


def matrix_linear(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    workspace: Workspace | None,
    tiling: MatrixTiling | None = None,
) -> Tensor:
    """Fills out [m, n] with the product of x [m, k], and returns it. Without a workspace, sums are not split."""
    (m, k), n = x.shape, weight.num_rows
    tiling = tiling or choose_matrix_tiling(weight, m, n, k, x.dtype)
    partial, arrived = (x, x) if workspace is None else (workspace.partial, workspace.arrived)
    tiles = triton.cdiv(n, tiling.block_n), triton.cdiv(m, tiling.block_m)
    if workspace is None or tiling.splits * m * n > partial.numel() or tiles[0] * tiles[1] > arrived.numel():
        tiling = tiling._replace(splits=1)
    overlap = overlaps(x)
    _matrix_kernel[(tiles[0], tiling.splits, tiles[1])](
        out,
        x,
        *pointers(weight, x),
        *row_pointers(weight, x),
        partial,
        arrived,
        m,
        n,
        **constants(weight, k, tiling.block_k, tiling.block_k),
        **row_constants(weight),
        SPLITS=tiling.splits,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        STAGES=tiling.num_stages,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    return out


INVARIANT_TILING = MatrixTiling(block_m=64, block_n=64, block_k=64, splits=1, num_warps=4, num_stages=4)


def choose_matrix_tiling(weight: PackedWeight, m: int, n: int, k: int, dtype: torch.dtype) -> MatrixTiling:
    """Returns a tiling that fills the device."""
    block_k = 128 if dtype.itemsize == 2 else 32
    if m > 64:
        return MatrixTiling(128 if dtype.itemsize == 2 else 32, 128 if dtype.itemsize == 2 else 32, 64, 1, 8, 3)
    block_m = max(16, int(triton.next_power_of_2(m)))
    tiles = triton.cdiv(n, 64)
    splits = 1 if tiles >= 264 else 2 if tiles >= 128 or m > 16 else 4
    splits = min(splits, max(1, k // (2 * block_k)))
    return MatrixTiling(block_m, 64, block_k, splits, 4, 4)
