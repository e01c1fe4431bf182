"""Percentiles of bucket counts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.console.snapshot import Percentiles


def percentiles_of(bounds: Sequence[float], counts: Sequence[int]) -> Percentiles | None:
    """Returns the three percentiles of consoles, or None without counts. `counts` has one entry more than `bounds`."""
    if not any(counts):
        return None
    return Percentiles(*(percentile(bounds, counts, part) for part in (0.5, 0.9, 0.99)))


def percentile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float:
    """Returns a percentile, interpolated linearly in its bucket; at most the last bound."""
    wanted = part * sum(counts)
    below, low = 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= wanted:
            return low + (bound - low) * (wanted - below) / count
        below, low = below + count, bound
    return low
