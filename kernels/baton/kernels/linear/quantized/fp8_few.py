"""The product of few tokens with a weight of e4m3 on the matrix unit's floats of 8 bits.

The weight is the left operand, which goes from memory to the matrix unit as it is. Tokens are rounded to e4m3, or are
two columns each, whose sum is the token. Sums of a step's products, which the matrix unit keeps in fewer bits, are
added in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.linear.small_linear import Workspace
from baton.kernels.overlap import overlaps
from baton.kernels.packed.launch import row_constants, row_pointers
from baton.kernels.packed.rounding import Rounded, rounded
from baton.kernels.packed.unpack import finished
from baton.kernels.packed.weight import PackedWeight

_MANY_TILES = 264  # of 64 rows, which fill an H200 twice


class Fp8Tiling(NamedTuple):
    """The cut of the weight and of the tokens for one launch."""

    block_m: int  # columns of tokens per program, one for each part
    block_n: int  # output features per program
    block_k: int  # input features per step
    splits: int  # programs that share the input features of one output tile
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["m"])
def _few_kernel(
    out_ptr,  # [m, n]
    x_ptr,  # [m, PARTS, K] e4m3
    x_scale_ptr,  # [NUM_GROUPS, m, PARTS] fp32
    stored_ptr,  # [n, K] e4m3
    scale_ptr,  # [n / SCALE_ROWS, NUM_GROUPS] fp32
    row_scale_ptr,  # [n] fp32
    bias_ptr,  # [n]
    partial_ptr,  # [SPLITS, m, n] fp32
    arrived_ptr,  # [m / BLOCK_M * n / BLOCK_N] int32, zeros before and after
    m,
    n,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale; 0: all
    SCALE_ROWS: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    DIVIDES: tl.constexpr,
    BIASED: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_mn = row_scale_n sum_g scale_ng sum_{k in g} stored_nk x_mk + bias_n, x_mk = sum_p x_scale_mgp x_mpk"""
    # grid: (n / BLOCK_N, SPLITS, m / BLOCK_M)
    first = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    rows = first + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    k_share: tl.constexpr = (tl.cdiv(K, BLOCK_K) + SPLITS - 1) // SPLITS * BLOCK_K
    begin = split * k_share
    end = min(begin + k_share, K)
    # Rows and columns beyond the end read the last one's values, because loads without a mask are faster.
    row = tl.minimum(rows, n - 1)
    column = tl.minimum(tl.program_id(2) * (BLOCK_M * PARTS) + tl.arange(0, BLOCK_M * PARTS), m * PARTS - 1)
    stored_at = stored_ptr + row.to(tl.int64)[:, None] * K + ks[None, :]
    x_at = x_ptr + column.to(tl.int64)[None, :] * K + ks[:, None]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M * PARTS], tl.float32)
    x_scale = tl.load(x_scale_ptr + column)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            stored = tl.load(stored_at + start)
            x = tl.load(x_at + start)
        else:
            stored = tl.load(stored_at + start, mask=(start + ks < K)[None, :], other=0.0)
            x = tl.load(x_at + start, mask=(start + ks < K)[:, None], other=0.0)
        part = tl.dot(stored, x)
        if GROUP > 0:
            group = start // GROUP
            x_scale = tl.load(x_scale_ptr + group * m * PARTS + column)
            if SCALE_ROWS % BLOCK_N == 0:
                x_scale *= tl.load(scale_ptr + first // SCALE_ROWS * NUM_GROUPS + group)
            else:
                part *= tl.load(scale_ptr + (row // SCALE_ROWS).to(tl.int64) * NUM_GROUPS + group)[:, None]
        acc += part * x_scale[None, :]
    if PARTS > 1:
        acc = tl.sum(tl.reshape(acc, [BLOCK_N, BLOCK_M, PARTS]), 2)
    cols = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = cols.to(tl.int64)[None, :] * n + rows[:, None]
    whole = (rows < n)[:, None] & (cols < m)[None, :]
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


def few_fp8_linear(
    x: Tensor | Rounded,
    weight: PackedWeight,
    out: Tensor,
    workspace: Workspace | None,
    *,
    parts: int = 2,
    tiling: Fp8Tiling | None = None,
) -> Tensor:
    """Fills out [m, n] with the product of x [m, k], and returns it. With one part, x is rounded, or was before.

    Without a workspace, sums are not split.
    """
    scaled = weight.scale is not None
    if isinstance(x, Rounded):
        assert parts == 1, "rounded activations have one part"
        quantized, x_scale, *_ = x
    else:
        quantized, x_scale = rounded(x, weight.group if scaled else 0, parts)
    m, k, n = len(quantized) // parts, quantized.shape[1], weight.num_rows
    tiling = tiling or choose_fp8_tiling(m * parts, n, k, weight.group if scaled else 0)
    block_m = tiling.block_m // parts
    partial, arrived = (x_scale, x_scale) if workspace is None else (workspace.partial, workspace.arrived)
    tiles = triton.cdiv(n, tiling.block_n), triton.cdiv(m, block_m)
    if workspace is None or tiling.splits * m * n > partial.numel() or tiles[0] * tiles[1] > arrived.numel():
        tiling = tiling._replace(splits=1)
    overlap = overlaps(quantized)
    _few_kernel[(tiles[0], tiling.splits, tiles[1])](
        out,
        quantized,
        x_scale,
        weight.stored,
        x_scale if weight.scale is None else weight.scale,
        *row_pointers(weight, x_scale),
        partial,
        arrived,
        m,
        n,
        K=k,
        NUM_GROUPS=1 if weight.scale is None else weight.scale.shape[1],
        GROUP=weight.group if scaled else 0,
        SCALE_ROWS=weight.scale_rows,
        **row_constants(weight),
        PARTS=parts,
        SPLITS=tiling.splits,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        STAGES=tiling.num_stages,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    return out


def choose_fp8_tiling(columns: int, n: int, k: int, group: int = 0) -> Fp8Tiling:
    """Returns the tiling that a sweep on an H200 found best for so many columns of tokens, or for nearly as many."""
    block_m = min(128, max(16, int(triton.next_power_of_2(columns))))
    block_k = 128 if group else 256
    tiles = triton.cdiv(n, 64)
    if block_m > 32 and tiles >= _MANY_TILES:
        return Fp8Tiling(block_m, 128, 128, 1, 8, 4)
    if block_m > 64:
        wanted = Fp8Tiling(block_m, 64, block_k, 2, 4, 3)
    elif block_m > 32:
        wanted = Fp8Tiling(block_m, 64, block_k, 1 if tiles >= 96 else 2, 4, 4)
    else:
        wanted = Fp8Tiling(block_m, 64, block_k, 1 if tiles >= _MANY_TILES else 2 if tiles >= 80 else 4, 4, 4)
    return wanted._replace(splits=min(wanted.splits, max(1, k // (2 * block_k))))
