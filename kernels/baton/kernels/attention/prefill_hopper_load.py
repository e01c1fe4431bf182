"""The loading warps of Hopper's prefill attention: one copies queries and keys by TMA, the other one values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from baton.kernels.attention.prefill_hopper_items import GROUP_ROWS, count_items, item_at, read_item
from baton.kernels.hopper import load_tile

PANEL = gl.constexpr(64)  # elements of one 128-byte swizzled row


@gluon.jit
def load_tiles(
    query_desc,
    cache_desc,
    block_table_ptr,
    rows_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    tile_seq_ptr,
    tile_start_ptr,
    parts_ptr,
    query_buf,
    query_ready,
    query_free,
    buffer,
    ready,
    free,
    num_items,
    num_q_heads,
    num_kv_heads,
    table_stride,
    SIDE: gl.constexpr,  # 0: queries and keys, 1: values
    Q_PER_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CHUNK: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
):
    """One warp: the tiles of each item from the last to the first, a TMA copy for each chunk and panel.

    A tile's block ids are read before its stage is free. Read between the copies, each would delay the next copy.
    """
    panels: gl.constexpr = HEAD_DIM // PANEL
    chunks: gl.constexpr = BLOCK_N // CHUNK
    base = 0
    for turn in range(count_items(num_items)):
        item = item_at(turn)
        head = item % num_q_heads
        seq, query_row, _rows, _position, num_tiles, first_key = read_item(
            item, num_items, num_q_heads, seq_lens_ptr, query_start_loc_ptr, tile_seq_ptr, tile_start_ptr, parts_ptr,
            BLOCK_N, CUT,
        )  # fmt: skip
        num_blocks = (gl.load(seq_lens_ptr + seq) + BLOCK_SIZE - 1) // BLOCK_SIZE
        table_row = block_table_ptr + gl.load(rows_ptr + seq).to(gl.int64) * table_stride
        if SIDE == 0:
            slot = turn % 2
            mbarrier.wait(query_free.index(slot), (turn // 2 & 1) ^ 1)
            mbarrier.expect(query_ready.index(slot), 2 * GROUP_ROWS * HEAD_DIM * 2)
            for group in gl.static_range(2):
                for panel in gl.static_range(panels):
                    load_tile(
                        query_desc,
                        [query_row + group * GROUP_ROWS, head * HEAD_DIM + panel * PANEL],
                        query_ready.index(slot),
                        query_buf.index((slot * 2 + group) * panels + panel),
                    )
        for step in range(num_tiles):
            first = first_key + (num_tiles - 1 - step) * BLOCK_N
            cache_rows = ()
            for chunk in gl.static_range(chunks):
                token = first + chunk * CHUNK
                block = gl.load(table_row + gl.minimum(token // BLOCK_SIZE, num_blocks - 1))
                head_row = (block * 2 + SIDE) * num_kv_heads + head // Q_PER_KV
                cache_rows += (head_row * BLOCK_SIZE + token % BLOCK_SIZE,)  # type: ignore[assignment]
            stage = (base + step) % STAGES
            mbarrier.wait(free.index(stage), ((base + step) // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), BLOCK_N * HEAD_DIM * 2)
            for chunk in gl.static_range(chunks):
                for panel in gl.static_range(panels):
                    load_tile(
                        cache_desc,
                        [cache_rows[chunk], panel * PANEL],
                        ready.index(stage),
                        buffer.index((stage * panels + panel) * chunks + chunk),
                    )
        base += num_tiles
