"""Carries states of the gated delta rule from chunk to chunk, and computes the outputs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.recurrence.tiles import load_rows, state_tile, store_rows


@triton.jit
def scan_chunks(
    out_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    query_ptr,  # [num_tokens, NUM_HEADS / GROUP, KEY_DIM], rows of query_stride
    key_ptr,  # [num_tokens, NUM_HEADS / GROUP, KEY_DIM], rows of key_stride
    new_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    weight_ptr,  # [num_tokens, NUM_HEADS, KEY_DIM]
    inner_ptr,  # [num_tokens, NUM_HEADS, SIZE]
    total_ptr,  # [num_tokens, NUM_HEADS, CHANNELS] fp32
    pool_ptr,  # [num_pieces, KEY_DIM, WIDTH], pieces of pool_stride
    read_ptr,  # [num_seqs, NUM_HEADS * PIECES] int32
    write_ptr,  # [num_seqs, NUM_HEADS * PIECES] int32
    bounds_ptr,  # [num_seqs + 1] int32
    scale,
    query_stride,
    key_stride,
    pool_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,  # KEY_DIM, or 1
    CHANNELS_PAD: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """V' = new - weight S; out = scale q exp(G) S + inner V'; S = exp(G_last) S + (k exp(G_last - G))^T V'"""
    # grid: (VALUE_DIM / TILE, NUM_HEADS, num_seqs)
    column = tl.program_id(0) * TILE
    head = tl.program_id(1)
    seq = tl.program_id(2)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(bounds_ptr + seq)
    end = tl.load(bounds_ptr + seq + 1)
    place = seq * NUM_HEADS + head
    at, inside = state_tile(read_ptr, pool_stride, place, column, PIECES, KEY_DIM, KEY_PAD, WIDTH, TILE)
    state = tl.load(pool_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    rows = tl.arange(0, SIZE)
    dims = tl.arange(0, KEY_PAD)
    columns = column + tl.arange(0, TILE)
    channels = tl.arange(0, CHANNELS_PAD)
    key_head = head // GROUP * KEY_DIM
    total_at = total_ptr + head * CHANNELS
    for done in range(0, end - start, SIZE):
        first = start + done
        old = state.to(dtype)
        weight_at = weight_ptr + head * KEY_DIM
        weight = load_rows(weight_at, first, rows, end, NUM_HEADS * KEY_DIM, dims, KEY_DIM, False).to(dtype)
        new_at = new_ptr + head * VALUE_DIM
        new = load_rows(new_at, first, rows, end, NUM_HEADS * VALUE_DIM, columns, VALUE_DIM, False)
        new = (new - tl.dot(weight, old, input_precision=PRECISION)).to(dtype)
        total = load_rows(total_at, first, rows, end, NUM_HEADS * CHANNELS, channels, CHANNELS, False)
        query = load_rows(query_ptr + key_head, first, rows, end, query_stride, dims, KEY_DIM, NORMALIZE)
        out = tl.dot((query * tl.exp(total) * scale).to(dtype), old, input_precision=PRECISION)
        inner_at = inner_ptr + head * SIZE
        inner = load_rows(inner_at, first, rows, end, NUM_HEADS * SIZE, rows, SIZE, False).to(dtype)
        out += tl.dot(inner, new, input_precision=PRECISION)
        store_rows(out_ptr + head * VALUE_DIM, out, first, rows, end, NUM_HEADS * VALUE_DIM, columns)

        last_at = total_at + (tl.minimum(first + SIZE, end) - 1).to(tl.int64) * (NUM_HEADS * CHANNELS)
        last = tl.load(last_at + channels, mask=channels < CHANNELS, other=0.0)
        key = load_rows(key_ptr + key_head, first, rows, end, key_stride, dims, KEY_DIM, NORMALIZE)
        key = (key * tl.exp(tl.minimum(last[None, :] - total, 0.0))).to(dtype)
        state = state * tl.exp(last)[:, None] + tl.dot(tl.trans(key), new, input_precision=PRECISION)
    to, kept_inside = state_tile(write_ptr, pool_stride, place, column, PIECES, KEY_DIM, KEY_PAD, WIDTH, TILE)
    tl.store(pool_ptr + to, state.to(pool_ptr.dtype.element_ty), mask=kept_inside)
