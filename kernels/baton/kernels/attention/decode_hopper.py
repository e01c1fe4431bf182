"""Decode attention on Hopper, for few sequences: two loading warps keep many TMA copies of the pool in flight.

Same contract as decode.py; head_dim 64 or 128, block_size 16, 32 or 64, 2-byte elements.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.hopper import gdc_launch_dependents, gdc_wait, load_tile, reinterpret, thread_barrier

_ROWS = gl.constexpr(64)  # rows of one matrix instruction; a group's queries are padded to them
_TILE = gl.constexpr(64)  # tokens
_PANEL = gl.constexpr(64)  # elements of one 128-byte swizzled row
_MERGED = gl.constexpr(8)  # pieces at once: more are faster from 16 pieces on, but slower up to 8
_HEADS = gl.constexpr(4)  # query heads per warp
_IDS = gl.constexpr(32)  # block ids that the loading warp holds at a time


@gluon.jit
def _load(
    cache_desc,
    table_row,
    tiles_buf,
    ready,
    free,
    first,
    last,
    newest,
    kv_head,
    num_kv_heads,
    SIDE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A loading warp, for keys (SIDE 0) or values (1). Only the tile of the `newest` token waits for its writer."""
    panels: gl.constexpr = HEAD_DIM // _PANEL
    chunks: gl.constexpr = _TILE // BLOCK_SIZE
    tiles_a_load: gl.constexpr = _IDS // chunks
    lane_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, _IDS, layout=lane_layout)
    num_tiles = (last - first + _TILE - 1) // _TILE
    last_block = (last - 1) // BLOCK_SIZE
    for group in range((num_tiles + tiles_a_load - 1) // tiles_a_load):
        blocks = first // BLOCK_SIZE + group * _IDS + lanes
        ids = gl.load(table_row + gl.minimum(blocks, last_block))
        for tile_of_group in gl.static_range(tiles_a_load):
            tile = group * tiles_a_load + tile_of_group
            if tile < num_tiles:
                if first + (tile + 1) * _TILE > newest:
                    gdc_wait()
                stage = tile % STAGES
                mbarrier.wait(free.index(stage), (tile // STAGES & 1) ^ 1)
                mbarrier.expect(ready.index(stage), _TILE * HEAD_DIM * 2)
                for chunk in gl.static_range(chunks):
                    block = gl.sum(gl.where(lanes == tile_of_group * chunks + chunk, ids, 0), 0)
                    row = ((block * 2 + SIDE) * num_kv_heads + kv_head) * BLOCK_SIZE
                    for panel in gl.static_range(panels):
                        load_tile(
                            cache_desc,
                            [row, panel * _PANEL],
                            ready.index(stage),
                            tiles_buf.index((stage * panels + panel) * chunks + chunk),
                        )


@gluon.jit
def _soft_capped(score, CAP: gl.constexpr):
    """cap tanh(score / cap), for scores and a cap that are multiplied by log2(e), as soft_cap.py's"""
    twice: gl.constexpr = 2 * 1.4426950408889634 / CAP
    power = gl.exp2(gl.abs(score) * -twice)
    capped = CAP * (1.0 - power) / (1.0 + power)
    return gl.where(score < 0, -capped, capped)


@gluon.jit
def _softmax(score, top, total, begin, end, scale_log2, SOFT_CAP: gl.constexpr, layout: gl.constexpr):
    """Returns the weights of a tile whose columns from `begin` to `end` are valid, and the updated maximum and sum."""
    cols = gl.arange(0, _TILE, layout=gl.SliceLayout(0, layout))
    if SOFT_CAP > 0:
        score = _soft_capped(score * scale_log2, SOFT_CAP)
        scale_log2 = 1.0
    score = gl.where(((cols >= begin) & (cols < end))[None, :], score, float("-inf"))
    new_top = gl.maximum(top, gl.max(score, 1) * scale_log2)
    shrink = gl.exp2(top - new_top)
    weight = gl.exp2(score * scale_log2 - new_top[:, None])
    return weight, new_top, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _attend(
    out_ptr,
    query_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    key_buf,
    value_buf,
    key_ready,
    key_free,
    value_ready,
    value_free,
    sinks_ptr,
    lead,
    num_tokens,
    scale_log2,
    query_stride,
    seq,
    piece,
    packed,
    kv_head,
    num_kv_heads,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
):
    """One warp group, for the queries of one KV head. Scores the next tile while a tile's weights multiply V.

    The first `lead` of the num_tokens tokens are before the piece.
    """
    dtype: gl.constexpr = key_buf.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    query_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    key_tiles = reinterpret(key_buf, dtype, [STAGES, _TILE, HEAD_DIM], tile_layout)
    value_tiles = reinterpret(value_buf, dtype, [STAGES, _TILE, HEAD_DIM], tile_layout)

    gdc_wait()
    rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, query_layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, query_layout))
    heads = kv_head * GROUP + rows
    at = seq.to(gl.int64) * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    query = gl.load(query_ptr + at, mask=(rows < GROUP)[:, None], other=0.0)

    zero = gl.zeros([_ROWS, _TILE], gl.float32, score_layout)
    acc = gl.zeros([_ROWS, HEAD_DIM], gl.float32, out_layout)
    top = gl.full([_ROWS], -1.0e30, gl.float32, row_layout)
    total = gl.zeros([_ROWS], gl.float32, row_layout)
    if SINKS:
        # The first piece has the sequence's sinks.
        own_rows = gl.arange(0, _ROWS, layout=row_layout)
        has = own_rows < gl.where(packed & 0xFFFF == 0, GROUP, 0)
        sinks = gl.load(sinks_ptr + kv_head * GROUP + own_rows, mask=has, other=0.0).to(gl.float32)
        top = gl.where(has, sinks * 1.4426950408889634, top)
        total = gl.where(has, 1.0, total)
    mbarrier.wait(key_ready.index(0), 0)
    score = warpgroup_mma(query, key_tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(key_free.index(0), count=1)
    weight, top, total, shrink = _softmax(score, top, total, lead, num_tokens, scale_log2, SOFT_CAP, score_layout)
    weights = gl.convert_layout(weight.to(dtype), weight_layout)
    num_tiles = (num_tokens + _TILE - 1) // _TILE
    for tile in range(1, num_tiles):
        stage = tile % STAGES
        before = (tile - 1) % STAGES
        mbarrier.wait(key_ready.index(stage), tile // STAGES & 1)
        score = warpgroup_mma(query, key_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(value_ready.index(before), (tile - 1) // STAGES & 1)
        acc = warpgroup_mma(weights, value_tiles.index(before), acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive(key_free.index(stage), count=1)
        num_left = num_tokens - tile * _TILE
        weight, top, total, shrink = _softmax(score, top, total, 0, num_left, scale_log2, SOFT_CAP, score_layout)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(value_free.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, out_layout))[:, None]
        weights = gl.convert_layout(weight.to(dtype), weight_layout)
    final = (num_tiles - 1) % STAGES
    mbarrier.wait(value_ready.index(final), (num_tiles - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, value_tiles.index(final), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, out_layout))[:, None]
    out_rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, out_layout))
    out_dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, out_layout))
    mine = (out_rows < GROUP)[:, None]
    inner = out_rows[:, None] * HEAD_DIM + out_dims[None, :]
    plane: gl.constexpr = GROUP * HEAD_DIM
    own_out_ptr = out_ptr + (seq.to(gl.int64) * num_kv_heads + kv_head) * plane
    num_pieces = packed >> 16
    if num_pieces == 1:
        gl.store(own_out_ptr + inner, acc.to(dtype), mask=mine)
    else:
        index = piece.to(gl.int64) * num_kv_heads + kv_head
        gl.store(partial_ptr + index * plane + inner, acc, mask=mine)
        lse_rows = gl.arange(0, _ROWS, layout=row_layout)
        gl.store(lse_ptr + index * GROUP + lse_rows, top + gl.log2(total), mask=lse_rows < GROUP)
        thread_barrier()
        arrived_at = arrived_ptr + seq * num_kv_heads + kv_head
        if gl.atomic_add(arrived_at, 1) == num_pieces - 1:
            begin = (piece - (packed & 0xFFFF)).to(gl.int64) * num_kv_heads + kv_head
            _merge(own_out_ptr, partial_ptr, lse_ptr, begin, num_kv_heads, num_pieces, GROUP, HEAD_DIM)
            gl.store(arrived_at, 0)


@gluon.jit
def _merge(
    out_ptr,  # [GROUP, HEAD_DIM]
    partial_ptr,
    lse_ptr,
    begin,
    stride,
    num_pieces,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """As decode.py's, with a warp per query head, whose threads each read the weights once."""
    layout: gl.constexpr = gl.BlockedLayout([_MERGED, 1, HEAD_DIM // 32], [1, 1, 32], [1, _HEADS, 1], [2, 1, 0])
    weight_layout: gl.constexpr = gl.SliceLayout(2, layout)
    out_layout: gl.constexpr = gl.SliceLayout(0, layout)
    scale_layout: gl.constexpr = gl.SliceLayout(1, out_layout)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, out_layout))
    for first_head in range(0, GROUP, _HEADS):
        heads = first_head + gl.arange(0, _HEADS, layout=gl.SliceLayout(0, weight_layout))
        top = gl.full([_HEADS], -1.0e30, gl.float32, gl.SliceLayout(0, weight_layout))
        total = gl.zeros([_HEADS], gl.float32, gl.SliceLayout(0, weight_layout))
        acc = gl.zeros([_HEADS, HEAD_DIM], gl.float32, out_layout)
        for some in range(0, num_pieces, _MERGED):
            pieces = some + gl.arange(0, _MERGED, layout=gl.SliceLayout(1, weight_layout))
            rows = (begin + pieces * stride)[:, None] * GROUP + heads[None, :]
            live = (pieces < num_pieces)[:, None] & (heads < GROUP)[None, :]
            lse = gl.load(lse_ptr + rows, mask=live, other=float("-inf"), cache_modifier=".cg")
            part_at = partial_ptr + rows[:, :, None] * HEAD_DIM + dims[None, :][None, :, :]
            part = gl.load(part_at, mask=live[:, :, None], other=0.0, cache_modifier=".cg")
            new_top = gl.maximum(top, gl.max(lse, 0))
            shrink = gl.exp2(top - new_top)
            weight = gl.exp2(lse - new_top[None, :])
            acc = acc * gl.convert_layout(shrink, scale_layout)[:, None] + gl.sum(part * weight[:, :, None], 0)
            total = total * shrink + gl.sum(weight, 0)
            top = new_top
        acc = acc * gl.convert_layout(1.0 / total, scale_layout)[:, None]
        out_heads = first_head + gl.arange(0, _HEADS, layout=scale_layout)
        out_at = out_ptr + out_heads[:, None] * HEAD_DIM + dims[None, :]
        gl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(out_heads < GROUP)[:, None])


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@gluon.jit(do_not_specialize_on_alignment=["block_table_ptr", "rows_ptr"])
def _decode_kernel(
    out_ptr,  # [num_seqs, num_kv_heads * GROUP, HEAD_DIM]
    query_ptr,  # [num_seqs, num_kv_heads * GROUP, HEAD_DIM], rows of query_stride
    cache_desc,  # [num_blocks * 2 * num_kv_heads * BLOCK_SIZE, HEAD_DIM], boxes of [BLOCK_SIZE, 64]
    block_table_ptr,  # [num_rows, table_stride] int32
    rows_ptr,  # [num_seqs] int32, each sequence's row of the block table
    pieces_ptr,  # [max_pieces, 4] int32, of DecodeCuts
    partial_ptr,  # [max_pieces, num_kv_heads, GROUP, HEAD_DIM] fp32
    lse_ptr,  # [max_pieces, num_kv_heads, GROUP] fp32, base 2
    arrived_ptr,  # [num_seqs, num_kv_heads] int32, zero before and after
    sinks_ptr,  # [num_kv_heads * GROUP]
    scale_log2,
    query_stride,
    table_stride,
    num_kv_heads,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    SOFT_CAP: gl.constexpr,  # in base 2; 0: none
    SINKS: gl.constexpr,
):
    """out = softmax(cap tanh(scale q K^T / cap), sink) V, each piece over its part of K and V"""
    # grid: (max_pieces * num_kv_heads)
    gdc_launch_dependents()
    kv_head = gl.program_id(0) % num_kv_heads
    piece = gl.program_id(0) // num_kv_heads
    # Pieces and block tables are written before the previous kernel, so they are read without waiting for it.
    seq = gl.load(pieces_ptr + piece * 4)
    first = gl.load(pieces_ptr + piece * 4 + 1)
    last = gl.load(pieces_ptr + piece * 4 + 2)
    packed = gl.load(pieces_ptr + piece * 4 + 3)
    if seq < 0:
        # One program waits, so that this kernel ends after the previous one; the others free resources for the next.
        if gl.program_id(0) == 0:
            gdc_wait()
        return
    table_row = block_table_ptr + gl.load(rows_ptr + seq).to(gl.int64) * table_stride
    is_last = (packed & 0xFFFF) + 1 == packed >> 16
    newest = gl.where(is_last, last - 1, 0x7FFFFFFF)
    # Whole blocks are copied: with a window, a piece may begin within one.
    begin = first // BLOCK_SIZE * BLOCK_SIZE

    dtype: gl.constexpr = cache_desc.dtype
    panels: gl.constexpr = HEAD_DIM // _PANEL
    chunks: gl.constexpr = _TILE // BLOCK_SIZE
    panel_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    key_buf = gl.allocate_shared_memory(dtype, [STAGES * panels * chunks, BLOCK_SIZE, _PANEL], panel_layout)
    value_buf = gl.allocate_shared_memory(dtype, [STAGES * panels * chunks, BLOCK_SIZE, _PANEL], panel_layout)
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(stage), count=1)
        mbarrier.init(key_free.index(stage), count=1)
        mbarrier.init(value_ready.index(stage), count=1)
        mbarrier.init(value_free.index(stage), count=1)
    gl.warp_specialize(
        [
            (_attend, (
                out_ptr, query_ptr, partial_ptr, lse_ptr, arrived_ptr, key_buf, value_buf, key_ready, key_free,
                value_ready, value_free, sinks_ptr, first - begin, last - begin, scale_log2, query_stride, seq, piece,
                packed, kv_head, num_kv_heads, GROUP, HEAD_DIM, STAGES, SOFT_CAP, SINKS,
            )),
            (_load, (
                cache_desc, table_row, key_buf, key_ready, key_free, begin, last, newest, kv_head, num_kv_heads,
                0, HEAD_DIM, BLOCK_SIZE, STAGES,
            )),
            (_load, (
                cache_desc, table_row, value_buf, value_ready, value_free, begin, last, newest, kv_head,
                num_kv_heads, 1, HEAD_DIM, BLOCK_SIZE, STAGES,
            )),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip


def split_decode(
    out: Tensor,
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    pieces: Tensor,
    partial: Tensor,
    lse: Tensor,
    arrived: Tensor,
    scale_log2: float,
    *,
    soft_cap_log2: float = 0.0,
    sinks: Tensor | None = None,
    num_stages: int = 3,
) -> None:
    """Launches the kernel for decode_attention. With three stages, two programs fit on a multiprocessor, so that the
    next layer's begins to load before this one's ends."""
    _, num_q_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    flat = cache.view(-1, head_dim)
    panel = gl.NVMMASharedLayout(128, 16, rank=2)
    descriptor = TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [block_size, 64], panel)
    _decode_kernel[(pieces.shape[0] * num_kv_heads,)](
        out,
        query,
        descriptor,
        block_table,
        rows,
        pieces,
        partial,
        lse,
        arrived,
        lse if sinks is None else sinks,
        scale_log2,
        query.stride(0),
        block_table.stride(0),
        num_kv_heads,
        GROUP=num_q_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        STAGES=num_stages,
        SOFT_CAP=soft_cap_log2,
        SINKS=sinks is not None,
        num_warps=4,
        launch_pdl=True,
    )
