"""Causal attention of prompt chunks over paged latents, whose keys and values are made for all heads.

In passes, so that the made keys and values take a fixed memory: each pass gathers vectors, makes keys and values of
them by one matrix product, and continues the online softmax of the passes before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.attention.latent_passes import KEYS, TILE_ROWS, LatentPass, LatentTiles
from baton.kernels.shared_memory import shared_memory
from baton.kernels.table import HOPPER_LATENT_PREFILL, Case

_LOG2E = 1.4426950408889634
_HOPPER_SHARED = 227 * 1024
_WIDE = 128 + 64 + 128
_HOPPER_WIDTHS = (128, 64, 128)  # of keys without a position, of those with, and of values


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@triton.jit(do_not_specialize_on_alignment=["block_table_ptr", "rows_ptr", "starts_ptr", "firsts_ptr", "parts_ptr"])
def _gather_kernel(
    out_ptr,  # [num_keys, DIM]
    cache_ptr,  # [num_blocks, BLOCK_SIZE, DIM]
    block_table_ptr,  # [num_rows, table_stride] int32
    rows_ptr,  # [num_seqs] int32
    starts_ptr,  # [num_seqs + 1] int32
    firsts_ptr,  # [num_seqs] int32
    parts_ptr,  # [num_parts, 2] int32
    table_stride,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[starts_s + i] = the vector of token firsts_s + i of sequence s"""
    # grid: (num_parts)
    seq = tl.load(parts_ptr + tl.program_id(0) * 2)
    keys = tl.load(parts_ptr + tl.program_id(0) * 2 + 1) + tl.arange(0, BLOCK_N)
    start = tl.load(starts_ptr + seq)
    real = keys < tl.load(starts_ptr + seq + 1) - start
    position = tl.load(firsts_ptr + seq) + keys
    table_row = block_table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
    block = tl.load(table_row + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    dims = tl.arange(0, DIM_PAD)
    mask = real[:, None] & (dims < DIM)[None, :]
    at = (block * BLOCK_SIZE + position % BLOCK_SIZE) * DIM
    values = tl.load(cache_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + (start + keys).to(tl.int64)[:, None] * DIM + dims[None, :], values, mask=mask)


@triton.jit
def _key_tile(
    acc, top, total, plain, rotated, positions, made_at, latents_at, first, start, count, made_stride, scale_log2,
    MASKED: tl.constexpr, NOPE_DIM: tl.constexpr, NOPE_PAD: tl.constexpr, KV_RANK: tl.constexpr, ROPE_DIM: tl.constexpr,
    ROPE_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns acc, top and total of the online softmax in base 2 after one tile of keys."""
    keys = start + tl.arange(0, BLOCK_N)
    real = (keys < count)[:, None]
    nopes = tl.arange(0, NOPE_PAD)
    turns = tl.arange(0, ROPE_PAD)
    dims = tl.arange(0, VALUE_PAD)
    rows = keys.to(tl.int64)[:, None]
    at = made_at + rows * made_stride
    key = tl.load(at + nopes[None, :], mask=real & (nopes < NOPE_DIM)[None, :], other=0.0)
    value = tl.load(at + NOPE_DIM + dims[None, :], mask=real & (dims < VALUE_DIM)[None, :], other=0.0)
    turned_at = latents_at + rows * (KV_RANK + ROPE_DIM) + KV_RANK
    turned = tl.load(turned_at + turns[None, :], mask=real & (turns < ROPE_DIM)[None, :], other=0.0)
    score = tl.dot(rotated, tl.trans(turned), input_precision="ieee")
    score = tl.dot(plain, tl.trans(key), score, input_precision="ieee")
    if MASKED:
        hidden = (first + keys)[None, :] > positions[:, None]
        hidden |= (keys >= count)[None, :]
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
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "starts_ptr",
        "firsts_ptr",
        "tile_seq_ptr",
        "tile_start_ptr",
    ]
)
def _latent_prefill_kernel(
    out_ptr,  # [num_tokens, num_heads, VALUE_DIM]
    query_ptr,  # [num_tokens, num_heads, NOPE_DIM + ROPE_DIM], rows of query_stride
    made_ptr,  # [num_keys, num_heads, NOPE_DIM + VALUE_DIM]
    latents_ptr,  # [num_keys, KV_RANK + ROPE_DIM]
    partial_ptr,  # [num_tokens, num_heads, VALUE_DIM] fp32, of queries that are continued
    lse_ptr,  # [num_tokens, num_heads] fp32, base 2
    seq_lens_ptr,  # [num_seqs] int32, including the chunk
    query_start_loc_ptr,  # [num_seqs + 1] int32
    starts_ptr,  # [num_seqs + 1] int32
    firsts_ptr,  # [num_seqs] int32
    tile_seq_ptr,  # [num_tiles] int32
    tile_start_ptr,  # [num_tiles] int32, within the chunk
    scale_log2,
    query_stride,
    NOPE_DIM: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    KV_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,  # programs per tile
    STAGES: tl.constexpr,
):
    """out_i = softmax_{j <= i}(scale (q_i k_j + r_i t_j)) v_j, of the keys of one pass after those before"""
    # grid: (num_heads, num_tiles * PARTS)
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    tile = tl.program_id(1) // PARTS
    seq = tl.load(tile_seq_ptr + tile)
    offset = tl.load(tile_start_ptr + tile) + tl.program_id(1) % PARTS * BLOCK_M
    first_row = tl.load(query_start_loc_ptr + seq)
    num_rows = tl.load(query_start_loc_ptr + seq + 1) - first_row
    base = tl.load(starts_ptr + seq)
    count = tl.load(starts_ptr + seq + 1) - base
    if (offset >= num_rows) | (count == 0):
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    first = tl.load(firsts_ptr + seq)

    rows = offset + tl.arange(0, BLOCK_M)
    nopes = tl.arange(0, NOPE_PAD)
    turns = tl.arange(0, ROPE_PAD)
    dims = tl.arange(0, VALUE_PAD)
    real = (rows < num_rows)[:, None]
    token = (first_row + rows).to(tl.int64)[:, None]
    query_at = query_ptr + token * query_stride + head * (NOPE_DIM + ROPE_DIM)
    plain = tl.load(query_at + nopes[None, :], mask=real & (nopes < NOPE_DIM)[None, :], other=0.0)
    rotated = tl.load(query_at + NOPE_DIM + turns[None, :], mask=real & (turns < ROPE_DIM)[None, :], other=0.0)
    positions = seq_len - num_rows + rows
    kept = real & (dims < VALUE_DIM)[None, :]
    at = (token * num_heads + head) * VALUE_DIM + dims[None, :]
    lse_at = lse_ptr + (first_row + rows).to(tl.int64) * num_heads + head
    # Finite, so that a tile that is masked for a row gives 2^(-inf - top) = 0 and not NaN.
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    if first > 0:
        acc = tl.load(partial_ptr + at, mask=kept, other=0.0)
        top = tl.load(lse_at, mask=rows < num_rows, other=0.0)
        total += 1.0

    made_stride = num_heads * (NOPE_DIM + VALUE_DIM)
    made_at = made_ptr + base.to(tl.int64) * made_stride + head * (NOPE_DIM + VALUE_DIM)
    latents_at = latents_ptr + base.to(tl.int64) * (KV_RANK + ROPE_DIM)
    first_position = seq_len - num_rows + offset
    last = min(count, max(0, min(first_position + BLOCK_M, seq_len) - first))
    unmasked = min(last, max(0, first_position + 1 - first)) // BLOCK_N * BLOCK_N
    for start in tl.range(0, unmasked, BLOCK_N, num_stages=STAGES):
        acc, top, total = _key_tile(
            acc, top, total, plain, rotated, positions, made_at, latents_at, first, start, count, made_stride,
            scale_log2, False, NOPE_DIM, NOPE_PAD, KV_RANK, ROPE_DIM, ROPE_PAD, VALUE_DIM, VALUE_PAD, BLOCK_N,
        )  # fmt: skip
    for start in tl.range(unmasked, last, BLOCK_N, num_stages=1):
        acc, top, total = _key_tile(
            acc, top, total, plain, rotated, positions, made_at, latents_at, first, start, count, made_stride,
            scale_log2, True, NOPE_DIM, NOPE_PAD, KV_RANK, ROPE_DIM, ROPE_PAD, VALUE_DIM, VALUE_PAD, BLOCK_N,
        )  # fmt: skip
    acc = acc / total[:, None]
    if first + count == seq_len:
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=kept)
        return
    tl.store(partial_ptr + at, acc, mask=kept)
    tl.store(lse_at, top + tl.log2(total), mask=rows < num_rows)


def gather_latents(cache: Tensor, block_table: Tensor, rows: Tensor, keys: LatentPass) -> Tensor:
    """Returns the vectors of a pass, [num_keys, dim], of cache [num_blocks, 1, 1, block_size, dim]."""
    block_size, dim = cache.shape[3:]
    out = torch.empty(keys.num_keys, dim, dtype=cache.dtype, device=cache.device)
    _gather_kernel[(len(keys.parts),)](
        out,
        cache,
        block_table,
        rows,
        keys.starts,
        keys.firsts,
        keys.parts,
        block_table.stride(0),
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        BLOCK_SIZE=block_size,
        BLOCK_N=KEYS,
        num_warps=8,
    )
    return out


def latent_prefill_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    tiles: LatentTiles,
    kv_b: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Computes causal attention of query [num_tokens, num_heads, nope_dim + rope_dim], each sequence's last tokens.

    cache [num_blocks, 1, 1, block_size, kv_rank + rope_dim], kv_b [num_heads, nope_dim + value_dim, kv_rank];
    block_table [num_rows, max_blocks], rows [num_seqs], seq_lens [num_seqs], query_start_loc [num_seqs + 1] int32.
    """
    num_tokens, num_heads, qk_dim = query.shape
    kv_rank = kv_b.shape[2]
    rope_dim = cache.shape[4] - kv_rank
    nope_dim = qk_dim - rope_dim
    value_dim = kv_b.shape[1] - nope_dim
    if out is None:
        out = torch.empty(num_tokens, num_heads, value_dim, dtype=query.dtype, device=query.device)
    continued = len(tiles.passes) > 1
    partial = torch.empty(num_tokens if continued else 1, num_heads, value_dim, dtype=torch.float32, device=out.device)
    lse = partial.new_empty(len(partial), num_heads)
    hopper = (nope_dim, rope_dim, value_dim) == _HOPPER_WIDTHS and _has_hopper_kernel(cache)
    attend = _hopper_kernel() if hopper else _attend_pass
    for keys in tiles.passes:
        latents = gather_latents(cache, block_table, rows, keys)
        made = torch.mm(latents[:, :kv_rank], kv_b.flatten(0, 1).t())
        attend(out, query, made, latents, partial, lse, seq_lens, query_start_loc, keys, tiles, scale * _LOG2E)
    return out


def _attend_pass(
    out: Tensor,
    query: Tensor,
    made: Tensor,
    latents: Tensor,
    partial: Tensor,
    lse: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    keys: LatentPass,
    tiles: LatentTiles,
    scale_log2: float,
) -> None:
    """Launches this file's kernel for one pass: made [num_keys, num_heads * (nope_dim + value_dim)] of its keys."""
    num_heads, value_dim = out.shape[1:]
    nope_dim = made.shape[1] // num_heads - value_dim
    rope_dim = query.shape[2] - nope_dim
    widths = [max(16, triton.next_power_of_2(width)) for width in (nope_dim, rope_dim, value_dim)]
    block_m, block_n, num_warps, num_stages = _blocks(sum(widths), query.element_size(), shared_memory(query.device))
    parts = TILE_ROWS // block_m
    _latent_prefill_kernel[(num_heads, len(tiles.seq) * parts)](
        out,
        query,
        made,
        latents,
        partial,
        lse,
        seq_lens,
        query_start_loc,
        keys.starts,
        keys.firsts,
        tiles.seq,
        tiles.start,
        scale_log2,
        query.stride(0),
        NOPE_DIM=nope_dim,
        NOPE_PAD=widths[0],
        KV_RANK=latents.shape[1] - rope_dim,
        ROPE_DIM=rope_dim,
        ROPE_PAD=widths[1],
        VALUE_DIM=value_dim,
        VALUE_PAD=widths[2],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        PARTS=parts,
        STAGES=num_stages,
        num_warps=num_warps,
    )


def _has_hopper_kernel(cache: Tensor) -> bool:
    """Returns whether Hopper's kernel computes these vectors on this device."""
    return cache.is_cuda and _serves(cache.device, cache.dtype, cache.shape[4], cache.shape[3])


@functools.cache
def _serves(device: torch.device, dtype: torch.dtype, dim: int, block_size: int) -> bool:
    capability = torch.cuda.get_device_capability(device)[0]
    case = Case(capability=capability, dtype=dtype, stored=dtype, head_dim=dim, block_size=block_size)
    return HOPPER_LATENT_PREFILL.serves(case)


@functools.cache
def _hopper_kernel() -> Callable[..., None]:
    return HOPPER_LATENT_PREFILL.load()


def _blocks(width: int, itemsize: int, shared_bytes: int) -> tuple[int, int, int, int]:
    """Returns queries and keys per step, warps and stages, which fit shared memory and registers.

    `width`: of a head's queries and values.
    """
    if itemsize == 4:
        return (32, 32, 4, 2) if width <= _WIDE else (32, 16, 4, 2)
    if shared_bytes >= _HOPPER_SHARED and width <= _WIDE:
        return 128, 64, 8, 3
    return 64, 32, 8 if width > _WIDE else 4, 2
