"""Causal attention of prompts over made keys and values on Hopper: a loading warp feeds two warp groups through TMA.

Computes one pass of latent_prefill.py, for its widths of DeepSeek's models: 128 + 64 of keys, 128 of values.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.attention.latent_passes import LatentPass, LatentTiles
from baton.kernels.hopper import load_tile, reinterpret

_ROWS = gl.constexpr(64)  # of one warp group
_KEYS = gl.constexpr(128)  # of one tile
_PANEL = gl.constexpr(64)  # elements of one 128-byte swizzled row
_NOPE = gl.constexpr(128)  # of made keys, and of values
_ROPE = gl.constexpr(64)
_STAGES = gl.constexpr(2)
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # and of sums, which are as wide
_TILE_ROWS = 128


@gluon.jit
def _load(
    query_desc, made_desc, latents_desc, query_buf, turned_query_buf, key_buf, turned_buf, value_buf, query_ready,
    key_ready, key_free, value_ready, value_free, query_row, head, first_key, num_tiles,
):  # fmt: skip
    """The loading warp: queries once, then keys and values from the last tile to the first."""
    mbarrier.expect(query_ready, 2 * _ROWS * (_NOPE + _ROPE) * 2)
    for group in gl.static_range(2):
        row = query_row + group * _ROWS
        column = head * (_NOPE + _ROPE)
        load_tile(query_desc, [row, column], query_ready, query_buf.index(group * 2))
        load_tile(query_desc, [row, column + _PANEL], query_ready, query_buf.index(group * 2 + 1))
        load_tile(query_desc, [row, column + _NOPE], query_ready, turned_query_buf.index(group))
    made_column = head * 2 * _NOPE
    for turn in range(num_tiles):
        key_row = first_key + (num_tiles - 1 - turn) * _KEYS
        stage = turn % _STAGES
        phase = (turn // _STAGES & 1) ^ 1
        mbarrier.wait(key_free.index(stage), phase)
        mbarrier.expect(key_ready.index(stage), _KEYS * (_NOPE + _ROPE) * 2)
        load_tile(made_desc, [key_row, made_column], key_ready.index(stage), key_buf.index(stage * 2))
        load_tile(made_desc, [key_row, made_column + _PANEL], key_ready.index(stage), key_buf.index(stage * 2 + 1))
        load_tile(latents_desc, [key_row, 512], key_ready.index(stage), turned_buf.index(stage))
        mbarrier.wait(value_free.index(stage), phase)
        mbarrier.expect(value_ready.index(stage), _KEYS * _NOPE * 2)
        load_tile(made_desc, [key_row, made_column + _NOPE], value_ready.index(stage), value_buf.index(stage * 2))
        load_tile(
            made_desc, [key_row, made_column + _NOPE + _PANEL], value_ready.index(stage), value_buf.index(stage * 2 + 1)
        )


@gluon.jit
def _softmax(score, top, total, limit, scale_log2, MASKED: gl.constexpr):
    """Returns a tile's weights, and the updated maximum and sum. `limit` is each row's last unmasked column."""
    if MASKED:
        cols = gl.arange(0, _KEYS, layout=gl.SliceLayout(0, _SCORES))
        score = gl.where(cols[None, :] <= limit[:, None], score, float("-inf"))
    new_top = gl.maximum(top, gl.max(score, 1) * scale_log2)
    shrink = gl.exp2(top - new_top)
    weight = gl.exp2(score * scale_log2 - new_top[:, None])
    return weight, new_top, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _score(query, turned_query, key_tile, turned_tile):
    """Starts the scores of a tile."""
    zero = gl.zeros([_ROWS, _KEYS], gl.float32, _SCORES)
    score = warpgroup_mma(query, key_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(turned_query, turned_tile.permute((1, 0)), score, is_async=True)


@gluon.jit
def _turn(
    acc, weight, top, total, query, turned_query, key_tiles, turned_tiles, value_tiles, key_ready, key_free,
    value_ready, value_free, limits, num_tiles, turn, scale_log2, MASKED: gl.constexpr,
):  # fmt: skip
    """Computes the scores of tile `turn`, and the previous tile's weights times V."""
    stage = turn % _STAGES
    before = (turn - 1) % _STAGES
    mbarrier.wait(key_ready.index(stage), turn // _STAGES & 1)
    score = _score(query, turned_query, key_tiles.index(stage), turned_tiles.index(stage))
    mbarrier.wait(value_ready.index(before), (turn - 1) // _STAGES & 1)
    acc = warpgroup_mma(weight, value_tiles.index(before), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(key_free.index(stage), count=1)
    limit = limits - (num_tiles - 1 - turn) * _KEYS
    next_weight, top, total, shrink = _softmax(score, top, total, limit, scale_log2, MASKED)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(value_free.index(before), count=1)
    acc = acc * shrink[:, None]
    return acc, gl.convert_layout(next_weight.to(value_tiles.dtype), gl.DotOperandLayout(0, _SCORES, 2)), top, total


@gluon.jit
def _attend(
    out_ptr, partial_ptr, lse_ptr, query_buf, turned_query_buf, key_buf, turned_buf, value_buf, query_ready,
    key_ready, key_free, value_ready, value_free, out_row, num_live, first_position, count, continues, ends, num_tiles,
    num_masked, num_heads, head, scale_log2, GROUP: gl.constexpr,
):  # fmt: skip
    """One warp group: 64 rows; first_position counts from the pass's first key."""
    dtype: gl.constexpr = query_buf.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, _SCORES)
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, _SCORES, 2)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    query = reinterpret(query_buf, dtype, [2, _ROWS, _NOPE], tile_layout).index(GROUP)
    turned_query = turned_query_buf.index(GROUP)
    key_tiles = reinterpret(key_buf, dtype, [_STAGES, _KEYS, _NOPE], tile_layout)
    value_tiles = reinterpret(value_buf, dtype, [_STAGES, _KEYS, _NOPE], tile_layout)

    rows = GROUP * _ROWS + gl.arange(0, _ROWS, layout=row_layout)
    dims = gl.arange(0, _NOPE, layout=gl.SliceLayout(0, _SCORES))
    live = rows < num_live
    limits = gl.minimum(first_position + rows, count - 1)
    lse_at = lse_ptr + (out_row + rows).to(gl.int64) * num_heads + head
    inner = ((out_row + rows).to(gl.int64) * num_heads + head)[:, None] * _NOPE + dims[None, :]
    # Finite, so that a tile that is masked for a row gives 2^(-inf - top) = 0 and not NaN.
    top = gl.full([_ROWS], -1.0e30, gl.float32, row_layout)
    total = gl.zeros([_ROWS], gl.float32, row_layout)
    acc = gl.zeros([_ROWS, _NOPE], gl.float32, _SCORES)
    if continues:
        acc = gl.load(partial_ptr + inner, mask=live[:, None], other=0.0)
        top = gl.load(lse_at, mask=live, other=0.0)
        total = gl.full([_ROWS], 1.0, gl.float32, row_layout)

    mbarrier.wait(query_ready, 0)
    mbarrier.wait(key_ready.index(0), 0)
    score = _score(query, turned_query, key_tiles.index(0), turned_buf.index(0))
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(key_free.index(0), count=1)
    last_tile = num_tiles - 1
    weight, top, total, shrink = _softmax(score, top, total, limits - last_tile * _KEYS, scale_log2, True)
    acc = acc * shrink[:, None]
    weight = gl.convert_layout(weight.to(dtype), weight_layout)
    for turn in range(1, num_masked):
        acc, weight, top, total = _turn(
            acc, weight, top, total, query, turned_query, key_tiles, turned_buf, value_tiles, key_ready, key_free,
            value_ready, value_free, limits, num_tiles, turn, scale_log2, True,
        )  # fmt: skip
    for turn in range(num_masked, num_tiles):
        acc, weight, top, total = _turn(
            acc, weight, top, total, query, turned_query, key_tiles, turned_buf, value_tiles, key_ready, key_free,
            value_ready, value_free, limits, num_tiles, turn, scale_log2, False,
        )  # fmt: skip
    stage = last_tile % _STAGES
    mbarrier.wait(value_ready.index(stage), last_tile // _STAGES & 1)
    acc = warpgroup_mma(weight, value_tiles.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    acc = acc * (1.0 / total)[:, None]
    if ends:
        gl.store(out_ptr + inner, acc.to(dtype), mask=live[:, None])
    else:
        gl.store(partial_ptr + inner, acc, mask=live[:, None])
        gl.store(lse_at, top + gl.log2(total), mask=live)


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@gluon.jit(
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
    out_ptr,  # [num_tokens, num_heads, 128]
    query_desc,  # [num_tokens, row], boxes of [64, 64]
    made_desc,  # [num_keys, num_heads * 256], boxes of [128, 64]
    latents_desc,  # [num_keys, 576], boxes of [128, 64]
    partial_ptr,  # [num_tokens, num_heads, 128] fp32, of queries that are continued
    lse_ptr,  # [num_tokens, num_heads] fp32, base 2
    seq_lens_ptr,  # [num_seqs] int32, including the chunk
    query_start_loc_ptr,  # [num_seqs + 1] int32
    starts_ptr,  # [num_seqs + 1] int32
    firsts_ptr,  # [num_seqs] int32
    tile_seq_ptr,  # [num_tiles] int32
    tile_start_ptr,  # [num_tiles] int32, within the chunk
    scale_log2,
):
    """out_i = softmax_{j <= i}(scale (q_i k_j + r_i t_j)) v_j, of the keys of one pass after those before"""
    # grid: (num_heads, num_tiles)
    head = gl.program_id(0)
    num_heads = gl.num_programs(0)
    seq = gl.load(tile_seq_ptr + gl.program_id(1))
    offset = gl.load(tile_start_ptr + gl.program_id(1))
    first_row = gl.load(query_start_loc_ptr + seq)
    num_rows = gl.load(query_start_loc_ptr + seq + 1) - first_row
    base = gl.load(starts_ptr + seq)
    count = gl.load(starts_ptr + seq + 1) - base
    if count == 0:
        return
    seq_len = gl.load(seq_lens_ptr + seq)
    first = gl.load(firsts_ptr + seq)
    first_position = seq_len - num_rows + offset - first
    num_visible = gl.minimum(gl.minimum(first_position + 2 * _ROWS, seq_len - first), count)
    # A tile that sees none of the keys computes a masked tile, and passes on what it has.
    num_tiles = (gl.maximum(num_visible, 1) + _KEYS - 1) // _KEYS
    unmasked = gl.maximum(gl.minimum(first_position + 1, count), 0) // _KEYS
    num_masked = gl.maximum(num_tiles - unmasked, 1)

    dtype: gl.constexpr = made_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    query_buf = gl.allocate_shared_memory(dtype, [4, _ROWS, _PANEL], layout)
    turned_query_buf = gl.allocate_shared_memory(dtype, [2, _ROWS, _PANEL], layout)
    key_buf = gl.allocate_shared_memory(dtype, [_STAGES * 2, _KEYS, _PANEL], layout)
    turned_buf = gl.allocate_shared_memory(dtype, [_STAGES, _KEYS, _PANEL], layout)
    value_buf = gl.allocate_shared_memory(dtype, [_STAGES * 2, _KEYS, _PANEL], layout)
    query_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    key_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(query_ready, count=1)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(key_ready.index(stage), count=1)
        mbarrier.init(key_free.index(stage), count=2)
        mbarrier.init(value_ready.index(stage), count=1)
        mbarrier.init(value_free.index(stage), count=2)
    gl.warp_specialize(
        [
            (_attend, (
                out_ptr, partial_ptr, lse_ptr, query_buf, turned_query_buf, key_buf, turned_buf, value_buf, query_ready,
                key_ready, key_free, value_ready, value_free, first_row + offset, num_rows - offset, first_position,
                count, first > 0, first + count == seq_len, num_tiles, num_masked, num_heads, head, scale_log2, 0,
            )),
            (_attend, (
                out_ptr, partial_ptr, lse_ptr, query_buf, turned_query_buf, key_buf, turned_buf, value_buf, query_ready,
                key_ready, key_free, value_ready, value_free, first_row + offset, num_rows - offset, first_position,
                count, first > 0, first + count == seq_len, num_tiles, num_masked, num_heads, head, scale_log2, 1,
            )),
            (_load, (
                query_desc, made_desc, latents_desc, query_buf, turned_query_buf, key_buf, turned_buf, value_buf,
                query_ready, key_ready, key_free, value_ready, value_free, first_row + offset, head, base, num_tiles,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def attend_pass(
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
    """Launches the kernel for one pass of latent_prefill_attention: made [num_keys, num_heads * 256] of its keys."""
    num_tokens, num_heads, width = query.shape
    panel = gl.NVMMASharedLayout(128, 16, rank=2)
    rows = query.as_strided((num_tokens, num_heads * width), (query.stride(0), 1))
    _latent_prefill_kernel[(num_heads, len(tiles.seq))](
        out,
        TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [64, 64], panel),
        TensorDescriptor(made, list(made.shape), list(made.stride()), [_TILE_ROWS, 64], panel),
        TensorDescriptor(latents, list(latents.shape), list(latents.stride()), [_TILE_ROWS, 64], panel),
        partial,
        lse,
        seq_lens,
        query_start_loc,
        keys.starts,
        keys.firsts,
        tiles.seq,
        tiles.start,
        scale_log2,
        num_warps=4,
    )
