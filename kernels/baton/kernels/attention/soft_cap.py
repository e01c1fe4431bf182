"""Soft caps of attention scores, for use in other kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def soft_capped(score, CAP: tl.constexpr):
    """cap tanh(score / cap), for scores and a cap that are multiplied by log2(e)"""
    # tanh(|z|) = (1 - e^-2|z|) / (1 + e^-2|z|)
    twice: tl.constexpr = 2 * 1.4426950408889634 / CAP
    power = tl.exp2(tl.abs(score) * -twice)
    capped = CAP * (1.0 - power) / (1.0 + power)
    return tl.where(score < 0, -capped, capped)
