"""How long cached blocks live, how long they are unused before an eviction, and how soon they are used again.

Only every n-th stored block is followed, so that a cache of millions costs nothing. Times count from the step that made
the block findable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton.v1 import control_pb2
from baton.worker.core import BlockId
from baton.worker.requests.histogram import Histogram

# The bounds of vLLM's histograms of the same values.
RESIDENCY_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
)  # fmt: skip


def _histogram() -> Histogram:
    return Histogram(RESIDENCY_SECONDS)


@dataclass(slots=True)
class ResidencyTimes:
    """Of blocks that were followed."""

    lifetime: Histogram = field(default_factory=_histogram)  # stored to evicted
    idle_before_evict: Histogram = field(default_factory=_histogram)  # last use to evicted
    reuse_gap: Histogram = field(default_factory=_histogram)  # between two uses

    def message(self) -> control_pb2.KvResidency:
        """Returns their form in the contract."""
        return control_pb2.KvResidency(
            lifetime=self.lifetime.message(),
            idle_before_evict=self.idle_before_evict.message(),
            reuse_gap=self.reuse_gap.message(),
        )


@dataclass(slots=True)
class _Followed:
    stored: float
    used: float


class ResidencyMeter:
    """Follows a part of the blocks of one pool. `sample`: that part, above 0 and at most 1."""

    def __init__(self, sample: float, clock: Callable[[], float]) -> None:
        self.times = ResidencyTimes()
        self._every = max(1, round(1 / sample))
        self._clock = clock
        self._num_stored = 0
        self._followed: dict[BlockId, _Followed] = {}

    def stored(self, block_ids: Iterable[BlockId]) -> None:
        """Records blocks that became findable."""
        now = self._clock()
        for block_id in block_ids:
            if self._num_stored % self._every == 0:
                self._followed[block_id] = _Followed(now, now)
            self._num_stored += 1

    def used(self, block_ids: Iterable[BlockId]) -> None:
        """Records blocks that a request found."""
        now = self._clock()
        for block_id in block_ids:
            one = self._followed.get(block_id)
            if one is not None:
                self.times.reuse_gap.observe(now - one.used)
                one.used = now

    def evicted(self, block_ids: Iterable[BlockId]) -> None:
        """Records blocks that were evicted."""
        now = self._clock()
        for block_id in block_ids:
            one = self._followed.pop(block_id, None)
            if one is not None:
                self.times.lifetime.observe(now - one.stored)
                self.times.idle_before_evict.observe(now - one.used)

    def forget(self) -> None:
        """Stops following all blocks: the cache was reset."""
        self._followed.clear()
