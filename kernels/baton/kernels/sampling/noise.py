"""reference.noise on the device, with equal words, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def vocabulary_words(seed, position, first, COUNT: tl.constexpr):
    """Returns random words of COUNT tokens from `first` on, a multiple of 4. Token t: word t % 4 of counter t // 4."""
    counter = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    zero = tl.zeros([COUNT // 4], tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position.to(tl.uint32), zero, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [COUNT])


@triton.jit
def token_words(seed, position, tokens):
    """Returns random words of these tokens."""
    zero = tl.zeros_like(tokens).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, (tokens // 4).to(tl.uint32), zero + position.to(tl.uint32), zero, zero)
    lane = tokens % 4
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def gumbel(words):
    """-log(-log u), u uniform in (0, 1)"""
    complement = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    complement = tl.minimum(complement, 1.0 - 5.9604644775390625e-08)
    return -tl.log(-_log1p(-complement))


@triton.jit
def _log1p(x):
    """log(1 + x) with x's full precision near 0 (Kahan): u = 1 + x; log(u) * x / (u - 1)"""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))
