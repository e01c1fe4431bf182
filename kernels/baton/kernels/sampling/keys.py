"""Maps floats to integers of the same order, and finds the k-th largest."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(values):
    """Maps floats to int32 of the same order. Both zeros are equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(keys):
    """Maps keys to floats."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(keys, live, rank):
    """Returns the largest key with at least `rank` live ones at or above it, or the least live one if there is none."""
    low = tl.min(tl.where(live, keys, 2147483647), 0).to(tl.int64)
    high = tl.max(tl.where(live, keys, -2147483648), 0).to(tl.int64)
    while low < high:
        probe = low + ((high - low + 1) >> 1)
        enough = tl.sum((live & (keys >= probe.to(tl.int32))).to(tl.int32), 0) >= rank
        low = tl.where(enough, probe, low)
        high = tl.where(enough, high, probe - 1)
    return low.to(tl.int32)
