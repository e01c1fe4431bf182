"""Computes the work that a row needs in this step, and a bitmap of its allowed tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.sampling.columns import (
    ALLOWED,
    FLAGS,
    MIN_TOKENS,
    NUM_BIASES,
    NUM_PROMPT,
    NUM_REASONING_END,
    NUM_SEQUENCES,
    REASONING_START,
    REASONING_TOKENS,
    RESTRICTED,
    RULED,
    SEQUENCE_WIDTH,
    SPECIAL,
    SUPPRESSED,
    TEMPERATURE,
    is_filtered,
    load_fraction,
    load_lists,
    load_number,
)
from baton.kernels.sampling.needs import NEEDS_ARGMAX, NEEDS_CHOICE, NEEDS_DRAW, NEEDS_FILTERS, NEEDS_RESTRICTION

_ANY = tl.constexpr(-1)  # padding before a sequence's first token


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr", "seq_lens_ptr", "mask_of_ptr", "masks_ptr"])
def _restrict_kernel(
    needs_ptr,  # [num_rows] int32
    bits_ptr,  # [num_rows, bits_stride] int32
    batch_rows_ptr,  # [num_rows] int32; -1 is padding
    seq_lens_ptr,  # [num_rows] int32
    token_ids_ptr,  # [batch_rows, tokens_stride] int32
    columns_ptr,
    mask_of_ptr,  # [num_rows] int32, into masks; -1: no mask
    masks_ptr,  # [num_masks, num_words] int32
    stride,
    tokens_stride,
    bits_stride,
    num_words,
    WORDS: tl.constexpr,
    MANY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """bits = allowed & ~suppressed & ~ends of forbidden sequences, or the forced token's alone; & mask"""
    # grid: (num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    tl.store(needs_ptr + row, 0)
    if batch_row < 0:
        return
    row_ptr = columns_ptr + batch_row
    flags = load_number(row_ptr, stride, FLAGS)
    mask = tl.load(mask_of_ptr + row).to(tl.int64)
    if ((flags & SPECIAL) == 0) & (mask < 0):
        return
    restricted = ((flags & RESTRICTED) != 0) | (mask >= 0)
    drawn = tl.where(is_filtered(row_ptr, stride), NEEDS_FILTERS, NEEDS_DRAW)
    needs = tl.where(load_fraction(row_ptr, stride, TEMPERATURE) == 0, NEEDS_ARGMAX, drawn)
    tl.store(needs_ptr + row, needs | NEEDS_CHOICE | tl.where(restricted, NEEDS_RESTRICTION, 0))
    if not restricted:
        return
    num_outputs = tl.load(seq_lens_ptr + row) - load_number(row_ptr, stride, NUM_PROMPT)
    output_ptr = token_ids_ptr + batch_row * tokens_stride + load_number(row_ptr, stride, NUM_PROMPT)
    lists = load_lists(row_ptr, stride) + 2 * load_number(row_ptr, stride, NUM_BIASES)
    has_allowed = (flags & ALLOWED) != 0
    allowed = lists
    if has_allowed:
        lists += num_words
    suppressed = lists
    if (flags & SUPPRESSED) != 0:
        lists += num_words
    suppresses = ((flags & SUPPRESSED) != 0) & (num_outputs < load_number(row_ptr, stride, MIN_TOKENS))
    num_sequences = load_number(row_ptr, stride, NUM_SEQUENCES)
    width = load_number(row_ptr, stride, SEQUENCE_WIDTH)
    end = lists + num_sequences * (width + 1)
    forced = tl.full([], -1, tl.int32)
    if (flags & RULED) != 0:
        forced = _forced(row_ptr, stride, end, output_ptr, num_outputs, MANY)
    bits = bits_ptr + row * bits_stride
    for start in range(0, num_words, WORDS):
        place = start + tl.arange(0, WORDS)
        used = place < num_words
        word = tl.full([WORDS], -1, tl.int32)
        if forced >= 0:
            word = tl.where(place == forced // 32, tl.full([WORDS], 1, tl.int32) << (forced % 32), 0)
        else:
            if has_allowed:
                word &= tl.load(allowed + place, mask=used, other=0)
            if suppresses:
                word &= ~tl.load(suppressed + place, mask=used, other=0)
        if mask >= 0:
            word &= tl.load(masks_ptr + mask * num_words + place, mask=used, other=0)
        tl.store(bits + place, word, mask=used)
    if forced < 0:
        tl.debug_barrier()
        for first in range(0, num_sequences, MANY):
            sequence = first + tl.arange(0, MANY)
            used = sequence < num_sequences
            matches = used
            for back in range(1, width + 1):
                token = tl.load(lists + sequence * width + (width - back), mask=used, other=_ANY)
                drawn = tl.load(output_ptr + (num_outputs - back), mask=back <= num_outputs, other=-2)
                matches = matches & ((token == _ANY) | (token == drawn))
            last = tl.load(lists + num_sequences * width + sequence, mask=used, other=0)
            only = ~(tl.full([MANY], 1, tl.int32) << (last % 32))
            tl.atomic_and(bits + last // 32, only, mask=matches)


@triton.jit
def _forced(row_ptr, stride, end_ptr, output_ptr, num_outputs, MANY: tl.constexpr):
    """Returns the forced token that ends too long reasoning; -1: none."""
    num_end = load_number(row_ptr, stride, NUM_REASONING_END)
    start = load_number(row_ptr, stride, REASONING_START)
    begin = (start >= 0).to(tl.int32)
    free = begin + load_number(row_ptr, stride, REASONING_TOKENS)
    place = num_outputs - free
    forced = tl.full([], -1, tl.int32)
    if (place >= 0) & (place < num_end):
        ended = tl.zeros([], tl.int32)
        if start >= 0:
            ended = (tl.load(output_ptr) != start).to(tl.int32)
        for first in range(begin, free - num_end + 1, MANY):
            at = first + tl.arange(0, MANY)
            matches = at <= free - num_end
            for item in range(num_end):
                token = tl.load(output_ptr + at + item, mask=at <= free - num_end, other=-2)
                matches = matches & (token == tl.load(end_ptr + item))
            ended = tl.maximum(ended, tl.max(matches.to(tl.int32), 0))
        if ended == 0:
            forced = tl.load(end_ptr + place)
    return forced
