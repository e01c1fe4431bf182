"""The work items of Hopper's prefill attention: which rows, keys and head each of a program's rounds computes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GROUP_ROWS = gl.constexpr(64)  # rows of one warp group


@gluon.jit
def item_at(turn):
    """Returns a program's item of a round. Items become shorter, so every second round goes through them backwards."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, own, programs - 1 - own)


@gluon.jit
def count_items(num_items):
    """Returns the number of items of this program."""
    rounds = num_items // gl.num_programs(0)
    return rounds + gl.where(item_at(rounds) < num_items, 1, 0)


@gluon.jit
def read_item(
    item,
    num_items,
    num_q_heads,
    seq_lens_ptr,
    query_start_loc_ptr,
    tile_seq_ptr,
    tile_start_ptr,
    parts_ptr,
    BLOCK_N: gl.constexpr,
    CUT: gl.constexpr,
):
    """Returns an item's sequence, first row, number of rows from there on, position of that row counted from the first
    key, number of key tiles, and first key."""
    tile = gl.minimum(item, num_items - 1) // num_q_heads
    if CUT:
        seq = gl.load(parts_ptr + tile * 4)
        offset = gl.load(parts_ptr + tile * 4 + 1)
    else:
        seq = gl.load(tile_seq_ptr + tile)
        offset = gl.load(tile_start_ptr + tile)
    first_row = gl.load(query_start_loc_ptr + seq)
    num_rows = gl.load(query_start_loc_ptr + seq + 1) - first_row
    seq_len = gl.load(seq_lens_ptr + seq)
    first_position = seq_len - num_rows + offset
    num_visible = gl.minimum(first_position + 2 * GROUP_ROWS, seq_len)
    num_tiles = (num_visible + BLOCK_N - 1) // BLOCK_N
    first_key = num_tiles * 0
    if CUT:
        packed = gl.load(parts_ptr + tile * 4 + 2)
        part = packed & 0xFFFF
        num_parts = packed >> 16
        first_tile = part * num_tiles // num_parts
        num_tiles = (part + 1) * num_tiles // num_parts - first_tile
        first_key = first_tile * BLOCK_N
        first_position -= first_key
    return seq, first_row + offset, num_rows - offset, first_position, num_tiles, first_key
