"""Carries states of the gated delta rule from chunk to chunk, and computes the outputs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.recurrence.tiles import load_stored, state_tile, store_rows


@triton.jit
def scan_chunks(
    out_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    early_ptr,  # [num_tokens, NUM_HEADS, KEY_DIM]: scale q exp(G)
    late_ptr,  # [num_tokens, NUM_HEADS, KEY_DIM]: k exp(G_last - G)
    new_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    weight_ptr,  # [num_tokens, NUM_HEADS, KEY_DIM]
    inner_ptr,  # [num_tokens, NUM_HEADS, SIZE]
    total_ptr,  # [num_tokens, NUM_HEADS, CHANNELS] fp32
    pool_ptr,  # [num_pieces, KEY_DIM, WIDTH], pieces of pool_stride
    read_ptr,  # [num_seqs, NUM_HEADS * PIECES] int32
    write_ptr,  # [num_seqs, NUM_HEADS * PIECES] int32
    bounds_ptr,  # [num_seqs + 1] int32
    pool_stride,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,  # KEY_DIM, or 1
    CHANNELS_PAD: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """V' = new - weight S; out = early S + inner V'; S = exp(G_last) S + late^T V'"""
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
    at, inside = state_tile(pool_ptr, read_ptr, pool_stride, place, column, PIECES, KEY_DIM, KEY_PAD, WIDTH, TILE)
    state = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    rows = tl.arange(0, SIZE)
    dims = tl.arange(0, KEY_PAD)
    columns = column + tl.arange(0, TILE)
    channels = tl.arange(0, CHANNELS_PAD)
    value_stride: tl.constexpr = NUM_HEADS * VALUE_DIM
    key_stride: tl.constexpr = NUM_HEADS * KEY_DIM
    key_head = head * KEY_DIM
    value_head = head * VALUE_DIM
    for done in range(0, end - start, SIZE):
        first = start + done
        weight = load_stored(weight_ptr + key_head, first, rows, end, key_stride, dims, KEY_DIM)
        early = load_stored(early_ptr + key_head, first, rows, end, key_stride, dims, KEY_DIM)
        late = load_stored(late_ptr + key_head, first, rows, end, key_stride, dims, KEY_DIM)
        inner = load_stored(inner_ptr + head * SIZE, first, rows, end, NUM_HEADS * SIZE, rows, SIZE)
        new = load_stored(new_ptr + value_head, first, rows, end, value_stride, columns, VALUE_DIM)
        last_at = total_ptr + (tl.minimum(first + SIZE, end) - 1).to(tl.int64) * (NUM_HEADS * CHANNELS)
        last = tl.load(last_at + head * CHANNELS + channels, mask=channels < CHANNELS, other=0.0)
        old = state.to(dtype)
        new = (new.to(tl.float32) - tl.dot(weight, old, input_precision=PRECISION)).to(dtype)
        state = state * tl.exp(last)[:, None] + tl.dot(tl.trans(late), new, input_precision=PRECISION)
        out = tl.dot(early, old, input_precision=PRECISION)
        out += tl.dot(inner, new, input_precision=PRECISION)
        store_rows(out_ptr + value_head, out, first, rows, end, value_stride, columns, VALUE_DIM)
    to, kept_inside = state_tile(pool_ptr, write_ptr, pool_stride, place, column, PIECES, KEY_DIM, KEY_PAD, WIDTH, TILE)
    tl.store(to, state.to(pool_ptr.dtype.element_ty), mask=kept_inside)
