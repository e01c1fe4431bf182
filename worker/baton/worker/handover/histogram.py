"""How often which values occurred, in buckets of fixed bounds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(slots=True)
class Histogram:
    """Counts by bucket; the last one takes what is above every bound."""

    bounds: tuple[float, ...] = SECONDS  # inclusive, growing
    counts: list[int] = field(default_factory=list)  # one more than bounds
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Of all values."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Adds one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> Histogram:
        """As of now."""
        return Histogram(self.bounds, list(self.counts), self.sum)
