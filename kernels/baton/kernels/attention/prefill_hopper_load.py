"""The loading warp of Hopper's prefill attention: copies queries, and keys and values from the paged pool, by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from baton.kernels.hopper import load_tile

GROUP_ROWS = gl.constexpr(64)  # rows of one warp group
PANEL = gl.constexpr(64)  # elements of one 128-byte swizzled row


@gluon.jit
def load_tiles(
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
    panels: gl.constexpr = HEAD_DIM // PANEL
    chunks: gl.constexpr = BLOCK_N // CHUNK
    mbarrier.expect(query_ready, 2 * GROUP_ROWS * HEAD_DIM * 2)
    for group in gl.static_range(2):
        for panel in gl.static_range(panels):
            load_tile(
                query_desc,
                [query_row + group * GROUP_ROWS, query_head * HEAD_DIM + panel * PANEL],
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
                load_tile(
                    cache_desc,
                    [row, panel * PANEL],
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
                load_tile(
                    cache_desc,
                    [row, panel * PANEL],
                    value_ready.index(stage),
                    value_buf.index((stage * panels + panel) * chunks + chunk),
                )
