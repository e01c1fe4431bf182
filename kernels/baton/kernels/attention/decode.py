"""Attention of one new token per sequence over its paged KV. A program computes a piece; a sequence's last merges."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.attention.decode_cuts import DecodeCuts, cut_sequences, max_pieces
from baton.kernels.attention.soft_cap import soft_capped
from baton.kernels.overlap import overlaps
from baton.kernels.table import HOPPER_DECODE, Case

_LOG2E = 1.4426950408889634
# One program per multiprocessor. More programs would each have to fill the memory pipeline again.
_FEW_PROGRAMS = 132
_MANY_PROGRAMS = 528  # of this file's kernel: four per multiprocessor of an H200
_FULL_DEVICE = 396  # cells from which whole sequences fill the device: three programs per multiprocessor
_MERGED_AT_ONCE = 4  # pieces; with more, registers do not suffice for a fourth program per multiprocessor
_MERGED_WIDTH = 512  # elements of each


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@triton.jit(do_not_specialize_on_alignment=["block_table_ptr", "rows_ptr"])
def _decode_kernel(
    out_ptr,  # [num_seqs, num_kv_heads * GROUP, HEAD_DIM]
    query_ptr,  # [num_seqs, num_kv_heads * GROUP, HEAD_DIM], rows of query_stride
    cache_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    block_table_ptr,  # [num_rows, table_stride] int32
    rows_ptr,  # [num_seqs] int32, each sequence's row of the block table
    pieces_ptr,  # [max_pieces, 4] int32, of DecodeCuts
    partial_ptr,  # [max_pieces, num_kv_heads, GROUP, HEAD_DIM] fp32
    lse_ptr,  # [max_pieces, num_kv_heads, GROUP] fp32, base 2
    arrived_ptr,  # [num_seqs, num_kv_heads] int32, zero before and after
    kv_scale_ptr,  # [2, num_kv_heads] fp32
    sinks_ptr,  # [num_kv_heads * GROUP]
    scale_log2,
    query_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    MERGED: tl.constexpr,
    WIDTH: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # in base 2; 0: none
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = softmax(cap tanh(scale q K^T / cap), sink) V, each piece over its part of K and V"""
    # grid: (max_pieces * NUM_KV_HEADS)
    head = tl.program_id(0) % NUM_KV_HEADS
    piece = tl.program_id(0) // NUM_KV_HEADS
    head_size: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    side_size: tl.constexpr = NUM_KV_HEADS * head_size
    if OVERLAP:
        gdc_launch_dependents()
    # Pieces and block tables are written before the previous kernel, so they are read without waiting for it.
    seq = tl.load(pieces_ptr + piece * 4)
    first = tl.load(pieces_ptr + piece * 4 + 1)
    last = tl.load(pieces_ptr + piece * 4 + 2)
    packed = tl.load(pieces_ptr + piece * 4 + 3)
    table_row = block_table_ptr + tl.load(rows_ptr + max(seq, 0)).to(tl.int64) * table_stride
    if seq < 0:
        # One program waits, so that this kernel ends after the previous one; the others free resources for the next.
        if OVERLAP:  # noqa: SIM102 - decided at compile time
            if tl.program_id(0) == 0:
                gdc_wait()
        return
    if OVERLAP:
        gdc_wait()

    groups = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    tokens = tl.arange(0, BLOCK_N)
    real = (groups < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = head * GROUP + groups
    query = tl.load(
        query_ptr + seq.to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0
    )
    if SCALED:
        scale_log2 *= tl.load(kv_scale_ptr + head)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    if SINKS:
        # The first piece has the sequence's sinks.
        has = groups < tl.where(packed & 0xFFFF == 0, GROUP, 0)
        top, total = _add_sinks(top, total, sinks_ptr + heads, has)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        position = start + tokens
        valid = position < last
        block = tl.load(table_row + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        at = block * (2 * side_size) + head * head_size + (position % BLOCK_SIZE) * HEAD_DIM
        where = at[:, None] + dims[None, :]
        mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(cache_ptr + where, mask=mask, other=0.0).to(query.dtype)
        value = tl.load(cache_ptr + side_size + where, mask=mask, other=0.0).to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        if SOFT_CAP > 0:
            score = soft_capped(score, SOFT_CAP)
        score = tl.where(valid[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    acc = acc / total[:, None]
    if SCALED:
        acc *= tl.load(kv_scale_ptr + NUM_KV_HEADS + head)
    inner = groups[:, None] * HEAD_DIM + dims[None, :]
    plane: tl.constexpr = GROUP * HEAD_DIM
    out_ptr += (seq.to(tl.int64) * NUM_KV_HEADS + head) * plane
    num_pieces = packed >> 16
    if num_pieces == 1:
        tl.store(out_ptr + inner, acc.to(out_ptr.dtype.element_ty), mask=real)
        return
    place = piece.to(tl.int64) * NUM_KV_HEADS + head
    tl.store(partial_ptr + place * plane + inner, acc, mask=real)
    tl.store(lse_ptr + place * GROUP + groups, top + tl.log2(total), mask=groups < GROUP)
    tl.debug_barrier()
    arrived_at = arrived_ptr + seq * NUM_KV_HEADS + head
    if tl.atomic_add(arrived_at, 1) == num_pieces - 1:
        begin = (piece - (packed & 0xFFFF)).to(tl.int64) * NUM_KV_HEADS + head
        merge_pieces(out_ptr, partial_ptr, lse_ptr, begin, NUM_KV_HEADS, num_pieces, GROUP, HEAD_DIM, MERGED, WIDTH)
        tl.store(arrived_at, 0)


@triton.jit
def _add_sinks(top, total, sinks_ptr, has):
    """Returns top and total with the scores at sinks_ptr where `has`."""
    sinks = tl.load(sinks_ptr, mask=has, other=0.0).to(tl.float32) * 1.4426950408889634  # in base 2
    return tl.where(has, sinks, top), tl.where(has, 1.0, total)


@triton.jit
def merge_pieces(
    out_ptr,  # [GROUP, HEAD_DIM]
    partial_ptr,
    lse_ptr,
    begin,  # the first piece's row of partial and lse
    stride,  # rows from one piece to the next
    num_pieces,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out = sum_s 2^(lse_s - max) partial_s / sum_s 2^(lse_s - max), always in the order of the pieces"""
    plane: tl.constexpr = GROUP * HEAD_DIM
    for at in range(0, plane, WIDTH):
        cols = at + tl.arange(0, WIDTH)
        top = tl.full([WIDTH], -1.0e30, tl.float32)
        total = tl.zeros([WIDTH], tl.float32)
        acc = tl.zeros([WIDTH], tl.float32)
        for some in range(0, num_pieces, MERGED):
            pieces = some + tl.arange(0, MERGED)
            live = (pieces < num_pieces)[:, None] & (cols < plane)[None, :]
            rows = (begin + pieces * stride)[:, None]
            lse_at = lse_ptr + rows * GROUP + (cols // HEAD_DIM)[None, :]
            lse = tl.load(lse_at, mask=live, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(partial_ptr + rows * plane + cols[None, :], mask=live, other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, tl.max(lse, 0))
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(lse - new_top[None, :])
            acc = acc * shrink + tl.sum(part * weight, 0)
            total = total * shrink + tl.sum(weight, 0)
            top = new_top
        total = tl.where(cols < plane, total, 1.0)
        tl.store(out_ptr + cols, (acc / total).to(out_ptr.dtype.element_ty), mask=cols < plane)


class DecodeWorkspace:
    """Scratch memory of cut sequences. Each stream needs its own."""

    def __init__(
        self,
        max_seqs: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        *,
        batch_invariant: bool = False,
    ) -> None:
        rows = max_pieces(max_seqs, num_kv_heads, 0 if batch_invariant else _MANY_PROGRAMS) * num_q_heads
        self.partial = torch.empty(rows * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_seqs * num_kv_heads, dtype=torch.int32, device=device)


def cut_for_decode(
    seq_lens: Tensor,
    cache: Tensor,
    dtype: torch.dtype,
    *,
    quantized: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    batch_invariant: bool = False,
) -> DecodeCuts:
    """Returns cuts for `decode_attention` of `num_seqs` sequences over a pool, with queries of `dtype`.

    One call serves all layers of a step that have the same `window`.
    """
    num_seqs, num_kv_heads = seq_lens.shape[0], cache.shape[-3]
    few = num_seqs * num_kv_heads in HOPPER_DECODE.cells and not quantized
    few = few and _has_hopper_kernel(cache, dtype, window > 0, soft_cap > 0, sinks)
    programs = _FEW_PROGRAMS if few else _MANY_PROGRAMS
    return cut_sequences(seq_lens, num_kv_heads, 0 if batch_invariant else programs, window=window)


def decode_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    cuts: DecodeCuts,
    scale: float,
    workspace: DecodeWorkspace,
    *,
    out: Tensor | None = None,
    kv_scale: Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    block_n: int | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Tensor:
    """Computes attention of query [num_seqs, num_q_heads, head_dim] over each sequence's tokens, cut by `cuts`.

    cache [num_blocks, 2, num_kv_heads, block_size, head_dim], block_table [num_rows, max_blocks] and rows [num_seqs]
    (each sequence's row of the table) are int32. The output of a sequence without pieces is not written. On Hopper,
    block_table, rows and cuts must be complete before the previous kernel starts. `kv_scale` [2, num_kv_heads] fp32
    multiplies keys and values of a quantized cache. `sinks` [num_q_heads] are scores without a value that join each
    softmax. With batch-invariant cuts, for which the workspace must be created,
    a sequence's result does not depend on the rest of the batch, bit for bit.
    """
    num_seqs, num_q_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    num_pieces = cuts.pieces.shape[0]
    if out is None:
        out = torch.empty(num_seqs, num_q_heads, head_dim, dtype=query.dtype, device=query.device)
    rows_needed, cells = num_pieces * num_q_heads, num_seqs * num_kv_heads
    if rows_needed > workspace.lse.numel() or cells > workspace.arrived.numel():
        raise ValueError(
            f"{num_pieces} pieces of {num_seqs} sequences need {rows_needed} rows and {cells} counters of workspace, "
            f"it has {workspace.lse.numel()} and {workspace.arrived.numel()}"
        )
    few = cuts.programs == _FEW_PROGRAMS and kv_scale is None
    # Whether there is a window was decided with the cuts.
    if few and _has_hopper_kernel(cache, query.dtype, False, soft_cap > 0, sinks is not None):
        arguments = (out, query, cache, block_table, rows, cuts.pieces)
        scratch = (workspace.partial, workspace.lse, workspace.arrived)
        more = {"soft_cap_log2": soft_cap * _LOG2E, "sinks": sinks}
        _hopper_kernel()(*arguments, *scratch, scale * _LOG2E, **more)
        return out
    group = num_q_heads // num_kv_heads
    if block_n is None:
        whole = cuts.programs > 0 and num_seqs * num_kv_heads >= _FULL_DEVICE
        block_n = choose_block_n(whole, head_dim, query.element_size())
    overlap = overlaps(query)
    _decode_kernel[(num_pieces * num_kv_heads,)](
        out,
        query,
        cache,
        block_table,
        rows,
        cuts.pieces,
        workspace.partial,
        workspace.lse,
        workspace.arrived,
        workspace.lse if kv_scale is None else kv_scale,
        workspace.lse if sinks is None else sinks,
        scale * _LOG2E,
        query.stride(0),
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        SCALED=kv_scale is not None,
        STAGES=num_stages,
        MERGED=_MERGED_AT_ONCE,
        WIDTH=min(_MERGED_WIDTH, triton.next_power_of_2(group * head_dim)),
        SOFT_CAP=soft_cap * _LOG2E,
        SINKS=sinks is not None,
        num_warps=num_warps,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
    return out


def choose_block_n(whole: bool, head_dim: int, itemsize: int) -> int:
    """Returns the keys per tile, so that tiles of K and V with DIM_PAD * itemsize bytes per key take less than 99 KB.

    `whole`: there are enough sequences to fill the device, and few are cut.
    """
    if head_dim > 256:
        return 16
    if itemsize == 4:
        return 32 if head_dim <= 128 else 16  # without matrix units, larger tiles do not fit the registers
    return 64 if whole or head_dim > 128 else 128


def _has_hopper_kernel(cache: Tensor, dtype: torch.dtype, window: bool, soft_cap: bool, sinks: bool) -> bool:
    if not cache.is_cuda:
        return False
    capability, _ = torch.cuda.get_device_capability(cache.device)
    shape = (capability, dtype, cache.dtype, cache.shape[-1], cache.shape[-2])
    return _serves_hopper(*shape, window, soft_cap, sinks)


@functools.cache
def _serves_hopper(
    capability: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    head_dim: int,
    block_size: int,
    window: bool,
    soft_cap: bool,
    sinks: bool,
) -> bool:
    case = Case("cuda", capability, dtype, stored, head_dim, block_size, window=window, soft_cap=soft_cap, sinks=sinks)
    return HOPPER_DECODE.serves(case)


@functools.cache
def _hopper_kernel() -> Callable[..., None]:
    return HOPPER_DECODE.load()
