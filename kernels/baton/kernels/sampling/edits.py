"""Edits a row's logits for its request. Kernels compute them again when they need them; they are never stored.

In float32, in the order of reference.logits: biases, penalties, restrictions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.sampling.columns import (
    BIASED,
    FREQUENCY,
    NUM_BIASES,
    PENALIZED,
    PRESENCE,
    REPETITION,
    load_fraction,
    load_lists,
    load_number,
)


@triton.jit
def edited_logits(
    logits_ptr,  # the row's
    index,  # tokens
    inside,  # of the vocabulary
    row_ptr,  # the row's first column
    stride,
    flags,
    counts_ptr,  # the row's, by token
    bits_ptr,  # the row's, by token / 32
    restricted,  # whether bits_ptr applies
    PROMPT: tl.constexpr,
):
    """bias; l / r if l > 0 else l * r; - frequency * count - presence * [count > 0]; -inf where a bit is not set"""
    logits = tl.load(logits_ptr + index, mask=inside, other=float("-inf")).to(tl.float32)
    if (flags & BIASED) != 0:
        lists = load_lists(row_ptr, stride)
        count = load_number(row_ptr, stride, NUM_BIASES)
        for item in range(count):
            bias = tl.load(lists + count + item).to(tl.float32, bitcast=True)
            logits = tl.where(index == tl.load(lists + item), logits + bias, logits)
    if (flags & PENALIZED) != 0:
        seen = tl.load(counts_ptr + index, mask=inside, other=0).to(tl.int32)
        repetition = load_fraction(row_ptr, stride, REPETITION)
        drawn = seen & (PROMPT - 1)
        factor = tl.zeros_like(logits) + repetition
        lowered = tl.where(logits > 0, tl.div_rn(logits, factor), logits * factor)
        penalty = load_fraction(row_ptr, stride, FREQUENCY) * drawn.to(tl.float32)
        penalty += load_fraction(row_ptr, stride, PRESENCE) * (drawn > 0).to(tl.float32)
        logits = tl.where(seen != 0, lowered - penalty, logits)
    if restricted:
        word = tl.load(bits_ptr + index // 32, mask=inside, other=0)
        logits = tl.where(((word >> (index % 32)) & 1) != 0, logits, float("-inf"))
    return logits
