"""Products of keys with keys, and of queries with keys, within each chunk of the gated delta rule."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.recurrence.tiles import chunk_of, load_rows, store_rows


@triton.jit(do_not_specialize=["num_seqs"])
def multiply_by_head(
    system_ptr,  # [num_tokens, NUM_HEADS, SIZE] fp32
    inner_ptr,  # [num_tokens, NUM_HEADS, SIZE]
    early_ptr,  # [num_tokens, NUM_HEADS, KEY_DIM]
    query_ptr,  # [num_tokens, NUM_HEADS / GROUP, KEY_DIM], rows of query_stride
    key_ptr,  # [num_tokens, NUM_HEADS / GROUP, KEY_DIM], rows of key_stride
    beta_ptr,  # [num_tokens, NUM_HEADS], rows of beta_stride
    total_ptr,  # [num_tokens, NUM_HEADS] fp32
    bounds_ptr,  # [num_seqs + 1] int32
    num_seqs,
    scale,
    query_stride,
    key_stride,
    beta_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """system_ij = beta_i (k_i k_j) exp(G_i - G_j) for j < i; inner_ij = scale (q_i k_j) exp(G_i - G_j) for j <= i

    early_i = scale q_i exp(G_i)
    """
    # grid: (num_slots, NUM_HEADS)
    head = tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    first, end = chunk_of(bounds_ptr, tl.program_id(0), num_seqs, SIZE)
    if first >= end:
        return
    dtype = inner_ptr.dtype.element_ty
    rows = tl.arange(0, SIZE)
    tokens = first + rows
    dims = tl.arange(0, KEY_PAD)
    key_head = head // GROUP * KEY_DIM
    key = load_rows(key_ptr + key_head, first, rows, end, key_stride, dims, KEY_DIM, NORMALIZE).to(dtype)
    query = load_rows(query_ptr + key_head, first, rows, end, query_stride, dims, KEY_DIM, NORMALIZE)
    inside = tokens < end
    place = tokens.to(tl.int64) * NUM_HEADS + head
    total = tl.load(total_ptr + place, mask=inside, other=0.0)
    beta_at = beta_ptr + tokens.to(tl.int64) * beta_stride + head
    beta = tl.sigmoid(tl.load(beta_at, mask=inside, other=0.0).to(tl.float32))
    early = query * (tl.exp(total) * scale)[:, None]
    store_rows(early_ptr + head * KEY_DIM, early, first, rows, end, NUM_HEADS * KEY_DIM, dims, KEY_DIM)
    apart = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    at = place[:, None] * SIZE + rows[None, :]
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * apart * beta[:, None]
    tl.store(system_ptr + at, tl.where(rows[None, :] < rows[:, None], system, 0.0), mask=inside[:, None])
    inner = tl.dot(query.to(dtype), tl.trans(key), input_precision=PRECISION) * apart * scale
    inner = tl.where((rows[None, :] <= rows[:, None]) & inside[None, :], inner, 0.0)
    tl.store(inner_ptr + at, inner.to(dtype), mask=inside[:, None])


@triton.jit(do_not_specialize=["num_seqs"])
def multiply_by_channel(
    system_ptr,  # [num_tokens, NUM_HEADS, SIZE] fp32
    inner_ptr,  # [num_tokens, NUM_HEADS, SIZE]
    early_ptr,  # [num_tokens, NUM_HEADS, KEY_DIM]
    query_ptr,  # [num_tokens, NUM_HEADS / GROUP, KEY_DIM], rows of query_stride
    key_ptr,  # [num_tokens, NUM_HEADS / GROUP, KEY_DIM], rows of key_stride
    beta_ptr,  # [num_tokens, NUM_HEADS], rows of beta_stride
    total_ptr,  # [num_tokens, NUM_HEADS, KEY_DIM] fp32
    bounds_ptr,  # [num_seqs + 1] int32
    num_seqs,
    scale,
    query_stride,
    key_stride,
    beta_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # of a chunk that a program has
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """system_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc) for j < i; inner_ij = scale sum_c q_ic k_jc ... for j <= i

    early_i = scale q_i exp(G_i). Exponents are split at the program's first row: exp(G_i - G_first)
    exp(G_first - G_j), both at most 0 for j before it. Between its own rows they are computed pair by pair.
    """
    # grid: (num_slots, NUM_HEADS, SIZE / ROWS)
    head = tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    first, end = chunk_of(bounds_ptr, tl.program_id(0), num_seqs, SIZE)
    begin = tl.program_id(2) * ROWS
    if first + begin >= end:
        return
    rows = begin + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE)
    dims = tl.arange(0, KEY_PAD)
    key_at = key_ptr + head // GROUP * KEY_DIM
    query_at = query_ptr + head // GROUP * KEY_DIM
    total_at = total_ptr + head * KEY_DIM
    total_stride: tl.constexpr = NUM_HEADS * KEY_DIM
    key = load_rows(key_at, first, rows, end, key_stride, dims, KEY_DIM, NORMALIZE)
    query = load_rows(query_at, first, rows, end, query_stride, dims, KEY_DIM, NORMALIZE) * scale
    total = load_rows(total_at, first, rows, end, total_stride, dims, KEY_DIM, False)
    early = query * tl.exp(total)
    store_rows(early_ptr + head * KEY_DIM, early, first, rows, end, total_stride, dims, KEY_DIM)
    inside = first + rows < end
    beta_at = beta_ptr + (first + rows).to(tl.int64) * beta_stride + head
    key *= tl.sigmoid(tl.load(beta_at, mask=inside, other=0.0).to(tl.float32))[:, None]

    start_at = total_at + (first + begin).to(tl.int64) * total_stride + dims
    start = tl.load(start_at, mask=dims < KEY_DIM, other=0.0)
    earlier = tl.where(columns < begin, columns, SIZE)  # later columns are zeros
    stop = tl.minimum(end, first + SIZE)
    other = load_rows(key_at, first, earlier, stop, key_stride, dims, KEY_DIM, NORMALIZE)
    fall = load_rows(total_at, first, earlier, stop, total_stride, dims, KEY_DIM, False)
    other = tl.trans(other * tl.exp(tl.minimum(start[None, :] - fall, 0.0)))
    grown = tl.exp(tl.minimum(total - start[None, :], 0.0))
    system = tl.dot(key * grown, other, input_precision=PRECISION)
    inner = tl.dot(query * grown, other, input_precision=PRECISION)
    # Between the program's own rows: each with the one `back` rows before it, so that both have the same layout.
    for back in range(ROWS):
        before = rows - back
        before = tl.where(before >= begin, before, SIZE)
        one = load_rows(key_at, first, before, stop, key_stride, dims, KEY_DIM, NORMALIZE)
        level = load_rows(total_at, first, before, stop, total_stride, dims, KEY_DIM, False)
        one *= tl.exp(tl.minimum(total - level, 0.0))
        here = columns[None, :] == before[:, None]
        system = tl.where(here, tl.sum(key * one, 1)[:, None], system)
        inner = tl.where(here, tl.sum(query * one, 1)[:, None], inner)

    at = ((first + rows).to(tl.int64) * NUM_HEADS + head)[:, None] * SIZE + columns[None, :]
    tl.store(system_ptr + at, tl.where(columns[None, :] < rows[:, None], system, 0.0), mask=inside[:, None])
    inner = tl.where(columns[None, :] <= rows[:, None], inner, 0.0)
    tl.store(inner_ptr + at, inner.to(inner_ptr.dtype.element_ty), mask=inside[:, None])
