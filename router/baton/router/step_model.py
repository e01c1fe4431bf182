"""How a worker's decode step grows with its batch, learnt from its own states. Owns no clock."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.05  # of one observation; about twenty of memory
# Until batches of different sizes were seen: every request beside makes a step so much longer.
_PRIOR_GROWTH = 0.01
_PRIOR_VARIANCE = 4.0  # requests squared; how much spread it takes to believe the data instead
_OUTLIER = 8.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A line through what was observed."""

    base: float  # seconds of a step of an empty batch
    slope: float  # seconds that each request adds

    def seconds(self, num_running: float) -> float:
        """A step of so many requests."""
        return self.base + self.slope * num_running


class StepModel:
    """A weighted linear fit with memory, drawn to the prior while the batch size hardly varied."""

    def __init__(self) -> None:
        self._n = 0.0  # weighted means of batch size and step seconds
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def observe(self, num_running: int, seconds: float) -> None:
        """One state of the worker: what its steps took, with how many requests."""
        if seconds <= 0 or num_running <= 0:
            return
        if self._seconds == 0.0:
            self._n, self._seconds = float(num_running), seconds
            return
        seconds = min(seconds, self._seconds * _OUTLIER)
        dn, ds = num_running - self._n, seconds - self._seconds
        self._n += _WEIGHT * dn
        self._seconds += _WEIGHT * ds
        self._variance = (1 - _WEIGHT) * (self._variance + _WEIGHT * dn * dn)
        self._covariance = (1 - _WEIGHT) * (self._covariance + _WEIGHT * dn * ds)

    @property
    def times(self) -> StepTimes | None:
        """The line. None: nothing was observed."""
        if self._seconds == 0.0:
            return None
        prior = self._seconds * _PRIOR_GROWTH
        slope = (self._covariance + _PRIOR_VARIANCE * prior) / (self._variance + _PRIOR_VARIANCE)
        # A step never shrinks with its batch, and never extrapolates to less than nothing.
        slope = min(max(slope, 0.0), self._seconds / max(self._n, 1.0))
        return StepTimes(max(self._seconds - slope * self._n, 0.0), slope)
