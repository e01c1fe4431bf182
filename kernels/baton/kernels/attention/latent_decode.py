"""Decode attention over paged latents: one new token per sequence, whose heads all read the same vectors.

Queries are absorbed: they have the width of the vectors, so one load of a vector serves the scores and the sums of all
heads of a tile. A program computes a piece of a sequence; a second kernel merges the pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.attention.latent_cuts import TILE, LatentCuts, cut_evenly, max_pieces
from baton.kernels.attention.latent_merge import merge_pieces
from baton.kernels.overlap import overlaps
from baton.kernels.shared_memory import shared_memory
from baton.kernels.table import HOPPER_LATENT_DECODE, HOPPER_MANY_HEADS, Case

_LOG2E = 1.4426950408889634
_MOST_HEADS = 64  # of a tile: their sums fill the registers
_PROGRAMS = 264  # two per multiprocessor of an H200
_LARGE_SHARED = 160 * 1024  # of data centre GPUs; others have 99 KB
_HOPPER_PROGRAMS = 132  # one per multiprocessor, because its tiles fill the shared memory
_HOPPER_RANK = 512
_FEW_HEADS = 32  # of a tile, whose keys are the rows of matrix instructions; with more, heads are


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@triton.jit(do_not_specialize_on_alignment=["block_table_ptr", "rows_ptr"])
def _latent_decode_kernel(
    out_ptr,  # [num_seqs, TILES * GROUP, KV_RANK]
    lifted_ptr,  # [num_seqs, TILES * GROUP, KV_RANK], of any strides
    rotated_ptr,  # [num_seqs, TILES * GROUP, ROPE_DIM], of any strides
    cache_ptr,  # [num_blocks, BLOCK_SIZE, KV_RANK + ROPE_DIM]
    block_table_ptr,  # [num_rows, table_stride] int32
    rows_ptr,  # [num_seqs] int32, each sequence's row of the block table
    pieces_ptr,  # [max_pieces, 4] int32, of LatentCuts
    partial_ptr,  # [max_pieces, TILES, GROUP, KV_RANK] fp32
    lse_ptr,  # [max_pieces, TILES, GROUP] fp32, base 2
    scale_log2,
    lifted_stride,  # from one sequence to the next
    lifted_head_stride,
    rotated_stride,
    rotated_head_stride,
    table_stride,
    TILES: tl.constexpr,  # of heads
    GROUP: tl.constexpr,  # heads of a tile
    GROUP_PAD: tl.constexpr,
    KV_RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = softmax(scale (lifted c^T + rotated k^T)) c for the vectors (c, k) of each piece"""
    # grid: (max_pieces * TILES)
    tile = tl.program_id(0) % TILES
    piece = tl.program_id(0) // TILES
    dim: tl.constexpr = KV_RANK + ROPE_DIM
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
    ranks = tl.arange(0, RANK_PAD)
    turns = tl.arange(0, ROPE_PAD)
    tokens = tl.arange(0, BLOCK_N)
    heads = tile * GROUP + groups
    real = (groups < GROUP)[:, None]
    lifted_at = lifted_ptr + seq.to(tl.int64) * lifted_stride + heads[:, None].to(tl.int64) * lifted_head_stride
    lifted = tl.load(lifted_at + ranks[None, :], mask=real & (ranks < KV_RANK)[None, :], other=0.0)
    rotated_at = rotated_ptr + seq.to(tl.int64) * rotated_stride + heads[:, None] * rotated_head_stride
    rotated = tl.load(rotated_at + turns[None, :], mask=real & (turns < ROPE_DIM)[None, :], other=0.0)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, RANK_PAD], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        position = start + tokens
        valid = position < last
        block = tl.load(table_row + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        at = cache_ptr + (block * BLOCK_SIZE + position % BLOCK_SIZE) * dim
        latent = tl.load(at[:, None] + ranks[None, :], mask=valid[:, None] & (ranks < KV_RANK)[None, :], other=0.0)
        key = tl.load(
            at[:, None] + KV_RANK + turns[None, :], mask=valid[:, None] & (turns < ROPE_DIM)[None, :], other=0.0
        )
        score = tl.dot(rotated, tl.trans(key), input_precision="ieee")
        score = tl.dot(lifted, tl.trans(latent), score, input_precision="ieee") * scale_log2
        score = tl.where(valid[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    acc = acc / total[:, None]
    inner = groups[:, None] * KV_RANK + ranks[None, :]
    kept = real & (ranks < KV_RANK)[None, :]
    plane: tl.constexpr = GROUP * KV_RANK
    if packed >> 16 == 1:
        out_ptr += (seq.to(tl.int64) * TILES + tile) * plane
        tl.store(out_ptr + inner, acc.to(out_ptr.dtype.element_ty), mask=kept)
        return
    place = piece.to(tl.int64) * TILES + tile
    tl.store(partial_ptr + place * plane + inner, acc, mask=kept)
    tl.store(lse_ptr + place * GROUP + groups, top + tl.log2(total), mask=groups < GROUP)


class LatentWorkspace:
    """Scratch memory of cut sequences. Each stream needs its own."""

    def __init__(self, max_seqs: int, num_heads: int, kv_rank: int, device: torch.device) -> None:
        rows = max_pieces(max_seqs, _PROGRAMS) * num_heads
        self.partial = torch.empty(rows * kv_rank, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)


def head_tiles(num_heads: int) -> int:
    """Returns the fewest equal tiles of heads that fit the registers."""
    return next(tiles for tiles in range(-(-num_heads // _MOST_HEADS), num_heads + 1) if num_heads % tiles == 0)


def cut_latents(seq_lens: Tensor, num_heads: int, kv_rank: int, cache: Tensor) -> LatentCuts:
    """Returns cuts for `latent_decode_attention` of seq_lens [num_seqs] int32, which serve all layers of a step."""
    if not _has_hopper_kernel(kv_rank, cache):
        return cut_evenly(seq_lens, max(1, _PROGRAMS // head_tiles(num_heads)))
    tile = TILE if num_heads <= _FEW_HEADS else 2 * TILE
    return cut_evenly(seq_lens, max(1, _HOPPER_PROGRAMS // head_tiles(num_heads)), tile)


def latent_decode_attention(
    lifted: Tensor,
    rotated: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    cuts: LatentCuts,
    scale: float,
    workspace: LatentWorkspace,
) -> Tensor:
    """Returns the weighted sums [num_seqs, num_heads, kv_rank] of each sequence's vectors, cut by `cuts`.

    lifted [num_seqs, num_heads, kv_rank] and rotated [num_seqs, num_heads, rope_dim] are the queries, whose last
    dimension is contiguous. cache [num_blocks, 1, 1, block_size, kv_rank + rope_dim]; block_table [num_rows,
    max_blocks] and rows [num_seqs] int32. The output of a sequence without pieces is undefined. On Hopper, block_table,
    rows and cuts must be complete before the previous kernel starts.
    """
    num_seqs, num_heads, kv_rank = lifted.shape
    num_pieces = cuts.pieces.shape[0]
    out = torch.empty(num_seqs, num_heads, kv_rank, dtype=lifted.dtype, device=lifted.device)
    if num_pieces * num_heads > workspace.lse.numel():
        raise ValueError(
            f"{num_pieces} pieces of {num_seqs} sequences need {num_pieces * num_heads} rows of workspace, "
            f"it has {workspace.lse.numel()}"
        )
    arguments = (out, lifted, rotated, cache, block_table, rows, cuts, workspace.partial, workspace.lse, scale * _LOG2E)
    if _has_hopper_kernel(kv_rank, cache):
        _hopper_kernel(num_heads <= _FEW_HEADS)(*arguments, tiles=head_tiles(num_heads))
    else:
        _split(*arguments)
    merge_pieces(out, workspace.partial, workspace.lse, cuts)
    return out


def _split(
    out: Tensor,
    lifted: Tensor,
    rotated: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    cuts: LatentCuts,
    partial: Tensor,
    lse: Tensor,
    scale_log2: float,
) -> None:
    """Launches this file's kernel."""
    _, num_heads, kv_rank = lifted.shape
    rope_dim, block_size = rotated.shape[2], cache.shape[3]
    tiles = head_tiles(num_heads)
    group = num_heads // tiles
    group_pad = max(16, triton.next_power_of_2(group))
    block_n, num_warps, num_stages = _blocks(group_pad, lifted.element_size(), shared_memory(lifted.device))
    overlap = overlaps(lifted)
    _latent_decode_kernel[(len(cuts.pieces) * tiles,)](
        out,
        lifted,
        rotated,
        cache,
        block_table,
        rows,
        cuts.pieces,
        partial,
        lse,
        scale_log2,
        lifted.stride(0),
        lifted.stride(1),
        rotated.stride(0),
        rotated.stride(1),
        block_table.stride(0),
        TILES=tiles,
        GROUP=group,
        GROUP_PAD=group_pad,
        KV_RANK=kv_rank,
        RANK_PAD=triton.next_power_of_2(kv_rank),
        ROPE_DIM=rope_dim,
        ROPE_PAD=max(16, triton.next_power_of_2(rope_dim)),
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        STAGES=num_stages,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )


def _has_hopper_kernel(kv_rank: int, cache: Tensor) -> bool:
    """Returns whether Hopper's kernels compute these sizes on this device."""
    return (
        cache.is_cuda and kv_rank == _HOPPER_RANK and _serves(cache.device, cache.dtype, cache.shape[4], cache.shape[3])
    )


@functools.cache
def _serves(device: torch.device, dtype: torch.dtype, dim: int, block_size: int) -> bool:
    capability = torch.cuda.get_device_capability(device)[0]
    case = Case(capability=capability, dtype=dtype, stored=dtype, head_dim=dim, block_size=block_size)
    return HOPPER_LATENT_DECODE.serves(case)


@functools.cache
def _hopper_kernel(few_heads: bool) -> Callable[..., None]:
    return (HOPPER_LATENT_DECODE if few_heads else HOPPER_MANY_HEADS).load()


def _blocks(group_pad: int, itemsize: int, shared_bytes: int) -> tuple[int, int, int]:
    """Returns keys per step, warps and stages, so that queries and stages fit shared memory and registers."""
    if itemsize == 4:
        return 16, 8, 1  # without matrix units, larger tiles do not fit the registers
    if group_pad < _MOST_HEADS:
        return 32, 4 if group_pad < _MOST_HEADS // 2 else 8, 3 if shared_bytes >= _LARGE_SHARED else 2
    return (32, 8, 2) if shared_bytes >= _LARGE_SHARED else (16, 8, 1)
