"""Decode attention over paged latents on Hopper, for up to 32 heads a program: as fast as the pool can be read.

Keys are the rows of the matrix instructions, because a few heads would not fill them: S^T = K Q^T, O^T = V^T P^T. Two
loading warps keep TMA copies in flight, one for the left half of the vectors and one for the rest. Each program loops
over its pieces of LatentCuts. kv_rank 512 and rope_dim 64, block_size 16, 32 or 64, 2-byte elements.
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


@gluon.jit
def _write_sums(
    out_ptr, partial_ptr, lse_ptr, left, right, sums, top, seq, piece, num_pieces, head_tile, num_heads,
    GROUP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Writes a piece's output [GROUP, 512], of which left and right are the halves, transposed."""
    heads = gl.arange(0, left.shape[1], layout=gl.SliceLayout(0, layout))
    dims = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    left = left * (1.0 / sums)[None, :]
    right = right * (1.0 / sums)[None, :]
    inner = heads[None, :] * RANK + dims[:, None]
    kept = (heads < GROUP)[None, :]
    if num_pieces == 1:
        own_out_ptr = out_ptr + (seq.to(gl.int64) * num_heads + head_tile * GROUP) * RANK
        gl.store(own_out_ptr + inner, left.to(out_ptr.dtype.element_ty), mask=kept)
        gl.store(own_out_ptr + HALF + inner, right.to(out_ptr.dtype.element_ty), mask=kept)
    else:
        row = piece.to(gl.int64) * num_heads + head_tile * GROUP
        gl.store(partial_ptr + row * RANK + inner, left, mask=kept)
        gl.store(partial_ptr + row * RANK + HALF + inner, right, mask=kept)
        gl.store(lse_ptr + row + heads, top + gl.log2(sums), mask=heads < GROUP)


@gluon.jit
def _attend(
    out_ptr,
    lifted_ptr,
    rotated_ptr,
    pieces_ptr,
    partial_ptr,
    lse_ptr,
    left_buf,
    right_buf,
    rope_buf,
    left_query,
    right_query,
    rope_query,
    weight_buf,
    left_ready,
    left_free,
    right_ready,
    right_free,
    begin,
    end,
    head_tile,
    num_heads,
    scale_log2,
    lifted_stride,
    lifted_head_stride,
    rotated_stride,
    rotated_head_stride,
    GROUP: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp group: the scores of a tile by its left half and by the rest, and the sums of both halves."""
    dtype: gl.constexpr = left_buf.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP_PAD, 16])
    head_layout: gl.constexpr = gl.SliceLayout(0, layout)
    dim_layout: gl.constexpr = gl.SliceLayout(1, layout)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    left_tiles = reinterpret(left_buf, dtype, [STAGES, TILE, HALF], tile_layout)
    right_tiles = reinterpret(right_buf, dtype, [STAGES, TILE, HALF], tile_layout)
    rope_tiles = reinterpret(rope_buf, dtype, [STAGES, TILE, ROPE], tile_layout)
    groups = gl.arange(0, GROUP_PAD, layout=gl.SliceLayout(1, load_layout))
    ranks = gl.arange(0, HALF, layout=gl.SliceLayout(0, load_layout))
    turns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, load_layout))
    real = (groups < GROUP)[:, None]
    tokens = gl.arange(0, TILE, layout=dim_layout)
    zero = gl.zeros([TILE, GROUP_PAD], gl.float32, layout)

    gdc_wait()
    done = 0
    for piece in range(begin, end):
        seq = gl.load(pieces_ptr + piece * 4)
        num_tokens = gl.load(pieces_ptr + piece * 4 + 2) - gl.load(pieces_ptr + piece * 4 + 1)
        num_pieces = gl.load(pieces_ptr + piece * 4 + 3) >> 16
        own_heads = (head_tile * GROUP + groups)[:, None].to(gl.int64)
        lifted_at = lifted_ptr + seq.to(gl.int64) * lifted_stride + own_heads * lifted_head_stride
        left_query.store(gl.load(lifted_at + ranks[None, :], mask=real, other=0.0))
        right_query.store(gl.load(lifted_at + HALF + ranks[None, :], mask=real, other=0.0))
        rotated_at = rotated_ptr + seq.to(gl.int64) * rotated_stride + own_heads * rotated_head_stride
        rope_query.store(gl.load(rotated_at + turns[None, :], mask=real, other=0.0))
        fence_async_shared()

        top = gl.full([GROUP_PAD], -1.0e30, gl.float32, head_layout)
        total = gl.zeros([TILE, GROUP_PAD], gl.float32, layout)  # summed over a thread's own tokens
        left = gl.zeros([HALF, GROUP_PAD], gl.float32, layout)
        right = gl.zeros([HALF, GROUP_PAD], gl.float32, layout)
        num_tiles = (num_tokens + TILE - 1) // TILE
        for tile in range(num_tiles):
            stage = (done + tile) % STAGES
            phase = (done + tile) // STAGES & 1
            left_tile = left_tiles.index(stage)
            right_tile = right_tiles.index(stage)
            mbarrier.wait(left_ready.index(stage), phase)
            score = warpgroup_mma(left_tile, left_query.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(right_ready.index(stage), phase)
            score = warpgroup_mma(right_tile, right_query.permute((1, 0)), score, is_async=True)
            score = warpgroup_mma(rope_tiles.index(stage), rope_query.permute((1, 0)), score, is_async=True)
            score = warpgroup_mma_wait(0, deps=[score])
            score = gl.where((tokens < num_tokens - tile * TILE)[:, None], score, float("-inf"))
            new_top = gl.maximum(top, gl.max(score, 0) * scale_log2)
            shrink = gl.exp2(top - new_top)
            weight = gl.exp2(score * scale_log2 - new_top[None, :])
            top = new_top
            weight_buf.permute((1, 0)).store(weight.to(dtype))
            fence_async_shared()
            total = total * shrink[None, :] + weight
            left = left * shrink[None, :]
            right = right * shrink[None, :]
            weights = weight_buf.permute((1, 0))
            left = warpgroup_mma(left_tile.permute((1, 0)), weights, left, is_async=True)
            right = warpgroup_mma(right_tile.permute((1, 0)), weights, right, is_async=True)
            left = warpgroup_mma_wait(1, deps=[left])
            mbarrier.arrive(left_free.index(stage), count=1)
            right = warpgroup_mma_wait(0, deps=[right])
            mbarrier.arrive(right_free.index(stage), count=1)
        done += num_tiles

        _write_sums(
            out_ptr, partial_ptr, lse_ptr, left, right, gl.sum(total, 0), top, seq, piece, num_pieces, head_tile,
            num_heads, GROUP, layout,
        )  # fmt: skip


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@gluon.jit(do_not_specialize_on_alignment=["block_table_ptr", "rows_ptr"])
def _latent_kernel(
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
    GROUP_PAD: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
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
    halves: gl.constexpr = STAGES * HALF_PANELS * chunks
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    left_buf = gl.allocate_shared_memory(dtype, [halves, BLOCK_SIZE, PANEL], layout)
    right_buf = gl.allocate_shared_memory(dtype, [halves, BLOCK_SIZE, PANEL], layout)
    rope_buf = gl.allocate_shared_memory(dtype, [STAGES * chunks, BLOCK_SIZE, PANEL], layout)
    left_query = gl.allocate_shared_memory(dtype, [GROUP_PAD, HALF], layout)
    right_query = gl.allocate_shared_memory(dtype, [GROUP_PAD, HALF], layout)
    rope_query = gl.allocate_shared_memory(dtype, [GROUP_PAD, ROPE], layout)
    weight_buf = gl.allocate_shared_memory(dtype, [GROUP_PAD, TILE], layout)
    left_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(left_ready.index(stage), count=1)
        mbarrier.init(left_free.index(stage), count=1)
        mbarrier.init(right_ready.index(stage), count=1)
        mbarrier.init(right_free.index(stage), count=1)
    gl.warp_specialize(
        [
            (_attend, (
                out_ptr, lifted_ptr, rotated_ptr, pieces_ptr, partial_ptr, lse_ptr, left_buf, right_buf, rope_buf,
                left_query, right_query, rope_query, weight_buf, left_ready, left_free, right_ready, right_free,
                begin, end, head_tile, TILES * GROUP, scale_log2, lifted_stride, lifted_head_stride, rotated_stride,
                rotated_head_stride, GROUP, GROUP_PAD, STAGES,
            )),
            (load_latents, (
                cache_desc, block_table_ptr, rows_ptr, pieces_ptr, left_buf, rope_buf, left_ready, left_free,
                begin, end, table_stride, 0, BLOCK_SIZE, STAGES, 1,
            )),
            (load_latents, (
                cache_desc, block_table_ptr, rows_ptr, pieces_ptr, right_buf, rope_buf, right_ready, right_free,
                begin, end, table_stride, 1, BLOCK_SIZE, STAGES, 1,
            )),
        ],
        [1, 1],
        [72, 72],
    )  # fmt: skip


def split_latents(
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
    num_stages: int = 2,
) -> None:
    """Launches the kernel for latent_decode_attention, with the heads in `tiles` tiles of at most 32."""
    num_heads, block_size = lifted.shape[1], cache.shape[3]
    group = num_heads // tiles
    flat = cache.view(-1, cache.shape[4])
    panel = gl.NVMMASharedLayout(128, 16, rank=2)
    descriptor = TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [block_size, 64], panel)
    _latent_kernel[(cuts.programs * tiles,)](
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
        GROUP=group,
        GROUP_PAD=16 if group <= 16 else 32,
        BLOCK_SIZE=block_size,
        STAGES=num_stages,
        num_warps=4,
        launch_pdl=True,
    )
