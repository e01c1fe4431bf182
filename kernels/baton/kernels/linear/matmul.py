"""The batch-invariant linear: a row's result does not depend on other rows, bit for bit.

Each output is a chain of multiply-adds over k = 0 .. K, instruction after instruction of the matrix unit, in one fp32
accumulator: K is never split, and the weight is always the left operand. So a tile's rows, columns and steps decide
only where the chain is computed, not its order. In float32, which has no such instruction, steps are small_linear's.
RMSNorm is not fused, because the order of its sum over k depends on the layout of a tile's rows in the threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.linear.small_linear import MAX_TOKENS, Tiling, choose_tiling, fitting, small_linear
from baton.kernels.overlap import overlaps
from baton.kernels.shared_memory import shared_memory

FEW_TOKENS = 256  # with more, all tiles are large
_FEW_FEATURES, _MANY_FEATURES = 4096, 32_768
_GROUP = 8  # row tiles that share a pass over the weight, so that it is read from L2


@triton.jit(do_not_specialize=["m"])
def _matmul_kernel(
    out_ptr,  # [m, n]
    x_ptr,  # [m, K]
    weight_ptr,  # [n, K]; GATED: [2 n, K], gates first
    residual_ptr,  # [m, n]
    m,
    n,
    K: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_mn = residual_mn + act(sum_k x_mk weight_nk)"""
    # grid: (m / BLOCK_M * n / BLOCK_N)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    num_m = tl.cdiv(m, BLOCK_M)
    num_n = tl.cdiv(n, BLOCK_N)
    group = tl.program_id(0) // (GROUP * num_n)
    group_size = min(num_m - group * GROUP, GROUP)
    place = tl.program_id(0) % (GROUP * num_n)
    cols = (group * GROUP + place % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = place // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the end read the last one's values, because loads without a mask are faster.
    row_ptr = weight_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * K + ks[None, :]
    col_ptr = x_ptr + tl.minimum(cols, m - 1).to(tl.int64)[None, :] * K + ks[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        weight = tl.load(row_ptr + start)
        x = tl.load(col_ptr + start)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
        if GATED:
            other = tl.load(row_ptr + n.to(tl.int64) * K + start)
            up = tl.dot(other, x, up, input_precision="ieee")
    at = cols.to(tl.int64)[None, :] * n + rows[:, None]
    whole = (rows < n)[:, None] & (cols < m)[None, :]
    out = acc
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * up
    if RESIDUAL:
        out += tl.load(residual_ptr + at, mask=whole, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=whole)


def matmul(
    x: Tensor,
    weight: Tensor,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns f(x @ weight^T) [m, n] for x [m, k] and weight [n, k] (gated: [2 n, k]).

    `gated` gives silu(first half) * second half; `residual` [m, n] is added last and may be `out` itself.
    """
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if m <= MAX_TOKENS:
        return small_linear(x, weight, None, gated=gated, residual=residual, out=out, batch_invariant=True)
    if out is None:
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    block_m, tiling = _tiling(m, n, k, gated, x.element_size(), shared_memory(x.device))
    overlap = overlaps(x)
    _matmul_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, tiling.block_n),)](
        out,
        x,
        weight,
        x if residual is None else residual,
        m,
        n,
        K=k,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        GROUP=_GROUP,
        STAGES=tiling.num_stages,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    return out


def _tiling(m: int, n: int, k: int, gated: bool, itemsize: int, shared_bytes: int) -> tuple[int, Tiling]:
    """Returns a tile's tokens, and a tiling, which a sweep on an H100 found fast. All give the same bits.

    There are three kinds: up to 128 tokens, up to FEW_TOKENS, and more.
    """
    small = choose_tiling(m, n, k, gated, itemsize, shared_bytes, batch_invariant=True)
    if itemsize == 4:
        return MAX_TOKENS, small
    block_m, wanted = 128, Tiling(128, min(64, small.block_k), 1, 8, 4)
    if m <= FEW_TOKENS and not gated:
        if n <= _FEW_FEATURES:  # large tiles would leave most multiprocessors without one
            block_m = 64 if m <= 128 else 128
            wanted = Tiling(64, small.block_k, 1, 4, 5 if m <= 128 else 4)
        elif m > 128 and n >= _MANY_FEATURES:
            block_m = 256
    return block_m, fitting(wanted, block_m, gated, itemsize, shared_bytes)
