"""Log decays of the gated delta rule, summed from the start of each chunk."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.recurrence.tiles import chunk_of, softplus


@triton.jit(do_not_specialize=["num_seqs"])
def sum_log_decays(
    total_ptr,  # [num_tokens, NUM_HEADS, CHANNELS] fp32
    decay_ptr,  # [num_tokens, NUM_HEADS, CHANNELS], rows of decay_stride
    log_rate_ptr,  # [NUM_HEADS]
    bias_ptr,  # [NUM_HEADS, CHANNELS]
    bounds_ptr,  # [num_seqs + 1] int32
    num_seqs,
    decay_stride,
    NUM_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,  # key_dim, or 1
    CHANNELS_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """total_i = sum_(j <= i) -exp(log_rate) softplus(decay_j + bias)"""
    # grid: (num_slots, NUM_HEADS)
    head = tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    first, end = chunk_of(bounds_ptr, tl.program_id(0), num_seqs, SIZE)
    tokens = first + tl.arange(0, SIZE)
    channels = tl.arange(0, CHANNELS_PAD)
    inside = (tokens < end)[:, None] & (channels < CHANNELS)[None, :]
    place = head * CHANNELS + channels
    decay_at = tokens.to(tl.int64)[:, None] * decay_stride + place[None, :]
    decay = tl.load(decay_ptr + decay_at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + place, mask=channels < CHANNELS, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(log_rate_ptr + head).to(tl.float32))
    total = tl.cumsum(rate * softplus(decay + bias[None, :]), 0)
    tl.store(total_ptr + tokens.to(tl.int64)[:, None] * (NUM_HEADS * CHANNELS) + place[None, :], total, mask=inside)
