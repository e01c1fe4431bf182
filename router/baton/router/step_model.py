"""How a worker's decode step grows with its batch and its context, learnt from its own states. Owns no clock."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.05  # of one observation; about twenty of memory
# Until batches of different sizes were seen: every request beside makes a step so much longer.
_PRIOR_GROWTH = 0.01
_PRIOR_VARIANCE = 4.0  # requests squared; how much spread it takes to believe the data instead
# The same for contexts: a step that reads so many tokens more takes twice as long.
_PRIOR_CONTEXT = 200_000.0
_PRIOR_CONTEXT_VARIANCE = 1e8  # tokens squared
_OUTLIER = 3.0  # times the usual error, or the usual step: what is beyond counts as being there


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A plane through what was observed."""

    base: float  # seconds of a step of an empty batch
    slope: float  # seconds that each request adds
    context_slope: float = 0.0  # seconds that each token of context adds

    def seconds(self, num_running: float, num_context_tokens: float = 0.0) -> float:
        """A step of so many requests with so many tokens of context in all."""
        return self.base + self.slope * num_running + self.context_slope * num_context_tokens


class StepModel:
    """A weighted linear fit with memory, drawn to the prior while the batches hardly varied."""

    def __init__(self) -> None:
        self._n = self._context = self._seconds = 0.0  # weighted means
        self._nn = self._cc = self._nc = self._ns = self._cs = 0.0  # weighted moments around them
        self._error = 0.0  # usual distance of an observation from the plane, in seconds

    def observe(self, num_running: int, seconds: float, num_context_tokens: int = 0) -> None:
        """One state of the worker: what its steps took, with how many requests and tokens of context."""
        if not 0 < seconds < float("inf") or num_running <= 0:
            return
        if self._seconds == 0.0:
            self._n, self._context, self._seconds = float(num_running), float(num_context_tokens), seconds
            self._error = seconds / 2
            return
        seconds = self._clipped(num_running, num_context_tokens, seconds)
        dn, dc, ds = num_running - self._n, num_context_tokens - self._context, seconds - self._seconds
        self._n += _WEIGHT * dn
        self._context += _WEIGHT * dc
        self._seconds += _WEIGHT * ds
        keep = 1 - _WEIGHT
        self._nn = keep * (self._nn + _WEIGHT * dn * dn)
        self._cc = keep * (self._cc + _WEIGHT * dc * dc)
        self._nc = keep * (self._nc + _WEIGHT * dn * dc)
        self._ns = keep * (self._ns + _WEIGHT * dn * ds)
        self._cs = keep * (self._cs + _WEIGHT * dc * ds)

    @property
    def times(self) -> StepTimes | None:
        """The plane. None: nothing was observed."""
        if self._seconds == 0.0:
            return None
        nn, cc = self._nn + _PRIOR_VARIANCE, self._cc + _PRIOR_CONTEXT_VARIANCE
        ns = self._ns + _PRIOR_VARIANCE * self._seconds * _PRIOR_GROWTH
        cs = self._cs + _PRIOR_CONTEXT_VARIANCE * self._seconds / _PRIOR_CONTEXT
        rest = nn * cc - self._nc * self._nc
        slope, context_slope = (ns * cc - cs * self._nc) / rest, (cs * nn - ns * self._nc) / rest
        # A step never shrinks with its batch: what would is left out, and the other takes its part.
        if slope < 0:
            slope, context_slope = 0.0, cs / cc
        elif context_slope < 0:
            slope, context_slope = ns / nn, 0.0
        slope, context_slope = max(slope, 0.0), max(context_slope, 0.0)
        # And it never extrapolates to less than nothing.
        grown = slope * self._n + context_slope * self._context
        if grown > self._seconds:
            slope, context_slope = slope * self._seconds / grown, context_slope * self._seconds / grown
            grown = self._seconds
        return StepTimes(self._seconds - grown, slope, context_slope)

    def _clipped(self, num_running: int, num_context_tokens: int, seconds: float) -> float:
        """The observation, no further from what is expected than others usually are."""
        times = self.times
        assert times is not None
        expected = times.seconds(num_running, num_context_tokens)
        bound = _OUTLIER * max(self._error, expected)
        clipped = min(max(seconds, expected - bound), expected + bound)
        self._error += _WEIGHT * (abs(clipped - expected) - self._error)
        return clipped
