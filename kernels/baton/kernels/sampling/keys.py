"""Integers in the order of floats, and the k-th largest of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(values):
    """int32 in the order of the floats; both zeros are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(keys):
    """The floats again."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(keys, live, rank):
    """The largest key with at least `rank` live ones at or above it; the least live one where there are fewer."""
    low = tl.min(tl.where(live, keys, 2147483647), 0).to(tl.int64)
    high = tl.max(tl.where(live, keys, -2147483648), 0).to(tl.int64)
    while low < high:
        probe = low + ((high - low + 1) >> 1)
        enough = tl.sum((live & (keys >= probe.to(tl.int32))).to(tl.int32), 0) >= rank
        low = tl.where(enough, probe, low)
        high = tl.where(enough, high, probe - 1)
    return low.to(tl.int32)
