"""Samples a token per row by Gumbel-max on the device, with the noise of reference.sampling, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.sampling.columns import (
    FLAGS,
    NUM_PROMPT,
    PENALIZED,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_fraction,
    load_long,
    load_number,
)
from baton.kernels.sampling.columns import SPECIAL as _SPECIAL
from baton.kernels.sampling.edits import edited_logits
from baton.kernels.sampling.needs import (
    NEEDS_CHOICE,
    NEEDS_DRAW,
    NEEDS_FILTERS,
    NEEDS_LATE_DRAW,
    NEEDS_RESTRICTION,
    NEEDS_TRIAL,
)
from baton.kernels.sampling.noise import gumbel, vocabulary_words


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr", "seq_lens_ptr"])
def _draw_kernel(
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    logits_ptr,  # [num_rows, logits_stride]
    batch_rows_ptr,  # [num_rows] int32; -1 is padding
    seq_lens_ptr,  # [num_rows] int32
    columns_ptr,
    stride,
    logits_stride,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows without edits and filters: argmax of logit / t - log(-log u); of the logit where the temperature is 0"""
    # grid: (num_parts, num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    if batch_row < 0:
        return
    row_ptr = columns_ptr + batch_row
    if (load_number(row_ptr, stride, FLAGS) & _SPECIAL) != 0:
        return
    index = part * PART + tl.arange(0, PART)
    inside = index < vocab_size
    score = tl.load(logits_ptr + row * logits_stride + index, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = load_fraction(row_ptr, stride, TEMPERATURE)
    if temperature > 0:
        position = tl.load(seq_lens_ptr + row) - load_number(row_ptr, stride, NUM_PROMPT)
        words = vocabulary_words(load_long(row_ptr, stride, SEED_LOW), position, part * PART, PART)
        score = tl.div_rn(score, tl.zeros_like(score) + temperature) + gumbel(words)
        score = tl.where(inside, score, float("-inf"))
    top = tl.max(score, 0)
    tl.store(best_ptr + row * num_parts + part, top)
    tl.store(index_ptr + row * num_parts + part, tl.min(tl.where(score == top, index, 2147483647), 0))


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr", "seq_lens_ptr"])
def _draw_special_kernel(
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    bounds_ptr,  # [num_rows] fp32: the lowest logit / temperature that passes the filters
    needs_ptr,  # [num_rows] int32
    sums_ptr,  # [num_rows, num_parts, 2] fp32, of trials: weight above the upper cut, from the lower cut on
    cuts_ptr,  # [num_rows, 4] fp32
    logits_ptr,  # [num_rows, logits_stride]
    batch_rows_ptr,  # [num_rows] int32; -1 is padding
    seq_lens_ptr,  # [num_rows] int32
    columns_ptr,
    counts_ptr,  # [batch_rows, counts_stride]
    bits_ptr,  # [num_rows, bits_stride] int32
    stride,
    logits_stride,
    counts_stride,
    bits_stride,
    vocab_size,
    num_parts,
    LATE: tl.constexpr,
    PROMPT: tl.constexpr,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Other rows that are not greedy: the same with edited logits that pass the row's bound"""
    # grid: (num_parts, num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    needs = tl.load(needs_ptr + row)
    if (needs & (NEEDS_LATE_DRAW if LATE else NEEDS_DRAW | NEEDS_TRIAL)) == 0:
        return
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    row_ptr = columns_ptr + batch_row
    bound = float("-inf")
    if (needs & NEEDS_DRAW) == 0:
        bound = tl.load(bounds_ptr + row)
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
    temperature = load_fraction(row_ptr, stride, TEMPERATURE)
    if not LATE:  # noqa: SIM102 - decided at compile time
        if (needs & NEEDS_TRIAL) != 0:
            weights = tl.full([PART], 1.0, tl.float32)
            if load_number(row_ptr, stride, TOP_K) == 0:
                weights = tl.exp((logits - tl.load(cuts_ptr + row * 4 + 2)) / temperature)
            sums = sums_ptr + (row * num_parts + part) * 2
            above = tl.where(inside & (logits > tl.load(cuts_ptr + row * 4 + 1)), weights, 0.0)
            tl.store(sums, tl.sum(above, 0))
            tl.store(sums + 1, tl.sum(tl.where(inside & (logits >= tl.load(cuts_ptr + row * 4)), weights, 0.0), 0))
    score = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    passes = inside & (score >= bound)
    if tl.max(passes.to(tl.int32), 0) == 0:
        tl.store(best_ptr + row * num_parts + part, float("-inf"))
        tl.store(index_ptr + row * num_parts + part, part * PART)
        return
    position = tl.load(seq_lens_ptr + row) - load_number(row_ptr, stride, NUM_PROMPT)
    words = vocabulary_words(load_long(row_ptr, stride, SEED_LOW), position, part * PART, PART)
    score = tl.where(passes, score + gumbel(words), float("-inf"))
    top = tl.max(score, 0)
    tl.store(best_ptr + row * num_parts + part, top)
    tl.store(index_ptr + row * num_parts + part, tl.min(tl.where(score == top, index, 2147483647), 0))


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr"])
def _prove_kernel(
    needs_ptr,  # [num_rows] int32
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    sums_ptr,  # [num_rows, num_parts, 2] fp32
    cuts_ptr,  # [num_rows, 4] fp32
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
    PARTS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Accepts a trial's token if it is above the upper cut and the threshold between both; else the row is searched"""
    # grid: (num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    needs = tl.load(needs_ptr + row)
    if (needs & NEEDS_TRIAL) == 0:
        return
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    row_ptr = columns_ptr + batch_row
    parts = tl.arange(0, PARTS_PAD)
    used = parts < num_parts
    place = row * num_parts + parts
    weight_above = tl.sum(tl.load(sums_ptr + place * 2, mask=used, other=0.0), 0)
    weight_from = tl.sum(tl.load(sums_ptr + place * 2 + 1, mask=used, other=0.0), 0)
    top_k = load_number(row_ptr, stride, TOP_K)
    target = load_fraction(row_ptr, stride, TOP_P) * tl.load(cuts_ptr + row * 4 + 3)
    if top_k > 0:
        target = top_k.to(tl.float32)
    # Rows within the rounding of sums are searched.
    proven = (weight_above < target * (1.0 - 1e-5)) & (weight_from > target * (1.0 + 1e-5))
    best = tl.load(best_ptr + place, mask=used, other=float("-inf"))
    index = tl.load(index_ptr + place, mask=used, other=2147483647)
    token = tl.min(tl.where(best == tl.max(best, 0), index, 2147483647), 0)
    winner = tl.full([1], 0, tl.int32) + token
    logits = edited_logits(
        logits_ptr + row * logits_stride,
        winner,
        (winner >= 0) & (winner < vocab_size),
        row_ptr,
        stride,
        load_number(row_ptr, stride, FLAGS),
        counts_ptr + batch_row * counts_stride,
        bits_ptr + row * bits_stride,
        (needs & NEEDS_RESTRICTION) != 0,
        PROMPT,
    )
    if (not proven) | (tl.max(logits, 0) <= tl.load(cuts_ptr + row * 4 + 1)):
        tl.store(needs_ptr + row, (needs & ~NEEDS_TRIAL) | NEEDS_FILTERS)


@triton.jit(do_not_specialize_on_alignment=["out_ptr", "batch_rows_ptr", "seq_lens_ptr"])
def _choose_kernel(
    out_ptr,  # [num_rows] int32
    token_ids_ptr,  # [batch_rows, tokens_stride] int32
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    batch_rows_ptr,  # [num_rows] int32; -1 is padding
    seq_lens_ptr,  # [num_rows] int32
    columns_ptr,
    counts_ptr,  # [batch_rows, counts_stride]
    needs_ptr,  # [num_rows] int32, where SPECIAL
    stride,
    counts_stride,
    tokens_stride,
    num_parts,
    SPECIAL: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Takes the best of all parts. Also stores it at token_ids[row, seq_len] and counts it"""
    # grid: (num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    if batch_row < 0:
        if not SPECIAL:
            tl.store(out_ptr + row, 0)
        return
    flags = load_number(columns_ptr + batch_row, stride, FLAGS)
    if SPECIAL:
        if (tl.load(needs_ptr + row) & NEEDS_CHOICE) == 0:
            return
    elif (flags & _SPECIAL) != 0:
        return
    parts = tl.arange(0, PARTS_PAD)
    used = parts < num_parts
    best = tl.load(best_ptr + row * num_parts + parts, mask=used, other=float("-inf"))
    index = tl.load(index_ptr + row * num_parts + parts, mask=used, other=2147483647)
    token = tl.min(tl.where(best == tl.max(best, 0), index, 2147483647), 0)
    # If all logits are NaN, no comparison holds: such a row gets token 0.
    token = tl.where(token == 2147483647, 0, token)
    tl.store(out_ptr + row, token)
    seq_len = tl.load(seq_lens_ptr + row)
    tl.store(token_ids_ptr + batch_row * tokens_stride + seq_len, token, mask=seq_len < tokens_stride)
    if SPECIAL:  # noqa: SIM102
        if (flags & PENALIZED) != 0:
            place = counts_ptr + batch_row * counts_stride + token
            tl.store(place, tl.load(place) + 1)
