"""Linear layers for few tokens, whose time is that of reading the weights.

out = f(x) @ weight^T + bias, fused with RMSNorm of the input, SiLU gating of two halves, and addition to the residual.
Each weight is read once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.shared_memory import shared_memory

MAX_TOKENS = 64
_SOME = 16  # tokens, which one tile of the matrix unit has
_SLACK = 2048  # bytes of shared memory in addition to the stages


class Tiling(NamedTuple):
    """The cut of the weight for one launch."""

    block_n: int  # output features per program
    block_k: int  # input features per step
    splits: int  # programs that share the input features of one output tile
    num_warps: int
    num_stages: int


@triton.jit
def _vector_kernel(
    out_ptr,  # [n]
    x_ptr,  # [k]
    weight_ptr,  # [n, k]; GATED: [2 n, k], gates first
    bias_ptr,  # [n]; GATED: [2 n]
    norm_ptr,  # [k]
    residual_ptr,  # [n]
    n,
    eps,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token: out_n = residual_n + act(bias_n + sum_k x_k norm_k weight_nk / rms(x))"""
    # grid: (n / BLOCK_N)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < n)[:, None]
    ks = tl.arange(0, BLOCK_K)
    gate_ptr = weight_ptr + rows.to(tl.int64)[:, None] * K + ks[None, :]
    up_ptr = gate_ptr + n.to(tl.int64) * K
    # Prefetches the weights of the next step, the first ones while the previous kernel still runs.
    gate = tl.load(gate_ptr, mask=inside & (ks < K)[None, :], other=0.0, eviction_policy="evict_first")
    up = gate
    if GATED:
        up = tl.load(up_ptr, mask=inside & (ks < K)[None, :], other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + ks
        next_mask = inside & (k + BLOCK_K < K)[None, :]
        next_start = start + BLOCK_K
        next_gate = tl.load(gate_ptr + next_start, mask=next_mask, other=0.0, eviction_policy="evict_first")
        next_up = next_gate
        if GATED:
            next_up = tl.load(up_ptr + next_start, mask=next_mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        acc += gate.to(tl.float32) * x[None, :]
        if GATED:
            up_acc += up.to(tl.float32) * x[None, :]
        gate = next_gate
        up = next_up
    out = tl.sum(acc, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        out *= scale
    if BIAS:
        out += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    if GATED:
        other = tl.sum(up_acc, 1) * scale
        if BIAS:
            other += tl.load(bias_ptr + n + rows, mask=rows < n, other=0.0).to(tl.float32)
        out = out / (1.0 + tl.exp(-out)) * other
    if RESIDUAL:
        out += tl.load(residual_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=rows < n)


@triton.jit(do_not_specialize=["m"])
def _matrix_kernel(
    out_ptr,  # [m, n]
    x_ptr,  # [m, k]
    weight_ptr,  # [n, k]; GATED: [2 n, k], gates first
    bias_ptr,  # [n]; GATED: [2 n]
    norm_ptr,  # [k]
    residual_ptr,  # [m, n]
    partial_ptr,  # [splits, 1 + GATED, m, n] fp32
    squares_ptr,  # [splits, n / BLOCK_N, BLOCK_M] fp32
    arrived_ptr,  # [n / BLOCK_N] int32, zeros before and after
    m,
    n,
    eps,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Several tokens: as _vector_kernel for each, with the weight as the left operand of the matrix unit."""
    # grid: (n / BLOCK_N, SPLITS)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    k_share: tl.constexpr = (K // BLOCK_K + SPLITS - 1) // SPLITS * BLOCK_K
    first = split * k_share
    last = min(first + k_share, K)
    row_ptr = weight_ptr + rows.to(tl.int64)[:, None] * K + ks[None, :]
    inside = (rows < n)[:, None]
    col_ptr = x_ptr + cols[None, :] * K + ks[:, None]
    live = (cols < m)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        weight = tl.load(row_ptr + start, mask=inside, other=0.0)
        x = tl.load(col_ptr + start, mask=live, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            x = (wide * tl.load(norm_ptr + start + ks).to(tl.float32)[:, None]).to(x.dtype)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
        if GATED:
            other = tl.load(row_ptr + n.to(tl.int64) * K + start, mask=inside, other=0.0)
            up = tl.dot(other, x, up, input_precision="ieee")
    at = cols[None, :] * n + rows[:, None]
    whole = inside & live
    finish = True
    if SPLITS > 1:
        planes: tl.constexpr = 2 if GATED else 1
        tl.store(partial_ptr + split * planes * m * n + at, acc, mask=whole)
        if GATED:
            tl.store(partial_ptr + (split * planes + 1) * m * n + at, up, mask=whole)
        tiles = tl.num_programs(0)
        if NORM:
            tl.store(squares_ptr + (split * tiles + tile) * BLOCK_M + cols, squares)
        tl.debug_barrier()
        finish = tl.atomic_add(arrived_ptr + tile, 1) == SPLITS - 1
        if finish:
            # Partial sums are always added in the same order.
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            squares = tl.zeros([BLOCK_M], tl.float32)
            for s in range(SPLITS):
                acc += tl.load(partial_ptr + s * planes * m * n + at, mask=whole, other=0.0, cache_modifier=".cg")
                if GATED:
                    up += tl.load(
                        partial_ptr + (s * planes + 1) * m * n + at, mask=whole, other=0.0, cache_modifier=".cg"
                    )
                if NORM:
                    squares += tl.load(squares_ptr + (s * tiles + tile) * BLOCK_M + cols, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if finish:
        out = acc
        scale = tl.full([BLOCK_M], 1.0, tl.float32)
        if NORM:
            scale = tl.rsqrt(squares / K + eps)
            out *= scale[None, :]
        if BIAS:
            out += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up *= scale[None, :]
            if BIAS:
                up += tl.load(bias_ptr + n + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
            out = out / (1.0 + tl.exp(-out)) * up
        if RESIDUAL:
            out += tl.load(residual_ptr + at, mask=whole, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=whole)


class Workspace:
    """Scratch memory of split launches. Each stream needs its own."""

    def __init__(self, device: torch.device, num_floats: int = 1 << 23, num_tiles: int = 1 << 14) -> None:
        self.partial = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.squares = torch.empty(num_tiles * MAX_TOKENS, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(num_tiles, dtype=torch.int32, device=device)


def small_linear(
    x: Tensor,
    weight: Tensor,
    workspace: Workspace | None,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Returns f(x) @ weight^T + bias [m, n] for x [m, k], m <= 64, weight [n, k] and bias [n] (gated: 2 n).

    `norm` [k] applies RMSNorm to x first; `gated` gives silu(first half) * second half; `residual` [m, n] is
    added last and may be `out` itself. With `batch_invariant`, a row's result does not depend on other rows, bit for
    bit, and equals matmul's; `norm` is not allowed, and no workspace is needed.
    """
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if tiling is None:
        shared_bytes = shared_memory(x.device)
        tiling = choose_tiling(m, n, k, gated, x.element_size(), shared_bytes, batch_invariant=batch_invariant)
    if batch_invariant and norm is not None:
        raise ValueError("a batch-invariant linear fuses no norm: apply rms_norm to x first")
    nothing = x
    overlap = overlaps(x)
    tiles = triton.cdiv(n, tiling.block_n)
    if m == 1 and not batch_invariant:
        _vector_kernel[(tiles,)](
            out,
            x,
            weight,
            nothing if bias is None else bias,
            nothing if norm is None else norm,
            nothing if residual is None else residual,
            n,
            eps,
            K=k,
            BIAS=bias is not None,
            NORM=norm is not None,
            GATED=gated,
            RESIDUAL=residual is not None,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            OVERLAP=overlap,
            num_warps=tiling.num_warps,
            launch_pdl=overlap,
        )
        return out
    if m > MAX_TOKENS:
        raise ValueError(f"x has {m} tokens; small_linear takes at most {MAX_TOKENS}")
    partial, squares, arrived = x, x, x
    if tiling.splits > 1:
        assert workspace is not None, f"{tiling} needs a workspace"
        partial, squares, arrived = workspace.partial, workspace.squares, workspace.arrived
        needed = tiling.splits * (2 if gated else 1) * m * n
        if needed > partial.numel() or tiles > arrived.numel():
            raise ValueError(
                f"{tiling} needs {needed} floats and {tiles} counters of workspace for [{m}, {k}] x [{n}, {k}]"
            )
    _matrix_kernel[(tiles, tiling.splits)](
        out,
        x,
        weight,
        nothing if bias is None else bias,
        nothing if norm is None else norm,
        nothing if residual is None else residual,
        partial,
        squares,
        arrived,
        m,
        n,
        eps,
        K=k,
        BIAS=bias is not None,
        NORM=norm is not None,
        GATED=gated,
        RESIDUAL=residual is not None,
        SPLITS=tiling.splits,
        BLOCK_M=_block_m(m),
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        STAGES=tiling.num_stages,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    return out


def choose_tiling(
    m: int,
    n: int,
    k: int,
    gated: bool,
    itemsize: int = 2,
    shared_bytes: int = 227 * 1024,
    *,
    batch_invariant: bool = False,
) -> Tiling:
    """Returns the tiling that a sweep on an H200 found best for the shape, or for the nearest one.

    With `batch_invariant`, returns one tiling for all m, with K in one piece. It has 64 rows of the weight, the minimum
    of Hopper's wgmma, so that all m run on the same unit.
    """
    if batch_invariant:
        wanted = Tiling(64, _dividing(128, k), 1, 4, 6) if itemsize < 4 else Tiling(64, _dividing(32, k), 1, 4, 2)
        return fitting(wanted, MAX_TOKENS, gated, itemsize, shared_bytes)
    if m == 1:
        if k >= 3072 and n > 32768 and not gated:
            return Tiling(4, 1024, 1, 4, 1)
        if k >= 3072:
            wide = k % 4096 == 0 and (gated or n > 8192)
            return (
                Tiling(block_n=1, block_k=4096, splits=1, num_warps=8, num_stages=1)
                if wide
                else Tiling(
                    block_n=1 if k > 4096 or n <= 4096 else 2, block_k=2048, splits=1, num_warps=8, num_stages=1
                )
            )
        if k > 2048 and not gated:  # steps of 2048 would be half empty
            return Tiling(4, 1024 if n > 32768 else 512, 1, 2, 1)
        return Tiling(4, 2048, 1, 4, 1) if k > 1024 else Tiling(4, 512, 1, 4, 1)
    if m > _SOME:
        wanted = _tiling_of_many(m, n)
    elif gated and n >= 8192:
        wanted = Tiling(128, 64, 1, 4, 4)
    elif n >= 8192:
        wanted = Tiling(128, 128, 1, 4, 3)
    elif n > 4096 or gated:
        wanted = Tiling(64, 64, 4, 4, 6)
    elif n > 2048:
        wanted = Tiling(64, 128, 2, 4, 6) if k >= 2048 else Tiling(64, 256, 2, 4, 4)
    else:
        wanted = Tiling(32, 256, 4, 4, 6)
    wanted = wanted._replace(block_k=_dividing(wanted.block_k, k))
    tiling = fitting(wanted, _block_m(m), gated, itemsize, shared_bytes)
    return tiling._replace(splits=min(tiling.splits, max(1, k // (2 * tiling.block_k))))


def _tiling_of_many(m: int, n: int) -> Tiling:
    """Returns the tiling for 17 to 64 tokens."""
    if n >= 32768:
        return Tiling(64, 128, 1, 4, 4)  # tiles fill the device without splits
    if n >= 4096:
        return Tiling(64, 256, 2, 4, 3) if m <= 48 else Tiling(64, 128, 2, 4, 4)
    if m <= 32:
        return Tiling(64, 256, 4, 4, 3)
    return Tiling(32, 256, 2 if n >= 2048 else 4, 4, 4)


def beats_blas(m: int, n: int, k: int) -> bool:
    """Returns whether small_linear of x [m, k] and weight [n, k] is faster than BLAS, by a sweep on an H100.

    Above 16 tokens, it is not for about 4096 x 4096, whose one round of tiles leaves a part of the device idle.
    """
    return m <= _SOME or n < 4096 or k > n


def fitting(tiling: Tiling, block_m: int, gated: bool, itemsize: int, shared_bytes: int) -> Tiling:
    """Returns the tiling with fewer stages, and then smaller steps, if shared memory does not suffice."""
    stages, block_k = tiling.num_stages, tiling.block_k
    row_bytes = (tiling.block_n * (2 if gated else 1) + block_m) * itemsize
    while stages > 2 and stages * block_k * row_bytes > shared_bytes - _SLACK:
        stages -= 1
    while block_k > 16 and stages * block_k * row_bytes > shared_bytes - _SLACK:
        block_k //= 2
    return tiling._replace(block_k=block_k, num_stages=stages)


def _dividing(block_k: int, k: int) -> int:
    while k % block_k:
        block_k //= 2
    return block_k


def _block_m(m: int) -> int:
    return max(16, int(triton.next_power_of_2(m)))
