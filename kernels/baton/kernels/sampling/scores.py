"""Log-probabilities of sampled, most likely and named tokens: reference.logprobs on the device.

They are of the model's logits, or of those that tokens are drawn from, which are stored for this.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.sampling.columns import (
    ALLOWED,
    FLAGS,
    NUM_BIASES,
    NUM_LOGPROBS,
    NUM_NAMED,
    NUM_REASONING_END,
    NUM_SEQUENCES,
    SEQUENCE_WIDTH,
    SUPPRESSED,
    TEMPERATURE,
    is_filtered,
    load_fraction,
    load_lists,
    load_number,
)
from baton.kernels.sampling.edits import edited_logits
from baton.kernels.sampling.needs import NEEDS_RESTRICTION


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr"])
def _keep_kernel(
    processed_ptr,  # [num_rows, vocab_size] fp32
    bounds_ptr,  # [num_rows] fp32: the lowest logit / temperature that passes the filters
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
    PROMPT: tl.constexpr,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """edited logits / temperature; -inf where the filters exclude a token. At temperature 0: edited logits"""
    # grid: (num_parts, num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    if batch_row < 0:
        return
    row_ptr = columns_ptr + batch_row
    if load_number(row_ptr, stride, NUM_LOGPROBS) < 0:
        return
    index = tl.program_id(0) * PART + tl.arange(0, PART)
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
        (tl.load(needs_ptr + row) & NEEDS_RESTRICTION) != 0,
        PROMPT,
    )
    temperature = load_fraction(row_ptr, stride, TEMPERATURE)
    if temperature > 0:
        logits = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
        if is_filtered(row_ptr, stride):
            logits = tl.where(logits >= tl.load(bounds_ptr + row), logits, float("-inf"))
    tl.store(processed_ptr + row * vocab_size + index, logits, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr", "batch_rows_ptr"])
def _score_parts_kernel(
    part_tops_ptr,  # [num_rows, num_parts] fp32
    part_sums_ptr,  # [num_rows, num_parts] fp32
    ranks_ptr,  # [num_rows, num_parts] int32: number of logits above the sampled token's
    likely_logits_ptr,  # [num_rows, num_parts, MOST] fp32, the part's largest, descending
    likely_tokens_ptr,  # [num_rows, num_parts, MOST] int32
    logits_ptr,  # [num_rows, logits_stride]
    tokens_ptr,  # [num_rows] int32, sampled
    batch_rows_ptr,  # [num_rows] int32; -1 is padding
    columns_ptr,
    stride,
    logits_stride,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    MOST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """max, sum of exp(l - max), count of l > drawn, and the largest of a part"""
    # grid: (num_parts, num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    if batch_row < 0:
        return
    num_logprobs = load_number(columns_ptr + batch_row, stride, NUM_LOGPROBS)
    if num_logprobs < 0:
        return
    index = part * PART + tl.arange(0, PART)
    base = logits_ptr + row * logits_stride
    logits = tl.load(base + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    drawn = tl.load(base + tl.load(tokens_ptr + row)).to(tl.float32)
    place = row * num_parts + part
    top = tl.max(logits, 0)
    tl.store(part_tops_ptr + place, top)
    lowest = tl.maximum(top, -3.4e38)  # a part without tokens gives exp(-inf - finite) = 0
    tl.store(part_sums_ptr + place, tl.sum(tl.exp(logits - lowest), 0))
    tl.store(ranks_ptr + place, tl.sum((logits > drawn).to(tl.int32), 0))
    left = index < vocab_size
    for item in range(tl.minimum(num_logprobs, MOST)):
        largest = tl.max(tl.where(left, logits, float("-inf")), 0)
        token = tl.min(tl.where(left & (logits == largest), index, 2147483647), 0)
        tl.store(likely_logits_ptr + place * MOST + item, largest)
        tl.store(likely_tokens_ptr + place * MOST + item, token)
        left = left & (index != token)


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr", "batch_rows_ptr"])
def _score_rows_kernel(
    found_ptr,  # [num_rows, 2 + 2 * MOST + NAMED] int32: logprob, rank, likely tokens, their logprobs, named ones
    part_tops_ptr,  # [num_rows, num_parts] fp32
    part_sums_ptr,  # [num_rows, num_parts] fp32
    ranks_ptr,  # [num_rows, num_parts] int32
    likely_logits_ptr,  # [num_rows, num_parts, MOST] fp32
    likely_tokens_ptr,  # [num_rows, num_parts, MOST] int32
    logits_ptr,  # [num_rows, logits_stride]
    tokens_ptr,  # [num_rows] int32, sampled
    batch_rows_ptr,  # [num_rows] int32; -1 is padding
    columns_ptr,
    stride,
    logits_stride,
    num_words,
    num_parts,
    PARTS_PAD: tl.constexpr,
    MOST: tl.constexpr,
    NAMED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """l - log(sum of exp(l)), or l unless NORMALIZED; the largest of all parts by merging the parts' own"""
    # grid: (num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    if batch_row < 0:
        return
    row_ptr = columns_ptr + batch_row
    num_logprobs = load_number(row_ptr, stride, NUM_LOGPROBS)
    if num_logprobs < 0:
        return
    parts = tl.arange(0, PARTS_PAD)
    used = parts < num_parts
    place = row * num_parts + parts
    tops = tl.load(part_tops_ptr + place, mask=used, other=float("-inf"))
    sums = tl.load(part_sums_ptr + place, mask=used, other=0.0)
    norm = 0.0
    if NORMALIZED:
        top = tl.maximum(tl.max(tops, 0), -3.4e38)
        norm = top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))
    base = logits_ptr + row * logits_stride
    drawn = tl.load(base + tl.load(tokens_ptr + row)).to(tl.float32)
    found = found_ptr + row * (2 + 2 * MOST + NAMED)
    tl.store(found, (drawn - norm).to(tl.int32, bitcast=True))
    tl.store(found + 1, 1 + tl.sum(tl.load(ranks_ptr + place, mask=used, other=0), 0))
    heads = tl.zeros([PARTS_PAD], tl.int32)
    for item in range(tl.minimum(num_logprobs, MOST)):
        # Each part's remaining tokens begin at its head.
        likely = tl.load(likely_logits_ptr + place * MOST + heads, mask=used, other=float("-inf"))
        tokens = tl.load(likely_tokens_ptr + place * MOST + heads, mask=used, other=2147483647)
        largest = tl.max(likely, 0)
        token = tl.min(tl.where(likely == largest, tokens, 2147483647), 0)
        tl.store(found + 2 + item, token)
        tl.store(found + 2 + MOST + item, (largest - norm).to(tl.int32, bitcast=True))
        heads += (tokens == token).to(tl.int32)
    num_named = tl.minimum(load_number(row_ptr, stride, NUM_NAMED), NAMED)
    if num_named > 0:
        flags = load_number(row_ptr, stride, FLAGS)
        lists = load_lists(row_ptr, stride) + 2 * load_number(row_ptr, stride, NUM_BIASES)
        lists += num_words * (((flags & ALLOWED) != 0).to(tl.int32) + ((flags & SUPPRESSED) != 0).to(tl.int32))
        width = load_number(row_ptr, stride, SEQUENCE_WIDTH)
        lists += load_number(row_ptr, stride, NUM_SEQUENCES) * (width + 1)
        lists += load_number(row_ptr, stride, NUM_REASONING_END)
        slot = tl.arange(0, NAMED)
        named = slot < num_named
        ids = tl.load(lists + slot, mask=named, other=0)
        logits = tl.load(base + ids, mask=named, other=0.0).to(tl.float32)
        tl.store(found + 2 + 2 * MOST + slot, (logits - norm).to(tl.int32, bitcast=True), mask=named)
