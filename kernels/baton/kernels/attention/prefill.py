"""Causal attention of prompt chunks over the paged KV of their sequences, including cached prefixes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.attention.soft_cap import soft_capped
from baton.kernels.shared_memory import shared_memory

_LOG2E = 1.4426950408889634
_HOPPER_SHARED = 227 * 1024
TILE_ROWS = 128
MAX_PLACES = 132  # programs of one wave on an H200, and the most parts over all heads
_KEYS = 128  # parts are multiples of this number of keys
_LEAST_SHARE = 2  # of _KEYS; shorter parts cost more than they save
_MOST_PARTS = 16  # per tile


@triton.jit
def _tile(
    acc,
    top,
    total,
    query,
    positions,
    table_row,
    key_base,
    value_base,
    block_stride,
    start,
    last,
    scale_log2,
    window,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Returns acc, top and total of the online softmax in base 2 after one tile of keys."""
    tokens = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, DIM_PAD)
    block = tl.load(table_row + tokens // BLOCK_SIZE, mask=tokens < last, other=0)
    at = block.to(tl.int64) * block_stride + (tokens % BLOCK_SIZE) * HEAD_DIM
    where = at[:, None] + dims[None, :]
    if MASKED or DIM_PAD != HEAD_DIM:
        mask = (tokens < last)[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(key_base + where, mask=mask, other=0.0)
        value = tl.load(value_base + where, mask=mask, other=0.0)
    else:
        key = tl.load(key_base + where)
        value = tl.load(value_base + where)
    key = key.to(query.dtype)
    value = value.to(query.dtype)
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFT_CAP > 0:
        score = soft_capped(score * scale_log2, SOFT_CAP)
        scale_log2 = 1.0
    if MASKED:
        hidden = tokens[None, :] > positions[:, None]
        hidden |= (window > 0) & (tokens[None, :] <= positions[:, None] - window)
        score = tl.where(hidden, float("-inf"), score)
    new_top = tl.maximum(top, tl.max(score, 1) * scale_log2)
    weight = tl.exp2(score * scale_log2 - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@triton.jit(
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "rows_ptr",
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "tile_seq_ptr",
        "tile_start_ptr",
    ]
)
def _prefill_kernel(
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    query_ptr,  # [num_tokens, num_q_heads, HEAD_DIM], rows of query_stride
    cache_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    block_table_ptr,  # [num_rows, table_stride] int32
    rows_ptr,  # [num_seqs] int32, each sequence's row of the block table
    seq_lens_ptr,  # [num_seqs] int32, including the chunk
    query_start_loc_ptr,  # [num_seqs + 1] int32
    tile_seq_ptr,  # [num_tiles] int32
    tile_start_ptr,  # [num_tiles] int32, within the chunk
    kv_scale_ptr,  # [2, num_kv_heads] fp32
    sinks_ptr,  # [num_q_heads]
    scale_log2,
    query_stride,
    table_stride,
    num_kv_heads,
    window,  # keys that a query attends to, including its own; 0: all
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,  # programs per tile
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # in base 2; 0: none
    SINKS: tl.constexpr,
):
    """out_i = softmax_{j <= i}(cap tanh(scale q_i k_j / cap), sink) v_j"""
    # grid: (num_q_heads, num_tiles * PARTS)
    head = tl.program_id(0)
    tile = tl.program_id(1) // PARTS
    seq = tl.load(tile_seq_ptr + tile)
    offset = tl.load(tile_start_ptr + tile) + tl.program_id(1) % PARTS * BLOCK_M
    first_row = tl.load(query_start_loc_ptr + seq)
    num_rows = tl.load(query_start_loc_ptr + seq + 1) - first_row
    if PARTS > 1:  # noqa: SIM102 - decided at compile time
        if offset >= num_rows:
            return
    seq_len = tl.load(seq_lens_ptr + seq)

    rows = offset + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM_PAD)
    real = (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    token = (first_row + rows).to(tl.int64)[:, None]
    query = tl.load(query_ptr + token * query_stride + head * HEAD_DIM + dims[None, :], mask=real, other=0.0)
    positions = seq_len - num_rows + rows
    side = BLOCK_SIZE * HEAD_DIM
    key_base = cache_ptr + (head // GROUP) * side
    value_base = key_base + num_kv_heads * side
    block_stride = 2 * num_kv_heads * side
    table_row = block_table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride

    last = min(seq_len - num_rows + offset + BLOCK_M, seq_len)
    first_position = seq_len - num_rows + offset
    unmasked = (first_position + 1) // BLOCK_N * BLOCK_N
    begin = 0
    if window > 0:
        # Every tile may have masked keys on both sides.
        begin = max(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        unmasked = begin
    if SCALED:
        scale_log2 *= tl.load(kv_scale_ptr + head // GROUP)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    # Finite, so that a tile that is masked for a row gives 2^(-inf - top) = 0 and not NaN.
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        top = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    for start in tl.range(begin, unmasked, BLOCK_N, num_stages=STAGES):
        acc, top, total = _tile(
            acc, top, total, query, positions, table_row, key_base, value_base, block_stride, start, last, scale_log2,
            window, False, BLOCK_SIZE, HEAD_DIM, DIM_PAD, BLOCK_N, SOFT_CAP,
        )  # fmt: skip
    for start in tl.range(unmasked, last, BLOCK_N, num_stages=1):
        acc, top, total = _tile(
            acc, top, total, query, positions, table_row, key_base, value_base, block_stride, start, last, scale_log2,
            window, True, BLOCK_SIZE, HEAD_DIM, DIM_PAD, BLOCK_N, SOFT_CAP,
        )  # fmt: skip
    acc = acc / total[:, None]
    if SCALED:
        acc *= tl.load(kv_scale_ptr + num_kv_heads + head // GROUP)
    num_q_heads = tl.num_programs(0)
    tl.store(
        out_ptr + (token * num_q_heads + head) * HEAD_DIM + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=real,
    )


class PrefillTiles(NamedTuple):
    """The rows of each program, computed on the host from the chunk lengths."""

    seq: Tensor  # [num_tiles] int32
    start: Tensor  # [num_tiles] int32
    # If tiles do not fill the device: [num_parts, 4] int32, with the parts of a tile in sequence: sequence, first row,
    # index | count << 16, and the index in scratch memory of the tile's first part.
    parts: Tensor | None = None


class Blocks(NamedTuple):
    """The cuts of queries and keys for one launch."""

    block_m: int  # queries per program
    block_n: int  # keys per step
    num_warps: int
    num_stages: int


def make_tiles(
    chunk_lens: list[int], prefix_lens: list[int], tile_rows: int, device: torch.device, num_q_heads: int = 0
) -> PrefillTiles:
    """Cuts chunks into tiles of tile_rows rows. Tiles with most keys come first, so that no long tile starts last.

    With `num_q_heads`, which have separate programs, cuts tiles further into parts of similar length if there are few.
    """
    tiles = [
        (prefix + start, seq, start)
        for seq, (chunk, prefix) in enumerate(zip(chunk_lens, prefix_lens, strict=True))
        for start in range(0, chunk, tile_rows)
    ]
    tiles.sort(reverse=True)
    flat = [seq for _, seq, _ in tiles] + [start for _, _, start in tiles]
    counts = _part_counts([before + tile_rows for before, _, _ in tiles], num_q_heads)
    if max(counts, default=1) > 1:
        place = 0
        for (_, seq, start), count in zip(tiles, counts, strict=True):
            for number in range(count):
                flat += [seq, start, number | count << 16, place]
            place += count if count > 1 else 0
    table = torch.tensor(flat, dtype=torch.int32).to(device, non_blocking=True)
    numbers, parts = table[: 2 * len(tiles)].view(2, -1), table[2 * len(tiles) :].view(-1, 4)
    return PrefillTiles(numbers[0], numbers[1], parts if len(parts) else None)


def _part_counts(num_keys: list[int], num_q_heads: int) -> list[int]:
    """Returns the number of parts of each tile, by its share of all keys in one wave of programs."""
    if num_q_heads * len(num_keys) >= MAX_PLACES or not num_q_heads:
        return [1] * len(num_keys)
    steps = [-(-keys // _KEYS) for keys in num_keys]
    share = max(_LEAST_SHARE, sum(steps) * num_q_heads / MAX_PLACES)
    return [max(1, min(_MOST_PARTS, int(count / share))) for count in steps]


def choose_blocks(head_dim: int, itemsize: int, shared_bytes: int) -> Blocks:
    """Returns the largest blocks whose Q, K and V fit shared memory and registers."""
    if head_dim > 256:
        return Blocks(16, 16, 4, 1) if itemsize == 4 else Blocks(32, 32, 8, 2)
    if itemsize == 4:
        # Without matrix units, larger blocks do not fit the registers.
        return Blocks(32, 32 if head_dim <= 128 else 16, 4, 2)
    if head_dim <= 128:
        return Blocks(128, 64, 8, 3)
    return Blocks(128, 64, 8, 2) if shared_bytes >= _HOPPER_SHARED else Blocks(64, 32, 8, 2)


def prefill_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    tiles: PrefillTiles,
    scale: float,
    *,
    out: Tensor | None = None,
    kv_scale: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    tile_rows: int = TILE_ROWS,
    blocks: Blocks | None = None,
) -> Tensor:
    """Computes causal attention of query [num_tokens, num_q_heads, head_dim], the last tokens of each sequence, over
    keys and values of all its tokens in cache [num_blocks, 2, num_kv_heads, block_size, head_dim].

    block_table [num_rows, max_blocks], rows [num_seqs] (each sequence's row of the table), seq_lens [num_seqs],
    query_start_loc [num_seqs + 1], all int32. `window` > 0 limits each query to its last keys. `kv_scale`
    [2, num_kv_heads] fp32 multiplies keys and values of a quantized cache. `soft_cap` > 0 makes scores
    soft_cap * tanh(score / soft_cap). `sinks` [num_q_heads] are scores without a value that join each softmax.
    `tile_rows` is that of `tiles`. A row's result does not depend on how its prompt is cut into chunks.
    """
    num_tokens, num_q_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    if out is None:
        out = torch.empty(num_tokens, num_q_heads, head_dim, dtype=query.dtype, device=query.device)
    if blocks is None:
        blocks = choose_blocks(head_dim, query.element_size(), shared_memory(query.device))
    block_m = min(blocks.block_m, tile_rows)
    parts = tile_rows // block_m
    _prefill_kernel[(num_q_heads, tiles.seq.shape[0] * parts)](
        out,
        query,
        cache,
        block_table,
        rows,
        seq_lens,
        query_start_loc,
        tiles.seq,
        tiles.start,
        query if kv_scale is None else kv_scale,
        query if sinks is None else sinks,
        scale * _LOG2E,
        query.stride(0),
        block_table.stride(0),
        num_kv_heads,
        window,
        GROUP=num_q_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=blocks.block_n,
        PARTS=parts,
        SCALED=kv_scale is not None,
        STAGES=blocks.num_stages,
        SOFT_CAP=soft_cap * _LOG2E,
        SINKS=sinks is not None,
        num_warps=blocks.num_warps,
    )
    return out
