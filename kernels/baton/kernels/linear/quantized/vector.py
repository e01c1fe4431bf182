"""The product of one token with a packed weight, whose time is that of reading the weight."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.packed.four_bits import choose_four_bit_tiling, multiply_four_bits, reads_four_bits
from baton.kernels.packed.launch import LANE_COLUMNS, constants, pointers, row_constants, row_pointers
from baton.kernels.packed.unpack import finished, load_stored, places_of, sums_of
from baton.kernels.packed.weight import PackedWeight
from baton.kernels.routing import Gate

_LONG = 8192
_LOOKED_UP = ("nf4", "fp4")
_NORMED = 2048  # columns
_NARROW, _WIDE = 2048, 4096  # rows, columns


class VectorTiling(NamedTuple):
    """The cut of the weight for one launch."""

    block_n: int  # output features per program
    block_k: int  # input features per step
    num_warps: int


@triton.jit
def _vector_kernel(
    out_ptr,  # [n]
    x_ptr,  # [K]
    stored_ptr,  # GATED: of 2 n rows, gates first
    scale_ptr,  # [n / SCALE_ROWS, NUM_GROUPS]
    zero_ptr,
    order_ptr,  # [K] int32
    row_scale_ptr,  # [n] fp32
    bias_ptr,  # [n]
    norm_ptr,  # [K]
    residual_ptr,  # [n]
    n,
    eps,
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
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_n = residual_n + act(row_scale_n sum_g scale_ng sum_{k in g} (stored_nk - zero_ng) y_k + bias_n)

    y_k = x_k norm_k / rms(x)
    """
    # grid: (n / BLOCK_N)
    first = tl.program_id(0) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    units: tl.constexpr = BLOCK_K // UNIT
    ks = tl.arange(0, units)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    num_rows = 2 * n if GATED else n
    # Prefetches the numbers of the next step, the first ones while the previous kernel still runs.
    stored = load_stored(stored_ptr, first, 0, num_rows, K, NUMBERS, BITS, BLOCK_N, BLOCK_K)
    other = stored
    if GATED:
        other = load_stored(stored_ptr, n + first, 0, num_rows, K, NUMBERS, BITS, BLOCK_N, BLOCK_K)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, units], tl.float32)
    up = tl.zeros([BLOCK_N, units], tl.float32)
    squares = tl.zeros([units, UNIT], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        after = stored
        other_after = other
        if start + BLOCK_K < K:
            after = load_stored(stored_ptr, first, start + BLOCK_K, num_rows, K, NUMBERS, BITS, BLOCK_N, BLOCK_K)
            if GATED:
                other_after = load_stored(
                    stored_ptr, n + first, start + BLOCK_K, num_rows, K, NUMBERS, BITS, BLOCK_N, BLOCK_K
                )
        at = places_of(order_ptr, start + ks, K, ORDERED)
        x = tl.load(x_ptr + at, mask=start + ks < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + at, mask=start + ks < K, other=0.0).to(tl.float32)
        acc += sums_of(
            stored, x, scale_ptr, zero_ptr, first, start, num_rows, K, NUMBERS, BITS, NUM_GROUPS, GROUP,
            SCALE_ROWS, SCALED, ZEROED, ZERO_PLUS, UNIT, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if GATED:
            up += sums_of(
                other, x, scale_ptr, zero_ptr, n + first, start, num_rows, K, NUMBERS, BITS, NUM_GROUPS,
                GROUP, SCALE_ROWS, SCALED, ZEROED, ZERO_PLUS, UNIT, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        stored = after
        other = other_after
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares) / K + eps)
    sums = tl.sum(acc, 1)[:, None] * scale
    out = finished(sums, rows, row_scale_ptr, bias_ptr, n, ROW_SCALED, DIVIDES, BIASED)
    if GATED:
        sums = tl.sum(up, 1)[:, None] * scale
        out = out / (1.0 + tl.exp(-out))
        out *= finished(sums, n + rows, row_scale_ptr, bias_ptr, num_rows, ROW_SCALED, DIVIDES, BIASED)
    if RESIDUAL:
        out += tl.load(residual_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + rows[:, None], out.to(out_ptr.dtype.element_ty), mask=(rows < n)[:, None])


def vector_linear(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    tiling: VectorTiling | None = None,
) -> Tensor:
    """Fills out [1, n] with f(x @ weight^T) for x [1, k], and returns it.

    `norm` [k] applies RMSNorm to x first; `gated` gives silu(first half) * second half of the weight's 2 n rows;
    `residual` [1, n] is added last and may be `out` itself. Without a tiling, weights of 4 bits may take a kernel of
    their own.
    """
    n, k = weight.num_rows // 2 if gated else weight.num_rows, x.shape[1]
    if tiling is None and reads_four_bits(weight, x, k):
        cut, gate = choose_four_bit_tiling(n, k, is_gated=gated), Gate() if gated else None
        return multiply_four_bits(out, x, weight, cut, norm=norm, eps=eps, gate=gate, residual=residual)
    tiling = tiling or choose_vector_tiling(weight, n, k, is_normed=norm is not None and not gated)
    overlap = overlaps(x)
    _vector_kernel[(triton.cdiv(n, tiling.block_n),)](
        out,
        x,
        *pointers(weight, x),
        x if weight.order is None else weight.order,
        *row_pointers(weight, x),
        x if norm is None else norm,
        x if residual is None else residual,
        n,
        eps,
        **constants(weight, k, tiling.block_k, LANE_COLUMNS[weight.numbers]),
        **row_constants(weight),
        NORM=norm is not None,
        GATED=gated,
        RESIDUAL=residual is not None,
        ORDERED=weight.order is not None,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    return out


def choose_vector_tiling(weight: PackedWeight, n: int, k: int, *, is_normed: bool = False) -> VectorTiling:
    """Returns steps of 16 bytes a thread and row, as sweeps on an H200 and an H100 found best.

    A program computes the norm for all its rows: more of them read the token and the norm less often.
    """
    whole = int(triton.next_power_of_2(k))
    if weight.numbers in _LOOKED_UP:
        return VectorTiling(2 if k > _LONG else 4, max(64, min(2048, whole)), 4)
    if weight.bits != 8:
        return (
            VectorTiling(4, max(64, min(2048, whole)), 2)
            if k > _LONG
            else VectorTiling(4, max(64, min(4096, whole)), 4)
        )
    if k > _LONG:
        return VectorTiling(4, 1024, 2)
    if is_normed and n <= _LONG and whole >= _NORMED:
        return VectorTiling(8, 2048, 4) if whole > _NORMED else VectorTiling(4, 1024, 2)
    if n <= _NARROW and whole == _WIDE:
        return VectorTiling(4, _WIDE, 8)
    return VectorTiling(2 if n <= _LONG else 4, max(64, min(2048, whole)), 4)
