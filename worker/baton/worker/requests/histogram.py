"""Counts values in buckets of fixed bounds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from baton.v1 import control_pb2

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# The bounds of vLLM's histograms of the same values.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BYTES = tuple(2.0**power for power in range(11, 39, 2))  # 2 KiB to 128 GiB
COPIED_BYTES = (1e6, 5e6, 1e7, 2e7, 4e7, 6e7, 8e7, 1e8, 1.5e8, 2e8)


@dataclass(slots=True)
class Histogram:
    """Counts by bucket; the last one is for values above every bound."""

    bounds: tuple[float, ...] = SECONDS  # inclusive, growing
    counts: list[int] = field(default_factory=list)  # one more than bounds
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """The number of all values."""
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Adds a value, or the same one several times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> Histogram:
        """Returns one with the same counts."""
        return Histogram(self.bounds, list(self.counts), self.sum)

    def message(self) -> control_pb2.Histogram:
        """Returns its form in the contract."""
        return control_pb2.Histogram(bounds=self.bounds, counts=self.counts, sum=self.sum)
