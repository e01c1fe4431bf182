"""The first pass over special rows: the best token, or the maxima that the filters' search begins with."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.sampling.columns import FLAGS, TEMPERATURE, load_fraction, load_number
from baton.kernels.sampling.edits import edited_logits
from baton.kernels.sampling.needs import NEEDS_ARGMAX, NEEDS_FILTERS, NEEDS_RESTRICTION


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr"])
def _tops_kernel(
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    chunk_tops_ptr,  # [num_rows, num_parts * (PART / CHUNK)] fp32
    part_tops_ptr,  # [num_rows, num_parts] fp32
    part_sums_ptr,  # [num_rows, num_parts] fp32
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
    OVERLAP: tl.constexpr,
):
    """Greedy rows: the part's argmax. Filtered rows: each chunk's max; the part's, and its sum of exp((l - max) / t)"""
    # grid: (num_parts, num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    needs = tl.load(needs_ptr + row)
    if (needs & (NEEDS_ARGMAX | NEEDS_FILTERS)) == 0:
        return
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    row_ptr = columns_ptr + batch_row
    index = part * PART + tl.arange(0, PART)
    inside = index < vocab_size
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
    if (needs & NEEDS_ARGMAX) != 0:
        top = tl.max(logits, 0)
        tl.store(best_ptr + row * num_parts + part, top)
        tl.store(index_ptr + row * num_parts + part, tl.min(tl.where(logits == top, index, 2147483647), 0))
    else:
        temperature = load_fraction(row_ptr, stride, TEMPERATURE)
        NUM_CHUNKS: tl.constexpr = PART // CHUNK
        tops = tl.max(tl.reshape(logits, [NUM_CHUNKS, CHUNK]), 1)
        chunks = (row * num_parts + part) * NUM_CHUNKS + tl.arange(0, NUM_CHUNKS)
        tl.store(chunk_tops_ptr + chunks, tops)
        top = tl.max(tops, 0)
        lowest = tl.maximum(top, -3.4e38)  # an empty part gives exp(-inf - finite) = 0
        total = tl.sum(tl.exp((logits - lowest) / temperature), 0)
        tl.store(part_tops_ptr + row * num_parts + part, top)
        tl.store(part_sums_ptr + row * num_parts + part, total)
