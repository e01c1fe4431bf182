"""Lists the tokens between a row's cuts, in any order, and sums those above."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.sampling.columns import FLAGS, TEMPERATURE, load_fraction, load_number
from baton.kernels.sampling.edits import edited_logits
from baton.kernels.sampling.needs import NEEDS_FILTERS, NEEDS_RESTRICTION


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr"])
def _collect_kernel(
    list_counts_ptr,  # [num_rows] int32, 0 before
    list_logits_ptr,  # [num_rows, CAPACITY] fp32
    list_tokens_ptr,  # [num_rows, CAPACITY] int32
    above_counts_ptr,  # [num_rows, num_parts] int32
    above_sums_ptr,  # [num_rows, num_parts] fp32
    cuts_ptr,  # [num_rows, 4] fp32
    chunk_counts_ptr,  # [num_rows] int32
    chunks_ptr,  # [num_rows, num_parts * (PART / CHUNK)] int32
    needs_ptr,  # [num_rows] int32
    logits_ptr,  # [num_rows, logits_stride]
    batch_rows_ptr,  # [num_rows] int32; -1 is padding
    columns_ptr,
    counts_ptr,  # [batch_rows, counts_stride]
    bits_ptr,  # [num_rows, bits_stride] int32
    stride,
    logits_stride,
    counts_stride,
    bits_stride,
    vocab_size,
    num_parts,
    PROMPT: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """list = tokens with low <= l <= high; count and sum of exp((l - top) / t) where l > high"""
    # grid: (num_parts, num_rows), over the chunks that have such tokens
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    needs = tl.load(needs_ptr + row)
    num_chunks = tl.load(chunk_counts_ptr + row)
    NUM_CHUNKS: tl.constexpr = PART // CHUNK
    if ((needs & NEEDS_FILTERS) == 0) | (part * NUM_CHUNKS >= num_chunks):
        return
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    row_ptr = columns_ptr + batch_row
    place = tl.arange(0, PART)
    slot = part * NUM_CHUNKS + place // CHUNK
    chunk = tl.load(chunks_ptr + row * num_parts * NUM_CHUNKS + slot, mask=slot < num_chunks, other=0)
    index = chunk * CHUNK + place % CHUNK
    inside = (slot < num_chunks) & (index < vocab_size)
    logits = edited_logits(
        logits_ptr + row * logits_stride,
        index,
        inside,
        row_ptr,
        stride,
        load_number(row_ptr, stride, FLAGS),
        counts_ptr + batch_row * counts_stride,
        bits_ptr + row * bits_stride,
        (needs & NEEDS_RESTRICTION) != 0,
        PROMPT,
    )
    logits = tl.where(inside, logits, float("-inf"))
    low = tl.load(cuts_ptr + row * 4)
    high = tl.load(cuts_ptr + row * 4 + 1)
    listed = (logits >= low) & (logits <= high) & (logits > float("-inf"))
    count = tl.sum(listed.to(tl.int32), 0)
    if count > 0:
        first = tl.atomic_add(list_counts_ptr + row, count)
        slot = first + tl.cumsum(listed.to(tl.int32), 0) - 1
        fits = listed & (slot < CAPACITY)
        tl.store(list_logits_ptr + row * CAPACITY + slot, logits, mask=fits)
        tl.store(list_tokens_ptr + row * CAPACITY + slot, index, mask=fits)
    if high < float("inf"):
        above = logits > high
        top = tl.load(cuts_ptr + row * 4 + 2)
        weights = tl.exp((logits - top) / load_fraction(row_ptr, stride, TEMPERATURE))
        tl.store(above_counts_ptr + row * num_parts + part, tl.sum(above.to(tl.int32), 0))
        tl.store(above_sums_ptr + row * num_parts + part, tl.sum(tl.where(above, weights, 0.0), 0))
