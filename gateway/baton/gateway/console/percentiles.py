"""Percentiles of counts in buckets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.console.snapshot import Percentiles


def percentiles_of(bounds: Sequence[float], counts: Sequence[int]) -> Percentiles | None:
    """The three that consoles show; None: nothing was counted. `counts` has one more than `bounds`."""
    if not any(counts):
        return None
    return Percentiles(*(percentile(bounds, counts, part) for part in (0.5, 0.9, 0.99)))


def percentile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float:
    """The value that `part` of all are not above, taken to lie evenly in its bucket; at most the last bound."""
    wanted = part * sum(counts)
    below, low = 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= wanted:
            return low + (bound - low) * (wanted - below) / count
        below, low = below + count, bound
    return low
