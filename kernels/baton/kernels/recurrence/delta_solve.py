"""The WY representation of each chunk of the gated delta rule: its new values, and the weights of the state in them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.recurrence.tiles import chunk_of, load_rows, store_rows


@triton.jit
def _inverse(system_ptr, first, end, head, NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower A [SIZE, SIZE]

    Blocks of 16 on the diagonal are inverted row by row: x_i = e_i - sum_(j < i) A_ij x_j. With D of these, L the rest
    of A and M = D L, whose fourth power is zero for four blocks: (I + A)^-1 = (I - M) (I + M^2) D.
    """
    BLOCK: tl.constexpr = 16
    COUNT: tl.constexpr = SIZE // BLOCK
    rows = tl.arange(0, SIZE)
    tokens = first + rows
    at = (tokens.to(tl.int64) * NUM_HEADS + head)[:, None] * SIZE + rows[None, :]
    below = rows[None, :] // BLOCK < rows[:, None] // BLOCK
    # All of A is loaded before its rows, which then are in the L1 cache: each one waits for the row before it.
    system = tl.load(system_ptr + at, mask=(tokens < end)[:, None], other=0.0)
    rest = tl.where(below, system, 0.0)
    blocks = tl.arange(0, COUNT)
    inner = tl.arange(0, BLOCK)
    diagonal = tl.where(inner[:, None] == inner[None, :], 1.0, 0.0)
    solved = tl.broadcast_to(diagonal[None, :, :], COUNT, BLOCK, BLOCK)
    for index in range(1, BLOCK):
        places = first + blocks * BLOCK + index
        row_at = (places.to(tl.int64) * NUM_HEADS + head)[:, None] * SIZE + blocks[:, None] * BLOCK + inner[None, :]
        row = tl.load(system_ptr + row_at, mask=(places < end)[:, None], other=0.0)
        change = tl.sum(row[:, :, None] * solved, 1)
        solved -= tl.where((inner == index)[None, :, None], change[:, None, :], 0.0)
    wide = tl.broadcast_to(tl.reshape(solved, SIZE, 1, BLOCK), SIZE, COUNT, BLOCK)
    same = rows[:, None] // BLOCK == rows[None, :] // BLOCK
    inverse = tl.where(same, tl.reshape(wide, SIZE, SIZE), 0.0)
    step = tl.dot(inverse, rest, input_precision=PRECISION)
    twice = tl.dot(step, step, input_precision=PRECISION)
    inverse += tl.dot(twice, inverse, input_precision=PRECISION)
    return inverse - tl.dot(step, inverse, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_seqs"])
def solve_chunks(
    new_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    weight_ptr,  # [num_tokens, NUM_HEADS, KEY_DIM]
    late_ptr,  # [num_tokens, NUM_HEADS, KEY_DIM]
    system_ptr,  # [num_tokens, NUM_HEADS, SIZE] fp32
    key_ptr,  # [num_tokens, NUM_HEADS / GROUP, KEY_DIM], rows of key_stride
    value_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM], rows of value_stride
    beta_ptr,  # [num_tokens, NUM_HEADS], rows of beta_stride
    total_ptr,  # [num_tokens, NUM_HEADS, CHANNELS] fp32
    bounds_ptr,  # [num_seqs + 1] int32
    num_seqs,
    key_stride,
    value_stride,
    beta_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    CHANNELS: tl.constexpr,  # KEY_DIM, or 1
    CHANNELS_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """T = (I + system)^-1; new = T beta v; weight = T beta k exp(G); late = k exp(G_last - G)"""
    # grid: (num_slots, NUM_HEADS)
    head = tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    first, end = chunk_of(bounds_ptr, tl.program_id(0), num_seqs, SIZE)
    if first >= end:
        return
    dtype = new_ptr.dtype.element_ty
    inverse = _inverse(system_ptr, first, end, head, NUM_HEADS, SIZE, INVERSE_PRECISION).to(dtype)
    rows = tl.arange(0, SIZE)
    tokens = first + rows
    inside = tokens < end
    beta_at = beta_ptr + tokens.to(tl.int64) * beta_stride + head
    beta = tl.sigmoid(tl.load(beta_at, mask=inside, other=0.0).to(tl.float32))[:, None]

    dims = tl.arange(0, VALUE_PAD)
    value = load_rows(value_ptr + head * VALUE_DIM, first, rows, end, value_stride, dims, VALUE_DIM, False)
    new = tl.dot(inverse, (value * beta).to(dtype), input_precision=PRECISION)
    store_rows(new_ptr + head * VALUE_DIM, new, first, rows, end, NUM_HEADS * VALUE_DIM, dims, VALUE_DIM)

    dims = tl.arange(0, KEY_PAD)
    channels = tl.arange(0, CHANNELS_PAD)
    key = load_rows(key_ptr + head // GROUP * KEY_DIM, first, rows, end, key_stride, dims, KEY_DIM, NORMALIZE)
    total = load_rows(total_ptr + head * CHANNELS, first, rows, end, NUM_HEADS * CHANNELS, channels, CHANNELS, False)
    key_stride_out: tl.constexpr = NUM_HEADS * KEY_DIM
    weight = tl.dot(inverse, (key * tl.exp(total) * beta).to(dtype), input_precision=PRECISION)
    store_rows(weight_ptr + head * KEY_DIM, weight, first, rows, end, key_stride_out, dims, KEY_DIM)
    last_at = total_ptr + head * CHANNELS + (tl.minimum(first + SIZE, end) - 1).to(tl.int64) * (NUM_HEADS * CHANNELS)
    last = tl.load(last_at + channels, mask=channels < CHANNELS, other=0.0)
    late = key * tl.exp(tl.minimum(last[None, :] - total, 0.0))
    store_rows(late_ptr + head * KEY_DIM, late, first, rows, end, key_stride_out, dims, KEY_DIM)
