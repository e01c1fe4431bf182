"""Finds the filters' exact threshold among the tokens between a row's cuts: the k-th largest, then the nucleus.

Probabilities are summed as integers, so that their order does not matter. If all tokens that pass are listed, one of
them is drawn here; else the draw over the vocabulary follows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.sampling.columns import (
    FLAGS,
    MIN_P,
    NUM_PROMPT,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_fraction,
    load_long,
    load_number,
)
from baton.kernels.sampling.edits import edited_logits
from baton.kernels.sampling.keys import kth_largest, ordered, unordered
from baton.kernels.sampling.needs import NEEDS_FILTERS, NEEDS_LATE_DRAW, NEEDS_RESTRICTION, NEEDS_ROW
from baton.kernels.sampling.noise import gumbel, token_words

_ONE = tl.constexpr(1 << 40)  # the top token's probability, which others are relative to
_LEAST = tl.constexpr(-(1 << 31))  # below the key of any logit


@triton.jit
def _nucleus(keys, masses, target):
    """Returns the largest key with mass of at least `target` at or above it, or the least key with mass."""
    live = masses >= 0
    low = tl.min(tl.where(live, keys, 2147483647), 0).to(tl.int64)
    high = tl.max(tl.where(live, keys, -2147483648), 0).to(tl.int64)
    while low < high:
        probe = low + ((high - low + 1) >> 1)
        enough = tl.sum(tl.where(live & (keys >= probe.to(tl.int32)), masses, 0), 0) >= target
        low = tl.where(enough, probe, low)
        high = tl.where(enough, high, probe - 1)
    return low.to(tl.int32)


@triton.jit
def _search_list(
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    bounds_ptr,  # [num_rows] fp32
    needs_ptr,  # [num_rows] int32
    list_logits_ptr,  # [num_rows, CAPACITY] fp32
    list_tokens_ptr,  # [num_rows, CAPACITY] int32
    above_counts_ptr,  # [num_rows, num_parts] int32
    above_sums_ptr,  # [num_rows, num_parts] fp32
    cuts_ptr,  # [num_rows, 4] fp32
    chunk_counts_ptr,  # [num_rows] int32
    seq_lens_ptr,  # [num_rows] int32
    row_ptr,  # the row's first column
    stride,
    row,
    count,  # of the list
    num_parts,
    WIDTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    PART_CHUNKS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    """Stores the row's bound, and its token if all that pass are listed. Returns whether the cuts were right."""
    temperature = load_fraction(row_ptr, stride, TEMPERATURE)
    top_k = load_number(row_ptr, stride, TOP_K)
    top_p = load_fraction(row_ptr, stride, TOP_P)
    min_p = load_fraction(row_ptr, stride, MIN_P)
    low = tl.load(cuts_ptr + row * 4)
    high = tl.load(cuts_ptr + row * 4 + 1)
    top = tl.load(cuts_ptr + row * 4 + 2)
    total = tl.load(cuts_ptr + row * 4 + 3)
    parts = tl.arange(0, PARTS_PAD)
    num_above = tl.zeros([], tl.int32)
    mass_above = tl.zeros([], tl.int64)
    if high < float("inf"):
        used = parts * PART_CHUNKS < tl.load(chunk_counts_ptr + row)
        num_above = tl.sum(tl.load(above_counts_ptr + row * num_parts + parts, mask=used, other=0), 0)
        sum_above = tl.sum(tl.load(above_sums_ptr + row * num_parts + parts, mask=used, other=0.0), 0)
        mass_above = (sum_above.to(tl.float64) * _ONE).to(tl.int64)
    slot = tl.arange(0, WIDTH)
    live = slot < count
    logits = tl.load(list_logits_ptr + row * CAPACITY + slot, mask=live, other=float("-inf"))
    scaled = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    highest = tl.div_rn(top, temperature)
    keys = ordered(scaled)
    whole = low == float("-inf")
    right = whole | (count > 0)
    bound = _LEAST
    if top_k > 0:
        right = right & (num_above < top_k) & (whole | (num_above + count >= top_k))
        bound = kth_largest(keys, live, top_k - num_above)
    if top_p < 1:
        masses = (tl.exp(scaled - highest) * _ONE).to(tl.int64)
        masses = tl.where(live & (keys >= bound), masses, -1)
        mass = tl.sum(tl.maximum(masses, 0), 0)
        if top_k > 0:
            target = (top_p.to(tl.float64) * mass).to(tl.int64)
        else:
            target = (top_p.to(tl.float64) * total * _ONE).to(tl.int64)
            right = right & (mass_above < target) & (whole | (mass_above + mass >= target))
        bound = tl.maximum(bound, _nucleus(keys, masses, target - mass_above))
    least = float("-inf")
    if bound > _LEAST:
        least = unordered(bound)
    if min_p > 0:
        least = tl.maximum(least, highest + tl.log(min_p))
    tl.store(bounds_ptr + row, least)
    if right & (high == float("inf")):
        tokens = tl.load(list_tokens_ptr + row * CAPACITY + slot, mask=live, other=0)
        position = tl.load(seq_lens_ptr + row) - load_number(row_ptr, stride, NUM_PROMPT)
        words = token_words(load_long(row_ptr, stride, SEED_LOW), position, tokens)
        score = tl.where(live & (scaled >= least), scaled + gumbel(words), float("-inf"))
        best = tl.max(score, 0)
        token = tl.min(tl.where(score == best, tokens, 2147483647), 0)
        place = row * num_parts + parts
        tl.store(best_ptr + place, tl.where(parts == 0, best, float("-inf")), mask=parts < num_parts)
        tl.store(index_ptr + place, tl.where(parts == 0, token, 2147483647), mask=parts < num_parts)
    elif right:
        tl.store(needs_ptr + row, tl.load(needs_ptr + row) | NEEDS_LATE_DRAW)
    return right


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr", "seq_lens_ptr"])
def _search_few_kernel(
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    bounds_ptr,  # [num_rows] fp32: the lowest logit / temperature that passes the filters
    needs_ptr,  # [num_rows] int32
    list_counts_ptr,  # [num_rows] int32
    list_logits_ptr,  # [num_rows, CAPACITY] fp32
    list_tokens_ptr,  # [num_rows, CAPACITY] int32
    above_counts_ptr,  # [num_rows, num_parts] int32
    above_sums_ptr,  # [num_rows, num_parts] fp32
    cuts_ptr,  # [num_rows, 4] fp32
    chunk_counts_ptr,  # [num_rows] int32
    seq_lens_ptr,  # [num_rows] int32
    batch_rows_ptr,  # [num_rows] int32; -1 is padding
    columns_ptr,
    stride,
    num_parts,
    WIDTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    PART_CHUNKS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """bound = max(k-th largest, the nucleus' least, top + log(min_p)) over logits / temperature, for short lists"""
    # grid: (num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    needs = tl.load(needs_ptr + row)
    count = tl.load(list_counts_ptr + row)
    if ((needs & NEEDS_FILTERS) == 0) | (count > WIDTH):
        return
    right = _search_list(
        best_ptr,
        index_ptr,
        bounds_ptr,
        needs_ptr,
        list_logits_ptr,
        list_tokens_ptr,
        above_counts_ptr,
        above_sums_ptr,
        cuts_ptr,
        chunk_counts_ptr,
        seq_lens_ptr,
        columns_ptr + tl.load(batch_rows_ptr + row),
        stride,
        row,
        count,
        num_parts,
        WIDTH,
        CAPACITY,
        PART_CHUNKS,
        PARTS_PAD,
    )
    if not right:
        tl.store(needs_ptr + row, needs | NEEDS_ROW)


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr", "seq_lens_ptr"])
def _search_many_kernel(
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    bounds_ptr,  # [num_rows] fp32: the lowest logit / temperature that passes the filters
    needs_ptr,  # [num_rows] int32
    list_counts_ptr,  # [num_rows] int32
    list_logits_ptr,  # [num_rows, CAPACITY] fp32
    list_tokens_ptr,  # [num_rows, CAPACITY] int32
    above_counts_ptr,  # [num_rows, num_parts] int32
    above_sums_ptr,  # [num_rows, num_parts] fp32
    cuts_ptr,  # [num_rows, 4] fp32
    chunk_counts_ptr,  # [num_rows] int32
    seq_lens_ptr,  # [num_rows] int32
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
    FEW: tl.constexpr,
    CAPACITY: tl.constexpr,
    PART_CHUNKS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    SCAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The same for longer lists, and for whole rows whose cuts were wrong"""
    # grid: (num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    needs = tl.load(needs_ptr + row)
    count = tl.load(list_counts_ptr + row)
    if ((needs & NEEDS_FILTERS) == 0) | ((count <= FEW) & ((needs & NEEDS_ROW) == 0)):
        return
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    row_ptr = columns_ptr + batch_row
    right = count < 0
    if (count > FEW) & (count <= CAPACITY):
        right = _search_list(
            best_ptr,
            index_ptr,
            bounds_ptr,
            needs_ptr,
            list_logits_ptr,
            list_tokens_ptr,
            above_counts_ptr,
            above_sums_ptr,
            cuts_ptr,
            chunk_counts_ptr,
            seq_lens_ptr,
            row_ptr,
            stride,
            row,
            count,
            num_parts,
            CAPACITY,
            CAPACITY,
            PART_CHUNKS,
            PARTS_PAD,
        )
    if not right:
        bound = _search_row(
            logits_ptr + row * logits_stride,
            row_ptr,
            stride,
            counts_ptr + batch_row * counts_stride,
            bits_ptr + row * bits_stride,
            (needs & NEEDS_RESTRICTION) != 0,
            tl.load(cuts_ptr + row * 4 + 2),
            tl.load(cuts_ptr + row * 4 + 3),
            vocab_size,
            PROMPT,
            SCAN,
        )
        tl.store(bounds_ptr + row, bound)
        tl.store(needs_ptr + row, needs | NEEDS_LATE_DRAW)


@triton.jit
def _search_row(
    logits_ptr,
    row_ptr,
    stride,
    counts_ptr,
    bits_ptr,
    restricted,
    top,
    total,
    vocab_size,
    PROMPT: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Finds the bound by bisection over the whole row, for rows with wrong cuts or without cuts."""
    flags = load_number(row_ptr, stride, FLAGS)
    temperature = load_fraction(row_ptr, stride, TEMPERATURE)
    top_k = load_number(row_ptr, stride, TOP_K)
    top_p = load_fraction(row_ptr, stride, TOP_P)
    min_p = load_fraction(row_ptr, stride, MIN_P)
    highest = tl.div_rn(top, temperature)
    bound = tl.full([], _LEAST, tl.int64)
    target = tl.zeros([], tl.int64)
    for search in range(2):
        # First the k-th largest, with a mass of 1 for each token; then the nucleus within.
        by_mass = search == 1
        if (by_mass & (top_p < 1)) | ((search == 0) & (top_k > 0)):
            least = bound
            low = bound
            high = ordered(highest).to(tl.int64)
            known = (search == 0) | (top_k == 0)
            probe = tl.where(known, low + ((high - low + 1) >> 1), low)
            target = top_k.to(tl.int64)
            if by_mass:
                target = (top_p.to(tl.float64) * total * _ONE).to(tl.int64)
            while (low < high) | (not known):
                weight = tl.zeros([], tl.int64)
                for start in range(0, vocab_size, SCAN):
                    index = start + tl.arange(0, SCAN)
                    inside = index < vocab_size
                    logits = edited_logits(
                        logits_ptr, index, inside, row_ptr, stride, flags, counts_ptr, bits_ptr, restricted, PROMPT
                    )
                    scaled = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
                    passes = inside & (ordered(scaled) >= tl.maximum(probe, least)) & (logits > float("-inf"))
                    weights = passes.to(tl.int64)
                    if by_mass:
                        weights = tl.where(passes, (tl.exp(scaled - highest) * _ONE).to(tl.int64), 0)
                    weight += tl.sum(weights, 0)
                if known:
                    enough = weight >= target
                    low = tl.where(enough, probe, low)
                    high = tl.where(enough, high, probe - 1)
                else:
                    # The mass of the k largest.
                    target = (top_p.to(tl.float64) * weight).to(tl.int64)
                    known = target >= 0
                probe = low + ((high - low + 1) >> 1)
            bound = low
    found = float("-inf")
    if bound > _LEAST:
        found = unordered(bound.to(tl.int32))
    if min_p > 0:
        found = tl.maximum(found, highest + tl.log(min_p))
    return found
