"""Causal prefill attention on Hopper: loading warps feed two warp groups from the paged pool through TMA.

Programs are persistent: while one stores its rows, its loading warps load queries and keys of its next ones.

Same contract as prefill.py, which serves what this cannot: head_dim other than 64 and 128, block_size other
than a power of two from 16 to 128, elements other than bf16 and fp16, windows.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.attention.prefill import MAX_PLACES, TILE_ROWS, PrefillTiles, prefill_attention
from baton.kernels.attention.prefill_hopper_attend import attend
from baton.kernels.attention.prefill_hopper_items import GROUP_ROWS
from baton.kernels.attention.prefill_hopper_load import PANEL, load_tiles
from baton.kernels.multiprocessors import num_multiprocessors
from baton.kernels.table import HOPPER_PREFILL, Case

_LOG2E = 1.4426950408889634


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
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
    num_items,  # num_q_heads * num_tiles; CUT: num_q_heads * num_parts
    num_q_heads,
    num_kv_heads,
    scale_log2,
    table_stride,
    Q_PER_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CHUNK: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
):
    """out_i = softmax_{j <= i}(scale q_i k_j) v_j"""
    # grid: one program per multiprocessor
    dtype: gl.constexpr = cache_desc.dtype
    panels: gl.constexpr = HEAD_DIM // PANEL
    chunks: gl.constexpr = BLOCK_N // CHUNK
    panel_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    query_buf = gl.allocate_shared_memory(dtype, [4 * panels, GROUP_ROWS, PANEL], panel_layout)  # of two items
    key_buf = gl.allocate_shared_memory(dtype, [STAGES * panels * chunks, CHUNK, PANEL], panel_layout)
    value_buf = gl.allocate_shared_memory(dtype, [STAGES * panels * chunks, CHUNK, PANEL], panel_layout)
    query_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    query_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(query_ready.index(slot), count=1)
        mbarrier.init(query_free.index(slot), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(stage), count=1)
        mbarrier.init(key_free.index(stage), count=2)
        mbarrier.init(value_ready.index(stage), count=1)
        mbarrier.init(value_free.index(stage), count=2)

    gl.warp_specialize(
        [
            (attend, (
                out_ptr, seq_lens_ptr, query_start_loc_ptr, tile_seq_ptr, tile_start_ptr, parts_ptr, partial_ptr,
                lse_ptr, arrived_ptr, query_buf, query_ready, query_free, key_buf, key_ready, key_free, value_buf,
                value_ready, value_free, num_items, num_q_heads, scale_log2, 0, HEAD_DIM, BLOCK_N, STAGES, CUT,
            )),
            (attend, (
                out_ptr, seq_lens_ptr, query_start_loc_ptr, tile_seq_ptr, tile_start_ptr, parts_ptr, partial_ptr,
                lse_ptr, arrived_ptr, query_buf, query_ready, query_free, key_buf, key_ready, key_free, value_buf,
                value_ready, value_free, num_items, num_q_heads, scale_log2, 1, HEAD_DIM, BLOCK_N, STAGES, CUT,
            )),
            (load_tiles, (
                query_desc, cache_desc, block_table_ptr, rows_ptr, seq_lens_ptr, query_start_loc_ptr, tile_seq_ptr,
                tile_start_ptr, parts_ptr, query_buf, query_ready, query_free, key_buf, key_ready, key_free, num_items,
                num_q_heads, num_kv_heads, table_stride, 0, Q_PER_KV, HEAD_DIM, BLOCK_SIZE, CHUNK, BLOCK_N, STAGES, CUT,
            )),
            (load_tiles, (
                query_desc, cache_desc, block_table_ptr, rows_ptr, seq_lens_ptr, query_start_loc_ptr, tile_seq_ptr,
                tile_start_ptr, parts_ptr, query_buf, query_ready, query_free, value_buf, value_ready, value_free,
                num_items, num_q_heads, num_kv_heads, table_stride, 1, Q_PER_KV, HEAD_DIM, BLOCK_SIZE, CHUNK, BLOCK_N,
                STAGES, CUT,
            )),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip


class PrefillWorkspace:
    """Scratch memory of cut tiles. Each stream needs its own."""

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
    """Computes causal attention of query [num_tokens, num_q_heads, head_dim]; arguments as prefill_attention,
    tiles of 128 rows. Values in the pool after a sequence must be finite, because they are read and multiplied by 0.

    With a workspace, tiles are cut as `tiles` defines: a program computes a part of the keys, and the last one merges.
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
    num_items = num_q_heads * len(tiles.seq if parts is None else parts)
    _prefill_kernel[(min(num_items, num_multiprocessors(query.device)),)](
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
        num_items,
        num_q_heads,
        num_kv_heads,
        scale * _LOG2E,
        block_table.stride(0),
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
