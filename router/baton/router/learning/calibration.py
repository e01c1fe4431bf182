"""Corrections of estimates, learned from outcomes, and the rate of arrivals. Pure, owns no clock."""

from __future__ import annotations

import math

_WEIGHT = 0.05  # of one outcome; about twenty of memory
_MOST = 4.0  # no correction is larger, and no outcome counts as further off
_LARGEST = math.log(_MOST)
_FORGET_SECONDS = 60.0  # half of a correction is dropped after this long without outcomes
_LEAST_SECONDS = 0.005  # below it the clocks of the network are measured, not the workers


class Bias:
    """The factor from estimated to actual prompt seconds, for one kind of placement.

    Outcomes arrive seconds after their estimates. Each is compared with an estimate without the factor, because
    otherwise hundreds of requests in flight would push the factor further and further.
    """

    def __init__(self) -> None:
        self._log = 0.0
        self._heard = 0.0

    def observe(self, work: float, rest: float, actual: float, now: float) -> None:
        """Takes a first token's seconds.

        `work` is the estimate for the prompt without the factor, `rest` that of all else.
        """
        if actual <= 0 or work < 0 or rest < 0:
            return
        work = max(work, _LEAST_SECONDS)
        ratio = math.log(max(actual - rest, work / _MOST) / work)
        faded = self._faded(now)
        # The longer the wait, the less weight the outcome has for the prompt's cost.
        self._log = faded + _WEIGHT * work / (work + rest) * (min(max(ratio, -_LARGEST), _LARGEST) - faded)
        self._heard = now

    def factor(self, now: float) -> float:
        """Returns the factor for estimates; 1 if there were no outcomes."""
        faded = self._faded(now)
        return math.exp(faded) if faded else 1.0

    def _faded(self, now: float) -> float:
        """Moves the factor towards 1 over time.

        An option that looks bad is not taken, and so would never be measured again.
        """
        return self._log * 0.5 ** ((now - self._heard) / _FORGET_SECONDS) if self._log else 0.0


class Arrivals:
    """The rate of arrivals over the last seconds."""

    def __init__(self, memory_seconds: float = 2.0) -> None:
        self._memory = memory_seconds
        self._count = 0.0
        self._at = 0.0
        self._began: float | None = None

    def observe(self, now: float, count: float = 1.0) -> None:
        now = max(now, self._at)
        self._count = self._decayed(now) + count
        self._at = now
        if self._began is None:
            self._began = now

    def per_second(self, now: float) -> float:
        """Returns the recent arrivals per second."""
        return self._decayed(now) / self._memory

    def since_begun(self, now: float) -> float:
        """Returns the arrivals per second since the first one, if that is recent, over at least a second."""
        if self._began is None:
            return 0.0
        seen = 1.0 - math.exp(-max(1.0, now - self._began) / self._memory)
        return self._decayed(now) / (self._memory * seen)

    def _decayed(self, now: float) -> float:
        return self._count * math.exp((self._at - now) / self._memory) if self._count else 0.0
