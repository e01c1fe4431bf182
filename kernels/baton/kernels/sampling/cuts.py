"""Finds two bounds on a row's logits that enclose the filters' threshold.

Tokens above `high` pass and tokens below `low` do not, so only those in between are listed and searched. The bounds are
a guess from the maxima of chunks or from a sample of the row; the search verifies them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.sampling.columns import FLAGS, KEPT, MIN_P, TEMPERATURE, TOP_K, TOP_P, load_fraction, load_number
from baton.kernels.sampling.edits import edited_logits
from baton.kernels.sampling.keys import kth_largest, ordered, unordered
from baton.kernels.sampling.needs import NEEDS_FILTERS, NEEDS_RESTRICTION, NEEDS_SAMPLE, NEEDS_TRIAL

_COARSE = tl.constexpr(12)  # low bits of a key, which guesses ignore


@triton.jit
def _coarse(values):
    """Returns coarser keys, for fewer iterations of a search."""
    return ordered(values) >> _COARSE


@triton.jit
def _least(coarse):
    """Returns a lower bound of the values with this coarse key."""
    value = unordered(coarse << _COARSE)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _key_at_weight(keys, weights, target):
    """Returns the largest key with a weight of at most `target` below it."""
    low = tl.min(keys, 0)
    high = tl.max(keys, 0)
    while low < high:
        probe = low + ((high - low + 1) >> 1)
        little = tl.sum(tl.where(keys < probe, weights, 0.0), 0) <= target
        low = tl.where(little, probe, low)
        high = tl.where(little, high, probe - 1)
    return low


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _keys_at_weights(keys, weights, less, more):
    """Returns both _key_at_weight in one search."""
    low, high = tl.min(keys, 0), tl.max(keys, 0)
    low_2, high_2 = low, high
    while (low < high) | (low_2 < high_2):
        probe = low + ((high - low + 1) >> 1)
        probe_2 = low_2 + ((high_2 - low_2 + 1) >> 1)
        below = tl.where(keys < probe, weights, 0.0)
        below, below_2 = tl.reduce((below, tl.where(keys < probe_2, weights, 0.0)), 0, _add_pairs)
        low, high = tl.where(below <= less, probe, low), tl.where(below <= less, high, probe - 1)
        low_2, high_2 = tl.where(below_2 <= more, probe_2, low_2), tl.where(below_2 <= more, high_2, probe_2 - 1)
        high, high_2 = tl.maximum(low, high), tl.maximum(low_2, high_2)
    return low, low_2


@triton.jit
def _store_chunks(chunks_ptr, count_ptr, tops, used, low):
    """Stores the chunks with a token of at least `low`, in order."""
    passes = used & (tops >= low) & (tops > float("-inf"))
    slot = tl.cumsum(passes.to(tl.int32), 0) - 1
    tl.store(chunks_ptr + slot, tl.arange(0, tops.shape[0]), mask=passes)
    tl.store(count_ptr, tl.sum(passes.to(tl.int32), 0))


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr"])
def _guess_kernel(
    cuts_ptr,  # [num_rows, 4] fp32: low, high, the row's top, its sum of exp((l - top) / t)
    list_counts_ptr,  # [num_rows] int32
    chunk_counts_ptr,  # [num_rows] int32
    chunks_ptr,  # [num_rows, num_parts * (PART / CHUNK)] int32
    chunk_tops_ptr,  # [num_rows, num_parts * (PART / CHUNK)] fp32
    part_tops_ptr,  # [num_rows, num_parts] fp32
    part_sums_ptr,  # [num_rows, num_parts] fp32
    needs_ptr,  # [num_rows] int32
    batch_rows_ptr,  # [num_rows] int32; -1 is padding
    columns_ptr,
    stride,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    CAPACITY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """low = the k-th largest chunk top, which at least k tokens reach; top + t * log(min_p); or left to a sample"""
    # grid: (num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    needs = tl.load(needs_ptr + row)
    if (needs & NEEDS_FILTERS) == 0:
        return
    row_ptr = columns_ptr + tl.load(batch_rows_ptr + row)
    temperature = load_fraction(row_ptr, stride, TEMPERATURE)
    top_k = load_number(row_ptr, stride, TOP_K)
    top_p = load_fraction(row_ptr, stride, TOP_P)
    parts = tl.arange(0, PARTS_PAD)
    part_tops = tl.load(part_tops_ptr + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    part_sums = tl.load(part_sums_ptr + row * num_parts + parts, mask=parts < num_parts, other=0.0)
    top = tl.maximum(tl.max(part_tops, 0), -3.4e38)
    total = tl.sum(part_sums * tl.exp((part_tops - top) / temperature), 0)
    cuts = cuts_ptr + row * 4
    tl.store(cuts + 1, float("inf"))
    tl.store(cuts + 2, top)
    tl.store(cuts + 3, total)
    tl.store(list_counts_ptr + row, 0)
    NUM_CHUNKS: tl.constexpr = PARTS_PAD * (PART // CHUNK)
    chunks = tl.arange(0, NUM_CHUNKS)
    used = chunks < (vocab_size + CHUNK - 1) // CHUNK
    first_chunk = row * num_parts * (PART // CHUNK)
    tops = tl.load(chunk_tops_ptr + first_chunk + chunks, mask=used, other=float("-inf"))
    low = float("-inf")
    if vocab_size > CAPACITY:
        num_chunks = tl.sum(used.to(tl.int32), 0)
        if (top_k > 0) & (top_k <= num_chunks // 2):
            low = _least(kth_largest(_coarse(tops), used, top_k))
        elif (top_k == 0) & (top_p >= 1):
            # min_p only; includes a margin for the rounding of its threshold.
            least = tl.log(load_fraction(row_ptr, stride, MIN_P)) * temperature
            low = top + least - 1e-5 * (tl.abs(top) - least)
        elif (top_k > CAPACITY // 2) & (top_p < 1):
            low = float("inf")  # no guess for two nested thresholds
        else:
            tl.store(needs_ptr + row, needs | NEEDS_SAMPLE)
    tl.store(cuts, low)
    _store_chunks(chunks_ptr + first_chunk, chunk_counts_ptr + row, tops, used, low)


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr"])
def _sample_kernel(
    cuts_ptr,  # [num_rows, 4] fp32: low, high, the row's top, its sum of exp((l - top) / t)
    bounds_ptr,  # [num_rows] fp32: of a trial
    chunk_counts_ptr,  # [num_rows] int32
    chunks_ptr,  # [num_rows, num_parts * (PART / CHUNK)] int32
    chunk_tops_ptr,  # [num_rows, num_parts * (PART / CHUNK)] fp32
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
    PARTS_PAD: tl.constexpr,
    SAMPLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """low, high = the sample's quantile, less and more its error; high = inf where few tokens are left above low"""
    # grid: (num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    needs = tl.load(needs_ptr + row)
    if (needs & NEEDS_SAMPLE) == 0:
        return
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    row_ptr = columns_ptr + batch_row
    temperature = load_fraction(row_ptr, stride, TEMPERATURE)
    top_k = load_number(row_ptr, stride, TOP_K)
    top_p = load_fraction(row_ptr, stride, TOP_P)
    top = tl.load(cuts_ptr + row * 4 + 2)
    total = tl.load(cuts_ptr + row * 4 + 3)
    NUM_CHUNKS: tl.constexpr = PARTS_PAD * (PART // CHUNK)
    chunks = tl.arange(0, NUM_CHUNKS)
    used = chunks < (vocab_size + CHUNK - 1) // CHUNK
    num_chunks = tl.sum(used.to(tl.int32), 0)
    first_chunk = row * num_parts * (PART // CHUNK)
    tops = tl.load(chunk_tops_ptr + first_chunk + chunks, mask=used, other=float("-inf"))
    # Chunks spread over the row.
    place = tl.arange(0, SAMPLE)
    index = ((place // CHUNK) * num_chunks // (SAMPLE // CHUNK)) * CHUNK + place % CHUNK
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
    keys = _coarse(logits)
    num_samples = tl.sum(inside.to(tl.float32), 0)
    if top_k > 0:
        weights = inside.to(tl.float32)
        target = 1.0 - top_k / vocab_size.to(tl.float32)
    else:
        weights = tl.where(inside, tl.exp((logits - top) / temperature), 0.0)
        target = (1.0 - top_p) * total / vocab_size.to(tl.float32)
    target *= num_samples  # weight in the sample below the threshold
    middle = _key_at_weight(keys, weights, target)
    below = tl.where(keys < middle, weights, 0.0)
    weight = tl.maximum(tl.sum(below, 0), 1e-15)
    variance = tl.maximum(tl.sum(below * below, 0) / (weight * weight) - 1.0 / num_samples, 0.0)
    # Wrong for a few rows in a million.
    error = tl.where(weight > 1e-15, 4.5 * tl.sqrt(variance) + 1e-3, 1.0)
    low = float("-inf")
    high = float("inf")
    lower, upper = _keys_at_weights(keys, weights, target * (1.0 - error), target * (1.0 + error))
    if error < 1:
        low = _least(lower)
    # An upper bound of the nucleus of a confident model.
    likely = kth_largest(_coarse(tops), used, num_chunks * 15 // 16)
    if (top_k == 0) & (tl.sum(tl.where(keys < likely, weights, 0.0), 0) * (1.0 + error) <= target):
        low = tl.maximum(low, _least(likely))
    elif ((top_k == 0) | (top_p >= 1)) & (tl.sum(weights, 0) > target * (1.0 + error)):
        # Not for a nucleus within the k largest, which are all listed.
        high = unordered((upper + 1) << _COARSE)
        least = tl.div_rn(low, temperature)
        min_p = load_fraction(row_ptr, stride, MIN_P)
        if min_p > 0:
            least = tl.maximum(least, tl.div_rn(top, temperature) + tl.log(min_p))
        # A trial leaves the bound unknown.
        if (load_number(row_ptr, stride, FLAGS) & KEPT) == 0:
            tl.store(bounds_ptr + row, least)
            tl.store(needs_ptr + row, (needs & ~NEEDS_FILTERS) | NEEDS_TRIAL)
    tl.store(cuts_ptr + row * 4, low)
    tl.store(cuts_ptr + row * 4 + 1, high)
    _store_chunks(chunks_ptr + first_chunk, chunk_counts_ptr + row, tops, used, low)
