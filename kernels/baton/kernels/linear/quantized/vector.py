"""The product of one token with a packed weight, whose time is that of reading the weight."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.packed.launch import LANE_COLUMNS, constants, pointers, row_constants, row_pointers
from baton.kernels.packed.unpack import finished, load_stored, sums_of
from baton.kernels.packed.weight import PackedWeight


class VectorTiling(NamedTuple):
    """The cut of the weight for one launch."""

    block_n: int  # output features per program
    block_k: int  # input features per step
    num_warps: int


@triton.jit
def _vector_kernel(
    out_ptr,  # [n]
    x_ptr,  # [K]
    stored_ptr,
    scale_ptr,  # [n / SCALE_ROWS, NUM_GROUPS]
    zero_ptr,
    groups_ptr,  # [K] int32
    row_scale_ptr,  # [n] fp32
    bias_ptr,  # [n]
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
    OVERLAP: tl.constexpr,
):
    """out_n = row_scale_n sum_g scale_ng sum_{k in g} (stored_nk - zero_ng) x_k + bias_n"""
    # grid: (n / BLOCK_N)
    first = tl.program_id(0) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    units: tl.constexpr = BLOCK_K // UNIT
    ks = tl.arange(0, units)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    # Prefetches the numbers of the next step, the first ones while the previous kernel still runs.
    stored = load_stored(stored_ptr, first, 0, n, K, NUMBERS, BITS, BLOCK_N, BLOCK_K)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, units], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        after = load_stored(stored_ptr, first, start + BLOCK_K, n, K, NUMBERS, BITS, BLOCK_N, BLOCK_K)
        x = tl.load(x_ptr + start + ks, mask=start + ks < K, other=0.0).to(tl.float32)
        acc += sums_of(
            stored, x, scale_ptr, zero_ptr, groups_ptr, first, start, n, K, NUMBERS, BITS, NUM_GROUPS, GROUP,
            SCALE_ROWS, SCALED, ZEROED, ZERO_PLUS, UNIT, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        stored = after
    out = finished(tl.sum(acc, 1)[:, None], rows, row_scale_ptr, bias_ptr, n, ROW_SCALED, DIVIDES, BIASED)
    tl.store(out_ptr + rows[:, None], out.to(out_ptr.dtype.element_ty), mask=(rows < n)[:, None])


def vector_linear(x: Tensor, weight: PackedWeight, out: Tensor, tiling: VectorTiling | None = None) -> Tensor:
    """Fills out [1, n] with the product of x [1, k], and returns it."""
    n, k = weight.num_rows, x.shape[1]
    tiling = tiling or choose_vector_tiling(weight, n, k)
    overlap = overlaps(x)
    _vector_kernel[(triton.cdiv(n, tiling.block_n),)](
        out,
        x,
        *pointers(weight, x),
        *row_pointers(weight, x),
        n,
        **constants(weight, k, tiling.block_k, LANE_COLUMNS[weight.numbers]),
        **row_constants(weight),
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    return out


def choose_vector_tiling(weight: PackedWeight, n: int, k: int) -> VectorTiling:
    """Returns steps of 16 bytes a thread and row."""
    if weight.numbers == "rows_of_words":
        return VectorTiling(16, 512, 4)
    block_k = min(2048 if weight.bits == 8 else 4096, triton.next_power_of_2(k))
    return VectorTiling(2 if n <= 8192 else 4, max(block_k, 64), 4)
