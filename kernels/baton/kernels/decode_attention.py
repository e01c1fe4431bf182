"""Attention of one new token a sequence over its paged KV, split over the sequence; a second launch merges."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps

_LOG2E = 1.4426950408889634
_FEW_PROGRAMS = 132  # of the Hopper kernel
_FEW_CELLS = 264  # sequences times kv heads up to which it is the faster one
_MERGE_WARPS = 1  # more would wait for each other longer than they work
_FULL_DEVICE = 396  # programs: three on each multiprocessor of an H200
# With these, where a sequence is cut, and so the order of its sums, depends on its length alone.
INVARIANT_SPLITS = 16


# Slices of one buffer come at any alignment; each would be compiled on its own.
@triton.jit(do_not_specialize_on_alignment=["block_table_ptr", "rows_ptr", "seq_lens_ptr"])
def _decode_kernel(
    out_ptr,  # [num_seqs, num_kv_heads * GROUP, HEAD_DIM]
    query_ptr,  # [num_seqs, num_kv_heads * GROUP, HEAD_DIM], rows of query_stride
    cache_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    block_table_ptr,  # [num_rows, table_stride] int32
    rows_ptr,  # [num_seqs] int32, each sequence's row of the block table
    seq_lens_ptr,  # [num_seqs] int32; 0 leaves the row unwritten
    partial_ptr,  # [num_seqs, num_kv_heads, SPLITS, GROUP, HEAD_DIM] fp32
    lse_ptr,  # [num_seqs, num_kv_heads, SPLITS, GROUP] fp32, base 2
    kv_scale_ptr,  # [2, num_kv_heads] fp32
    scale_log2,
    query_stride,
    table_stride,
    window,  # keys that the query sees, itself included; 0: all
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = softmax(scale q K^T) V, each split over its share of K and V"""
    # grid: (num_kv_heads, SPLITS, num_seqs)
    head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    head_size: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    side_size = num_kv_heads * head_size
    if OVERLAP:
        gdc_launch_dependents()
    # Lengths and block tables are older than the kernel before, which need not be waited for to read them.
    seq_len = tl.load(seq_lens_ptr + seq)
    table_row = block_table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
    seen_from = tl.where(window > 0, max(seq_len - window, 0), 0)
    num_seen = seq_len - seen_from
    share = _share(num_seen, SPLITS, BLOCK_N)
    first = seen_from + split * share
    if OVERLAP:
        gdc_wait()
    if first >= seq_len:
        return
    last = min(first + share, seq_len)

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
        score = tl.where(valid[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    acc = acc / total[:, None]
    if SCALED:
        acc *= tl.load(kv_scale_ptr + num_kv_heads + head)
    out_at = (seq.to(tl.int64) * num_kv_heads * GROUP + heads[:, None]) * HEAD_DIM + dims[None, :]
    num_live = min(tl.cdiv(num_seen, share), SPLITS)
    if num_live == 1:
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=real)
        return
    cell = seq.to(tl.int64) * num_kv_heads + head
    inner = groups[:, None] * HEAD_DIM + dims[None, :]
    plane: tl.constexpr = GROUP * HEAD_DIM
    tl.store(partial_ptr + (cell * SPLITS + split) * plane + inner, acc, mask=real)
    tl.store(lse_ptr + (cell * SPLITS + split) * GROUP + groups, top + tl.log2(total), mask=groups < GROUP)


@triton.jit
def _share(num_seen, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tokens a split: whole tiles, and so many that a short sequence is not split at all."""
    return max(tl.cdiv(tl.cdiv(num_seen, SPLITS), BLOCK_N) * BLOCK_N, 2 * BLOCK_N)


@triton.jit(do_not_specialize_on_alignment=["seq_lens_ptr"])
def _merge_kernel(
    out_ptr,  # [num_seqs, num_q_heads, HEAD_DIM]
    partial_ptr,  # [num_seqs, num_kv_heads, SPLITS, GROUP, HEAD_DIM] fp32
    lse_ptr,  # [num_seqs, num_kv_heads, SPLITS, GROUP] fp32, base 2
    seq_lens_ptr,  # [num_seqs] int32
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = sum_s 2^(lse_s - max) partial_s / sum_s 2^(lse_s - max)"""
    # grid: (num_q_heads, num_seqs)
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
    seq_len = tl.load(seq_lens_ptr + seq)
    if OVERLAP:
        gdc_wait()
    num_seen = tl.where(window > 0, min(seq_len, window), seq_len)
    num_live = min(tl.cdiv(num_seen, _share(num_seen, SPLITS, BLOCK_N)), SPLITS)
    if num_live <= 1:
        return
    num_q_heads = tl.num_programs(0)
    first = (seq * (num_q_heads // GROUP) + head // GROUP) * SPLITS
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM_PAD)
    at = (first + splits) * GROUP + head % GROUP
    lse = tl.load(lse_ptr + at, mask=splits < num_live, other=float("-inf"))
    mask = (splits < num_live)[:, None] & (dims < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    weight = tl.exp2(lse - tl.max(lse, 0))
    out = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(
        out_ptr + (seq * num_q_heads + head) * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM
    )


class DecodeWorkspace:
    """Scratch memory of split launches; one for each stream."""

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
        rows = max_seqs * INVARIANT_SPLITS if batch_invariant else max_seqs_times_splits(max_seqs, num_kv_heads)
        self.partial = torch.empty(rows * num_q_heads * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows * num_q_heads, dtype=torch.float32, device=device)


def choose_splits(num_seqs: int, num_kv_heads: int) -> int:
    """Programs a sequence and head, so that the device is full: a power of two, at most 64."""
    wanted = _FULL_DEVICE / max(1, num_seqs * num_kv_heads)
    splits = 1
    while splits < wanted and splits < 64:
        splits *= 2
    return splits


def max_seqs_times_splits(max_seqs: int, num_kv_heads: int) -> int:
    """The most rows that any number of sequences up to max_seqs needs."""
    return max(count * choose_splits(count, num_kv_heads) for count in range(1, max_seqs + 1))


def choose_block_n(splits: int, head_dim: int, itemsize: int) -> int:
    """Keys a tile, so that tiles of K and V of DIM_PAD * itemsize bytes a key take less than 99 KB."""
    if itemsize == 4:
        return 32 if head_dim <= 128 else 16  # without matrix units, larger tiles do not fit the registers
    return 64 if splits == 1 or head_dim > 128 else 128


def decode_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    *,
    out: Tensor | None = None,
    kv_scale: Tensor | None = None,
    splits: int | None = None,
    batch_invariant: bool = False,
    window: int = 0,
    block_n: int | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Tensor:
    """Attention of query [num_seqs, num_q_heads, head_dim] over each sequence's first seq_lens tokens.

    cache [num_blocks, 2, num_kv_heads, block_size, head_dim], block_table [num_rows, max_blocks], rows [num_seqs]
    (each sequence's row of the table) and seq_lens [num_seqs] (0: padding, stays unwritten) are int32.
    On Hopper, block_table, rows and seq_lens must be complete before the kernel in front of this one starts.
    `window` > 0 hides all but so many last keys. `kv_scale` [2, num_kv_heads] fp32 is what keys and values of a
    quantized cache are multiplied with. `batch_invariant` makes a sequence's result the same, bit for bit, whatever
    shares the batch; the workspace must be made for it.
    """
    num_seqs, num_q_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    group = num_q_heads // num_kv_heads
    if out is None:
        out = torch.empty(num_seqs, num_q_heads, head_dim, dtype=query.dtype, device=query.device)
    plain = splits is None and not (window or batch_invariant or kv_scale is not None)
    if plain and num_seqs * num_kv_heads <= _FEW_CELLS and _is_hopper(cache):
        from baton.kernels.decode_attention_hopper import MIN_SHARE, split_decode, supports

        if supports(query, cache):
            # One program a multiprocessor; with more of them, each would begin anew to fill its memory pipeline.
            splits = _power_of_two_below(_FEW_PROGRAMS // (num_seqs * num_kv_heads))
            split_decode(
                out, query, cache, block_table, rows, seq_lens, workspace.partial, workspace.lse, scale * _LOG2E, splits
            )
            _merge(out, workspace, seq_lens, 0, num_kv_heads, MIN_SHARE // 2, splits)
            return out
    if splits is None:
        splits = INVARIANT_SPLITS if batch_invariant else choose_splits(num_seqs, num_kv_heads)
    needed = num_seqs * num_q_heads * splits
    if splits > 1 and needed > workspace.lse.numel():
        raise ValueError(
            f"{splits} splits of {num_seqs} sequences need {needed} rows of workspace, it has {workspace.lse.numel()}"
        )
    if block_n is None:
        block_n = choose_block_n(splits, head_dim, query.element_size())
    overlap = overlaps(query)
    _decode_kernel[(num_kv_heads, splits, num_seqs)](
        out,
        query,
        cache,
        block_table,
        rows,
        seq_lens,
        workspace.partial,
        workspace.lse,
        workspace.lse if kv_scale is None else kv_scale,
        scale * _LOG2E,
        query.stride(0),
        block_table.stride(0),
        window,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        SPLITS=splits,
        SCALED=kv_scale is not None,
        STAGES=num_stages,
        num_warps=num_warps,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
    _merge(out, workspace, seq_lens, window, num_kv_heads, block_n, splits)
    return out


def _power_of_two_below(count: int) -> int:
    """The largest that is at most max(count, 1)."""
    return 1 << max(count.bit_length() - 1, 0)


def _is_hopper(cache: Tensor) -> bool:
    return cache.is_cuda and torch.cuda.get_device_capability(cache.device)[0] == 9


def _merge(
    out: Tensor,
    workspace: DecodeWorkspace,
    seq_lens: Tensor,
    window: int,
    num_kv_heads: int,
    block_n: int,
    splits: int,
) -> None:
    """The second launch, where there are splits."""
    if splits == 1:
        return
    num_seqs, num_q_heads, head_dim = out.shape
    overlap = overlaps(out)
    _merge_kernel[(num_q_heads, num_seqs)](
        out,
        workspace.partial,
        workspace.lse,
        seq_lens,
        window,
        GROUP=num_q_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_N=block_n,
        SPLITS=splits,
        OVERLAP=overlap,
        num_warps=_MERGE_WARPS,
        launch_pdl=overlap,
    )
