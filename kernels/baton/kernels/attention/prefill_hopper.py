"""Causal prefill attention on Hopper: a loading warp feeds two warp groups from the paged pool through TMA.

Same contract as prefill.py, which serves what this cannot: head_dim other than 64 and 128, block_size other
than a power of two from 16 to 128, elements other than bf16 and fp16, windows.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.attention.prefill import MAX_PLACES, TILE_ROWS, PrefillTiles, prefill_attention
from baton.kernels.hopper import thread_barrier
from baton.kernels.table import HOPPER_PREFILL, Case

_LOG2E = 1.4426950408889634
_GROUP_ROWS = gl.constexpr(64)  # rows of one warp group
_PANEL = gl.constexpr(64)  # elements of one 128-byte swizzled row


@gluon.jit
def _load(
    query_desc,
    cache_desc,
    table_row,
    query_buf,
    key_buf,
    value_buf,
    query_ready,
    key_ready,
    key_free,
    value_ready,
    value_free,
    query_row,
    query_head,
    kv_head,
    num_kv_heads,
    num_tiles,
    num_blocks,
    first_key,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CHUNK: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
):
    """The loading warp: Q once, then K and V tiles from the last to the first, a TMA copy for each chunk and panel."""
    panels: gl.constexpr = HEAD_DIM // _PANEL
    chunks: gl.constexpr = BLOCK_N // CHUNK
    mbarrier.expect(query_ready, 2 * _GROUP_ROWS * HEAD_DIM * 2)
    for group in gl.static_range(2):
        for panel in gl.static_range(panels):
            tma.async_copy_global_to_shared(
                query_desc,
                [query_row + group * _GROUP_ROWS, query_head * HEAD_DIM + panel * _PANEL],
                query_ready,
                query_buf.index(group * panels + panel),
            )
    for turn in range(num_tiles):
        first = (num_tiles - 1 - turn) * BLOCK_N
        if CUT:
            first += first_key
        stage = turn % STAGES
        free_phase = (turn // STAGES & 1) ^ 1
        mbarrier.wait(key_free.index(stage), free_phase)
        mbarrier.expect(key_ready.index(stage), BLOCK_N * HEAD_DIM * 2)
        for chunk in gl.static_range(chunks):
            token = first + chunk * CHUNK
            block = gl.load(table_row + gl.minimum(token // BLOCK_SIZE, num_blocks - 1))
            row = (block * 2 * num_kv_heads + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
            for panel in gl.static_range(panels):
                tma.async_copy_global_to_shared(
                    cache_desc,
                    [row, panel * _PANEL],
                    key_ready.index(stage),
                    key_buf.index((stage * panels + panel) * chunks + chunk),
                )
        mbarrier.wait(value_free.index(stage), free_phase)
        mbarrier.expect(value_ready.index(stage), BLOCK_N * HEAD_DIM * 2)
        for chunk in gl.static_range(chunks):
            token = first + chunk * CHUNK
            block = gl.load(table_row + gl.minimum(token // BLOCK_SIZE, num_blocks - 1))
            row = ((block * 2 + 1) * num_kv_heads + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
            for panel in gl.static_range(panels):
                tma.async_copy_global_to_shared(
                    cache_desc,
                    [row, panel * _PANEL],
                    value_ready.index(stage),
                    value_buf.index((stage * panels + panel) * chunks + chunk),
                )


@gluon.jit
def _softmax(score, top, total, limit, scale_log2, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """One tile's weights, and the running maximum and sum they leave. `limit` is each row's last visible column."""
    if MASKED:
        cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        score = gl.where(cols[None, :] <= limit[:, None], score, float("-inf"))
    new_top = gl.maximum(top, gl.max(score, 1) * scale_log2)
    shrink = gl.exp2(top - new_top)
    weight = gl.exp2(score * scale_log2 - new_top[:, None])
    return weight, new_top, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _attend(
    out_ptr,
    query_buf,
    key_buf,
    value_buf,
    query_ready,
    key_ready,
    key_free,
    value_ready,
    value_free,
    out_row,
    num_live,
    first_position,
    num_tiles,
    num_q_heads,
    query_head,
    scale_log2,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    part,
    num_parts,
    place,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
):
    """One warp group: 64 rows; first_position counts from the first key.

    While a tile's weights multiply V, the next tile's scores are already computed.
    """
    dtype: gl.constexpr = query_buf.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    query_tile = query_buf._reinterpret(dtype, [2, _GROUP_ROWS, HEAD_DIM], tile_layout).index(GROUP)
    key_tiles = key_buf._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    value_tiles = value_buf._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)

    rows = gl.arange(0, _GROUP_ROWS, layout=row_layout)
    positions = first_position + GROUP * _GROUP_ROWS + rows
    zero = gl.zeros([_GROUP_ROWS, BLOCK_N], gl.float32, score_layout)
    acc = gl.zeros([_GROUP_ROWS, HEAD_DIM], gl.float32, out_layout)
    # Finite, so that a tile that a row does not see at all leaves 2^(-inf - top) = 0 and not NaN.
    top = gl.full([_GROUP_ROWS], -1.0e30, gl.float32, row_layout)
    total = gl.zeros([_GROUP_ROWS], gl.float32, row_layout)

    mbarrier.wait(query_ready, 0)
    mbarrier.wait(key_ready.index(0), 0)
    score = warpgroup_mma(query_tile, key_tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(key_free.index(0), count=1)
    last_tile = num_tiles - 1
    weight, top, total, _ = _softmax(
        score, top, total, positions - last_tile * BLOCK_N, scale_log2, True, BLOCK_N, score_layout
    )
    weight = gl.convert_layout(weight.to(dtype), weight_layout)

    # Tiles that some row of this block does not see whole need the mask: with 128 rows, the last few.
    num_masked = gl.minimum(num_tiles, num_tiles - (first_position + 1) // BLOCK_N)
    for turn in range(1, num_masked):
        acc, weight, top, total = _turn(
            acc, weight, top, total, query_tile, key_tiles, value_tiles, key_ready, key_free, value_ready, value_free,
            positions, num_tiles, turn, scale_log2, True, dtype, BLOCK_N, STAGES, score_layout, weight_layout, zero,
        )  # fmt: skip
    for turn in range(gl.maximum(num_masked, 1), num_tiles):
        acc, weight, top, total = _turn(
            acc, weight, top, total, query_tile, key_tiles, value_tiles, key_ready, key_free, value_ready, value_free,
            positions, num_tiles, turn, scale_log2, False, dtype, BLOCK_N, STAGES, score_layout, weight_layout, zero,
        )  # fmt: skip

    stage = last_tile % STAGES
    mbarrier.wait(value_ready.index(stage), last_tile // STAGES & 1)
    acc = warpgroup_mma(weight, value_tiles.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    inverse = 1.0 / total
    if CUT:
        inverse = gl.where(total > 0, inverse, 0.0)  # a row that sees none of these keys
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, out_layout))[:, None]
    out_rows = gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, out_layout)) + GROUP * _GROUP_ROWS
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, out_layout))
    live = out_rows < num_live
    at = ((out_row + out_rows).to(gl.int64) * num_q_heads + query_head) * HEAD_DIM
    out_at = out_ptr + at[:, None] + dims[None, :]
    if CUT:
        if num_parts == 1:
            gl.store(out_at, acc.to(dtype), mask=live[:, None])
        else:
            stride = num_q_heads * 2 * _GROUP_ROWS  # rows from one part to the next
            first_row = (place * num_q_heads + query_head) * 2 * _GROUP_ROWS
            own_row = first_row + part * stride
            gl.store(partial_ptr + (own_row + out_rows)[:, None] * HEAD_DIM + dims[None, :], acc, mask=live[:, None])
            lse_rows = rows + GROUP * _GROUP_ROWS
            lse = gl.where(total > 0, top + gl.log2(total), float("-inf"))
            gl.store(lse_ptr + own_row + lse_rows, lse, mask=lse_rows < num_live)
            thread_barrier()
            arrived_at = arrived_ptr + (place * num_q_heads + query_head) * 2 + GROUP
            if gl.atomic_add(arrived_at, 1) == num_parts - 1:
                rows_of_first = first_row + out_rows
                merged = _merge(
                    partial_ptr, lse_ptr, rows_of_first, stride, num_parts, live, dims, HEAD_DIM, out_layout
                )  # fmt: skip
                gl.store(out_at, merged.to(dtype), mask=live[:, None])
                gl.store(arrived_at, 0)
    else:
        gl.store(out_at, acc.to(dtype), mask=live[:, None])


@gluon.jit
def _merge(
    partial_ptr, lse_ptr, rows, stride, num_parts, live, dims, HEAD_DIM: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """sum_p 2^(lse_p - max) partial_p / sum_p 2^(lse_p - max), in the parts' order whoever came last"""
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    top = gl.full([_GROUP_ROWS], -1.0e30, gl.float32, row_layout)
    total = gl.zeros([_GROUP_ROWS], gl.float32, row_layout)
    acc = gl.zeros([_GROUP_ROWS, HEAD_DIM], gl.float32, layout)
    for part in range(num_parts):
        at = rows + part * stride
        lse = gl.load(lse_ptr + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        own_at = partial_ptr + at[:, None] * HEAD_DIM + dims[None, :]
        own = gl.load(own_at, mask=live[:, None], other=0.0, cache_modifier=".cg")
        new_top = gl.maximum(top, lse)
        shrink = gl.exp2(top - new_top)
        weight = gl.exp2(lse - new_top)
        acc = acc * shrink[:, None] + own * weight[:, None]
        total = total * shrink + weight
        top = new_top
    return acc / total[:, None]


@gluon.jit
def _turn(
    acc, weight, top, total, query_tile, key_tiles, value_tiles, key_ready, key_free, value_ready, value_free,
    positions, num_tiles, turn, scale_log2,
    MASKED: gl.constexpr, dtype: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    score_layout: gl.constexpr, weight_layout: gl.constexpr, zero,
):  # fmt: skip
    """Scores of tile `turn`, and the weights of the tile before it times V."""
    stage = turn % STAGES
    before = (turn - 1) % STAGES
    mbarrier.wait(key_ready.index(stage), turn // STAGES & 1)
    score = warpgroup_mma(query_tile, key_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(value_ready.index(before), (turn - 1) // STAGES & 1)
    acc = warpgroup_mma(weight, value_tiles.index(before), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(key_free.index(stage), count=1)
    limit = positions - (num_tiles - 1 - turn) * BLOCK_N
    next_weight, top, total, shrink = _softmax(score, top, total, limit, scale_log2, MASKED, BLOCK_N, score_layout)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(value_free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, gl.convert_layout(next_weight.to(dtype), weight_layout), top, total


# Slices of one buffer come at any alignment; each would be compiled on its own.
@gluon.jit(
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "rows_ptr",
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "tile_seq_ptr",
        "tile_start_ptr",
        "parts_ptr",
    ]
)
def _prefill_kernel(
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    query_desc,  # [num_tokens, row], boxes of [64, 64]
    cache_desc,  # [num_blocks * 2 * num_kv_heads * BLOCK_SIZE, HEAD_DIM], boxes of [CHUNK, 64]
    block_table_ptr,  # [num_rows, table_stride] int32
    rows_ptr,  # [num_seqs] int32, each sequence's row of the block table
    seq_lens_ptr,  # [num_seqs] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32
    tile_seq_ptr,  # [num_tiles] int32
    tile_start_ptr,  # [num_tiles] int32
    parts_ptr,  # CUT: [num_parts, 4] int32, of PrefillTiles
    partial_ptr,  # CUT: [places, num_q_heads, 128, HEAD_DIM] fp32
    lse_ptr,  # CUT: [places, num_q_heads, 128] fp32, base 2
    arrived_ptr,  # CUT: [places, num_q_heads, 2] int32, zero before and after
    scale_log2,
    table_stride,
    num_kv_heads,
    Q_PER_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CHUNK: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
):
    """out_i = softmax_{j <= i}(scale q_i k_j) v_j"""
    # grid: (num_q_heads, num_tiles); CUT: (num_q_heads, num_parts)
    head = gl.program_id(0)
    tile = gl.program_id(1)
    num_q_heads = gl.num_programs(0)
    part = 0
    num_parts = 1
    place = 0
    if CUT:
        seq = gl.load(parts_ptr + tile * 4)
        offset = gl.load(parts_ptr + tile * 4 + 1)
        packed = gl.load(parts_ptr + tile * 4 + 2)
        place = gl.load(parts_ptr + tile * 4 + 3)
        part = packed & 0xFFFF
        num_parts = packed >> 16
    else:
        seq = gl.load(tile_seq_ptr + tile)
        offset = gl.load(tile_start_ptr + tile)
    first_row = gl.load(query_start_loc_ptr + seq)
    num_rows = gl.load(query_start_loc_ptr + seq + 1) - first_row
    seq_len = gl.load(seq_lens_ptr + seq)
    first_position = seq_len - num_rows + offset
    num_visible = gl.minimum(first_position + 2 * _GROUP_ROWS, seq_len)
    num_tiles = (num_visible + BLOCK_N - 1) // BLOCK_N
    first_key = 0
    if CUT:
        first_tile = part * num_tiles // num_parts
        num_tiles = (part + 1) * num_tiles // num_parts - first_tile
        first_key = first_tile * BLOCK_N
        first_position -= first_key
    num_blocks = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    table_row = block_table_ptr + gl.load(rows_ptr + seq).to(gl.int64) * table_stride

    dtype: gl.constexpr = cache_desc.dtype
    panels: gl.constexpr = HEAD_DIM // _PANEL
    chunks: gl.constexpr = BLOCK_N // CHUNK
    panel_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    query_buf = gl.allocate_shared_memory(dtype, [2 * panels, _GROUP_ROWS, _PANEL], panel_layout)
    key_buf = gl.allocate_shared_memory(dtype, [STAGES * panels * chunks, CHUNK, _PANEL], panel_layout)
    value_buf = gl.allocate_shared_memory(dtype, [STAGES * panels * chunks, CHUNK, _PANEL], panel_layout)
    query_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(query_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(stage), count=1)
        mbarrier.init(key_free.index(stage), count=2)
        mbarrier.init(value_ready.index(stage), count=1)
        mbarrier.init(value_free.index(stage), count=2)

    gl.warp_specialize(
        [
            (_attend, (
                out_ptr, query_buf, key_buf, value_buf, query_ready, key_ready, key_free, value_ready, value_free,
                first_row + offset, num_rows - offset, first_position, num_tiles, num_q_heads, head, scale_log2,
                partial_ptr, lse_ptr, arrived_ptr, part, num_parts, place, 0, HEAD_DIM, BLOCK_N, STAGES, CUT,
            )),
            (_attend, (
                out_ptr, query_buf, key_buf, value_buf, query_ready, key_ready, key_free, value_ready, value_free,
                first_row + offset, num_rows - offset, first_position, num_tiles, num_q_heads, head, scale_log2,
                partial_ptr, lse_ptr, arrived_ptr, part, num_parts, place, 1, HEAD_DIM, BLOCK_N, STAGES, CUT,
            )),
            (_load, (
                query_desc, cache_desc, table_row, query_buf, key_buf, value_buf, query_ready, key_ready, key_free,
                value_ready, value_free, first_row + offset, head, head // Q_PER_KV, num_kv_heads, num_tiles,
                num_blocks, first_key, HEAD_DIM, BLOCK_SIZE, CHUNK, BLOCK_N, STAGES, CUT,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


class PrefillWorkspace:
    """Scratch memory of tiles that are cut; one for each stream."""

    def __init__(self, num_q_heads: int, head_dim: int, device: torch.device) -> None:
        places = MAX_PLACES // num_q_heads * num_q_heads
        self.partial = torch.empty(places * TILE_ROWS * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(places * TILE_ROWS, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(places * 2, dtype=torch.int32, device=device)


@functools.cache
def _serves(dtype: torch.dtype, stored: torch.dtype, head_dim: int, block_size: int) -> bool:
    return HOPPER_PREFILL.fits(Case(dtype=dtype, stored=stored, head_dim=head_dim, block_size=block_size))


def prefill_attention_hopper(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    tiles: PrefillTiles,
    scale: float,
    *,
    workspace: PrefillWorkspace | None = None,
    out: Tensor | None = None,
    kv_scale: Tensor | None = None,
    window: int = 0,
    block_n: int = 128,
    num_stages: int = 2,
) -> Tensor:
    """Causal attention of query [num_tokens, num_q_heads, head_dim]; arguments as prefill_attention,
    tiles of 128 rows. What the pool holds beyond a sequence must be finite: it is read, and weighs nothing.

    With a workspace, tiles are cut where `tiles` says so: a part of the keys a program, merged by the last of them.
    """
    if window or not _serves(query.dtype, cache.dtype, cache.shape[-1], cache.shape[-2]):
        arguments = (query, cache, block_table, rows, seq_lens, query_start_loc, tiles, scale)
        return prefill_attention(*arguments, out=out, kv_scale=kv_scale, window=window)
    num_tokens, num_q_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    if out is None:
        out = torch.empty(num_tokens, num_q_heads, head_dim, dtype=query.dtype, device=query.device)
    chunk = min(block_size, block_n)
    panel = gl.NVMMASharedLayout(128, 16, rank=2)
    query_rows = query.as_strided((num_tokens, num_q_heads * head_dim), (query.stride(0), 1))
    query_desc = TensorDescriptor(query_rows, list(query_rows.shape), list(query_rows.stride()), [64, 64], panel)
    flat = cache.view(-1, head_dim)
    cache_desc = TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [chunk, 64], panel)
    parts = None if workspace is None else tiles.parts
    scratch: tuple[Tensor, ...] = (out, out, out, out)
    if parts is not None and workspace is not None:
        scratch = (parts, workspace.partial, workspace.lse, workspace.arrived)
    _prefill_kernel[(num_q_heads, len(tiles.seq if parts is None else parts))](
        out,
        query_desc,
        cache_desc,
        block_table,
        rows,
        seq_lens,
        query_start_loc,
        tiles.seq,
        tiles.start,
        *scratch,
        scale * _LOG2E,
        block_table.stride(0),
        num_kv_heads,
        Q_PER_KV=num_q_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        CHUNK=chunk,
        BLOCK_N=block_n,
        STAGES=num_stages,
        CUT=parts is not None,
        num_warps=4,
    )
    return out
