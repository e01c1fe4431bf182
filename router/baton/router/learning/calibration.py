"""What the estimates missed, learnt from how placements went; and how fast requests come. Pure, owns no clock."""

from __future__ import annotations

import math

_WEIGHT = 0.05  # of one outcome; about twenty of memory
_MOST = 4.0  # no correction is larger, and no outcome counts as further off
_LARGEST = math.log(_MOST)
_FORGET_SECONDS = 60.0  # half of a correction is gone when nothing was heard for so long
_LEAST_SECONDS = 0.005  # below it the clocks of the network are measured, not the workers


class Bias:
    """How many times longer prompts take than was estimated, for one kind of placement.

    Outcomes come seconds after their estimates: each is compared with an estimate that has no factor in it yet, or
    hundreds under way would push the factor on and on.
    """

    def __init__(self) -> None:
        self._log = 0.0
        self._heard = 0.0

    def observe(self, work: float, rest: float, actual: float, now: float) -> None:
        """A first token came after so many seconds: the prompt was estimated to take `work`, the factor left out, and
        all else `rest`."""
        if actual <= 0 or work < 0 or rest < 0:
            return
        work = max(work, _LEAST_SECONDS)
        ratio = math.log(max(actual - rest, work / _MOST) / work)
        faded = self._faded(now)
        # The longer the wait, the less it tells of the prompt.
        self._log = faded + _WEIGHT * work / (work + rest) * (min(max(ratio, -_LARGEST), _LARGEST) - faded)
        self._heard = now

    def factor(self, now: float) -> float:
        """What an estimate is to be multiplied with; 1 where nothing was learnt."""
        faded = self._faded(now)
        return math.exp(faded) if faded else 1.0

    def _faded(self, now: float) -> float:
        """A way that looks bad is not taken, and so not measured: it is tried again after a while."""
        return self._log * 0.5 ** ((now - self._heard) / _FORGET_SECONDS) if self._log else 0.0


class Arrivals:
    """What comes in a second, over the last ones."""

    def __init__(self, memory_seconds: float = 2.0) -> None:
        self._memory = memory_seconds
        self._count = 0.0
        self._at = 0.0
        self._began: float | None = None

    def observe(self, now: float, count: float = 1.0) -> None:
        """So many more."""
        now = max(now, self._at)
        self._count = self._decayed(now) + count
        self._at = now
        if self._began is None:
            self._began = now

    def per_second(self, now: float) -> float:
        """The rate of late."""
        return self._decayed(now) / self._memory

    def since_begun(self, now: float) -> float:
        """The same, where the first came within the memory: the rate since then, and over a second at least."""
        if self._began is None:
            return 0.0
        seen = 1.0 - math.exp(-max(1.0, now - self._began) / self._memory)
        return self._decayed(now) / (self._memory * seen)

    def _decayed(self, now: float) -> float:
        return self._count * math.exp((self._at - now) / self._memory) if self._count else 0.0
