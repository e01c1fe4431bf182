"""Decode attention over paged latents on Hopper, for 33 to 64 heads a program: two warp groups share pairs of tiles.

The even tile's weights are computed by one warp group, the odd tile's by the other, and each sums half of the output's
columns over both tiles, so that no product is computed twice and one group's softmax hides behind the other's products.
They exchange weights and maxima through shared memory. Otherwise as latent_hopper.py.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.attention.latent_cuts import LatentCuts
from baton.kernels.attention.latent_hopper_load import HALF, HALF_PANELS, PANEL, RANK, ROPE, TILE, load_latents
from baton.kernels.hopper import gdc_launch_dependents, gdc_wait, reinterpret

_HEADS = gl.constexpr(64)  # rows of one matrix instruction
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def _read_queries(
    lifted_ptr,
    rotated_ptr,
    query,
    ready,
    phase,
    seq,
    head_tile,
    lifted_stride,
    lifted_head_stride,
    rotated_stride,
    rotated_head_stride,
    SIDE: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Stores one half of the lifted queries for both warp groups, and returns the rotated ones as an operand."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    groups = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, layout))
    ranks = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    heads = (head_tile * GROUP + groups)[:, None].to(gl.int64)
    lifted_at = lifted_ptr + seq.to(gl.int64) * lifted_stride + heads * lifted_head_stride + SIDE * HALF
    query.store(gl.load(lifted_at + ranks[None, :], mask=(groups < GROUP)[:, None], other=0.0))
    fence_async_shared()
    mbarrier.arrive(ready, count=1)
    rope_layout: gl.constexpr = gl.DotOperandLayout(0, _SCORES, 2)
    rows = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, rope_layout))
    turns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, rope_layout))
    row_heads = (head_tile * GROUP + rows)[:, None].to(gl.int64)
    rotated_at = rotated_ptr + seq.to(gl.int64) * rotated_stride + row_heads * rotated_head_stride
    rotated = gl.load(rotated_at + turns[None, :], mask=(rows < GROUP)[:, None], other=0.0)
    mbarrier.wait(ready, phase)
    return rotated


@gluon.jit
def _score(
    left_query, right_query, rotated, left_tile, right_tile, rope_tile, left_ready, right_ready, phase, num_valid
):
    """Returns the scores of a tile whose first num_valid tokens are valid."""
    zero = gl.zeros([_HEADS, TILE], gl.float32, _SCORES)
    mbarrier.wait(left_ready, phase)
    score = warpgroup_mma(left_query, left_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(right_ready, phase)
    score = warpgroup_mma(right_query, right_tile.permute((1, 0)), score, is_async=True)
    score = warpgroup_mma(rotated, rope_tile.permute((1, 0)), score, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    tokens = gl.arange(0, TILE, layout=gl.SliceLayout(0, _SCORES))
    return gl.where((tokens < num_valid)[None, :], score, float("-inf"))


@gluon.jit
def _write_sums(
    out_ptr, partial_ptr, lse_ptr, acc, sums, top, seq, piece, num_pieces, head_tile, num_heads,
    SIDE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Writes half of the columns of a piece's output."""
    acc = acc * gl.convert_layout(1.0 / sums, gl.SliceLayout(1, _SUMS))[:, None]
    rows = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _SUMS))
    dims = gl.arange(0, HALF, layout=gl.SliceLayout(0, _SUMS))
    inner = rows[:, None] * RANK + SIDE * HALF + dims[None, :]
    kept = (rows < GROUP)[:, None]
    if num_pieces == 1:
        own_out_ptr = out_ptr + (seq.to(gl.int64) * num_heads + head_tile * GROUP) * RANK
        gl.store(own_out_ptr + inner, acc.to(out_ptr.dtype.element_ty), mask=kept)
    else:
        row = piece.to(gl.int64) * num_heads + head_tile * GROUP
        gl.store(partial_ptr + row * RANK + inner, acc, mask=kept)
        if SIDE == 0:
            heads = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _SCORES))
            gl.store(lse_ptr + row + heads, top + gl.log2(sums), mask=heads < GROUP)


@gluon.jit
def _attend(
    out_ptr, lifted_ptr, rotated_ptr, pieces_ptr, partial_ptr, lse_ptr,
    left_buf, right_buf, rope_buf, left_query, right_query, weight_buf, top_buf, total_buf,
    left_ready, left_free, right_ready, right_free,
    query_ready, top_ready, odd_ready, even_ready, total_ready,
    begin, end, head_tile, num_heads, scale_log2,
    lifted_stride, lifted_head_stride, rotated_stride, rotated_head_stride,
    SIDE: gl.constexpr,  # 0: even tiles, left columns; 1: odd tiles, right columns
    GROUP: gl.constexpr,
):  # fmt: skip
    """One of the two warp groups."""
    dtype: gl.constexpr = left_buf.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, _SCORES)
    sum_rows: gl.constexpr = gl.SliceLayout(1, _SUMS)
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, _SUMS, 2)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    left_tiles = reinterpret(left_buf, dtype, [2, TILE, HALF], tile_layout)
    right_tiles = reinterpret(right_buf, dtype, [2, TILE, HALF], tile_layout)
    rope_tiles = reinterpret(rope_buf, dtype, [2, TILE, ROPE], tile_layout)

    gdc_wait()
    done = 0
    for piece in range(begin, end):
        seq = gl.load(pieces_ptr + piece * 4)
        num_tokens = gl.load(pieces_ptr + piece * 4 + 2) - gl.load(pieces_ptr + piece * 4 + 1)
        num_pieces = gl.load(pieces_ptr + piece * 4 + 3) >> 16
        turn = piece - begin & 1
        own_query = right_query.index(0) if SIDE else left_query.index(0)
        rotated = _read_queries(
            lifted_ptr, rotated_ptr, own_query, query_ready, turn, seq, head_tile, lifted_stride, lifted_head_stride,
            rotated_stride, rotated_head_stride, SIDE, GROUP,
        )  # fmt: skip
        acc = gl.zeros([_HEADS, HALF], gl.float32, _SUMS)
        top = gl.full([_HEADS], -1.0e30, gl.float32, row_layout)
        total = gl.zeros([_HEADS], gl.float32, row_layout)
        num_pairs = (num_tokens + 2 * TILE - 1) // (2 * TILE)
        for pair in range(num_pairs):
            phase = done + pair & 1
            # Always 0, but not known to be: otherwise the descriptors of all operands are computed before the loop, and
            # spilled.
            zero = pair >> 20
            num_valid = num_tokens - (2 * pair + SIDE) * TILE
            score = _score(
                left_query.index(zero), right_query.index(zero), rotated, left_tiles.index(SIDE + zero),
                right_tiles.index(SIDE + zero), rope_tiles.index(SIDE + zero), left_ready.index(SIDE),
                right_ready.index(SIDE), phase, num_valid,
            )  # fmt: skip
            highest = gl.max(score, 1) * scale_log2
            if SIDE == 0:
                even_top = gl.maximum(top, highest)
                top_buf.index(0).store(even_top)
                mbarrier.arrive(top_ready, count=1)
                shrink = gl.exp2(top - even_top)
                weight = gl.exp2(score * scale_log2 - even_top[:, None])
                acc = acc * gl.convert_layout(shrink, sum_rows)[:, None]
                weights = gl.convert_layout(weight.to(dtype), weight_layout)
                acc = warpgroup_mma(weights, left_tiles.index(zero), acc, is_async=True)
                total = total * shrink + gl.sum(weight, 1)
                mbarrier.wait(odd_ready, phase)
                top = top_buf.index(1).load(row_layout)
                shrink = gl.exp2(even_top - top)
                weight_buf.index(0).store((weight * shrink[:, None]).to(dtype))
                fence_async_shared()
                mbarrier.arrive(even_ready, count=1)
                total = total * shrink
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(left_free.index(0), count=1)
                acc = acc * gl.convert_layout(shrink, sum_rows)[:, None]
                mbarrier.wait(left_ready.index(1), phase)
                acc = warpgroup_mma(weight_buf.index(1 + zero), left_tiles.index(1 + zero), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(left_free.index(1), count=1)
            else:
                mbarrier.wait(top_ready, phase)
                even_top = top_buf.index(0).load(row_layout)
                new_top = gl.maximum(even_top, highest)
                weight = gl.exp2(score * scale_log2 - new_top[:, None])
                top_buf.index(1).store(new_top)
                weight_buf.index(1).store(weight.to(dtype))
                fence_async_shared()
                mbarrier.arrive(odd_ready, count=1)
                shrink = gl.exp2(top - new_top)
                acc = acc * gl.convert_layout(shrink, sum_rows)[:, None]
                weights = gl.convert_layout(weight.to(dtype), weight_layout)
                acc = warpgroup_mma(weights, right_tiles.index(1 + zero), acc, is_async=True)
                total = total * shrink + gl.sum(weight, 1)
                top = new_top
                mbarrier.wait(even_ready, phase)
                mbarrier.wait(right_ready.index(0), phase)
                acc = warpgroup_mma(weight_buf.index(zero), right_tiles.index(zero), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(right_free.index(1), count=1)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(right_free.index(0), count=1)
        done += num_pairs

        total_buf.index(SIDE).store(total)
        mbarrier.arrive(total_ready, count=1)
        mbarrier.wait(total_ready, turn)
        sums = total + total_buf.index(1 - SIDE).load(row_layout)
        _write_sums(
            out_ptr, partial_ptr, lse_ptr, acc, sums, top, seq, piece, num_pieces, head_tile, num_heads, SIDE, GROUP
        )  # fmt: skip


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@gluon.jit(do_not_specialize_on_alignment=["block_table_ptr", "rows_ptr"])
def _latent_pairs_kernel(
    out_ptr,  # [num_seqs, TILES * GROUP, 512]
    lifted_ptr,  # [num_seqs, TILES * GROUP, 512], of any strides
    rotated_ptr,  # [num_seqs, TILES * GROUP, 64], of any strides
    cache_desc,  # [num_blocks * BLOCK_SIZE, 576], boxes of [BLOCK_SIZE, 64]
    block_table_ptr,  # [num_rows, table_stride] int32
    rows_ptr,  # [num_seqs] int32, each sequence's row of the block table
    pieces_ptr,  # [max_pieces, 4] int32, of LatentCuts
    turns_ptr,  # [programs + 1] int32, of LatentCuts
    partial_ptr,  # [max_pieces, TILES * GROUP, 512] fp32
    lse_ptr,  # [max_pieces, TILES * GROUP] fp32, base 2
    scale_log2,
    lifted_stride,  # from one sequence to the next
    lifted_head_stride,
    rotated_stride,
    rotated_head_stride,
    table_stride,
    TILES: gl.constexpr,  # of heads
    GROUP: gl.constexpr,  # heads of a tile
    BLOCK_SIZE: gl.constexpr,
):
    """out = softmax(scale (lifted c^T + rotated k^T)) c for the vectors (c, k) of each piece"""
    # grid: (programs * TILES)
    gdc_launch_dependents()
    head_tile = gl.program_id(0) % TILES
    program = gl.program_id(0) // TILES
    # Pieces and block tables are written before the previous kernel, so they are read without waiting for it.
    begin = gl.load(turns_ptr + program)
    end = gl.load(turns_ptr + program + 1)

    dtype: gl.constexpr = cache_desc.dtype
    chunks: gl.constexpr = TILE // BLOCK_SIZE
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    left_buf = gl.allocate_shared_memory(dtype, [2 * HALF_PANELS * chunks, BLOCK_SIZE, PANEL], layout)
    right_buf = gl.allocate_shared_memory(dtype, [2 * HALF_PANELS * chunks, BLOCK_SIZE, PANEL], layout)
    rope_buf = gl.allocate_shared_memory(dtype, [2 * chunks, BLOCK_SIZE, PANEL], layout)
    left_query = gl.allocate_shared_memory(dtype, [1, _HEADS, HALF], layout)
    right_query = gl.allocate_shared_memory(dtype, [1, _HEADS, HALF], layout)
    weight_buf = gl.allocate_shared_memory(dtype, [2, _HEADS, TILE], layout)
    top_buf = gl.allocate_shared_memory(gl.float32, [2, _HEADS], plain)
    total_buf = gl.allocate_shared_memory(gl.float32, [2, _HEADS], plain)
    left_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    query_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    top_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    odd_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    even_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    total_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(left_ready.index(stage), count=1)
        mbarrier.init(left_free.index(stage), count=1)
        mbarrier.init(right_ready.index(stage), count=1)
        mbarrier.init(right_free.index(stage), count=1)
    mbarrier.init(query_ready, count=2)
    mbarrier.init(top_ready, count=1)
    mbarrier.init(odd_ready, count=1)
    mbarrier.init(even_ready, count=1)
    mbarrier.init(total_ready, count=2)
    gl.warp_specialize(
        [
            (_attend, (
                out_ptr, lifted_ptr, rotated_ptr, pieces_ptr, partial_ptr, lse_ptr, left_buf, right_buf, rope_buf,
                left_query, right_query, weight_buf, top_buf, total_buf, left_ready, left_free, right_ready,
                right_free, query_ready, top_ready, odd_ready, even_ready, total_ready, begin, end, head_tile,
                TILES * GROUP, scale_log2, lifted_stride, lifted_head_stride, rotated_stride, rotated_head_stride,
                0, GROUP,
            )),
            (_attend, (
                out_ptr, lifted_ptr, rotated_ptr, pieces_ptr, partial_ptr, lse_ptr, left_buf, right_buf, rope_buf,
                left_query, right_query, weight_buf, top_buf, total_buf, left_ready, left_free, right_ready,
                right_free, query_ready, top_ready, odd_ready, even_ready, total_ready, begin, end, head_tile,
                TILES * GROUP, scale_log2, lifted_stride, lifted_head_stride, rotated_stride, rotated_head_stride,
                1, GROUP,
            )),
            (load_latents, (
                cache_desc, block_table_ptr, rows_ptr, pieces_ptr, left_buf, rope_buf, left_ready, left_free,
                begin, end, table_stride, 0, BLOCK_SIZE, 2, 2,
            )),
            (load_latents, (
                cache_desc, block_table_ptr, rows_ptr, pieces_ptr, right_buf, rope_buf, right_ready, right_free,
                begin, end, table_stride, 1, BLOCK_SIZE, 2, 2,
            )),
        ],
        [4, 1, 1],
        [224, 48, 48],
    )  # fmt: skip


def split_latents_in_pairs(
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
    *,
    tiles: int,
) -> None:
    """Launches the kernel for latent_decode_attention, with the heads in `tiles` tiles of at most 64."""
    num_heads, block_size = lifted.shape[1], cache.shape[3]
    flat = cache.view(-1, cache.shape[4])
    panel = gl.NVMMASharedLayout(128, 16, rank=2)
    descriptor = TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [block_size, 64], panel)
    _latent_pairs_kernel[(cuts.programs * tiles,)](
        out,
        lifted,
        rotated,
        descriptor,
        block_table,
        rows,
        cuts.pieces,
        cuts.turns,
        partial,
        lse,
        scale_log2,
        lifted.stride(0),
        lifted.stride(1),
        rotated.stride(0),
        rotated.stride(1),
        block_table.stride(0),
        TILES=tiles,
        GROUP=num_heads // tiles,
        BLOCK_SIZE=block_size,
        num_warps=4,
        launch_pdl=True,
    )
