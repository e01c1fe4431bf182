"""A worker's decode step as a function of its batch and its context, learned from its states. Owns no clock.

One worker's batches hardly vary while its contexts grow with them, so that its own slopes are mostly noise. Workers of
one model share theirs: each keeps its own mean, and the slopes come mostly from all of them. A mean of few or old
observations is drawn to the others' plane, because a worker that once looked slow would never be chosen again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_WEIGHT = 0.05  # of one observation; about twenty of memory
_FASTER_WEIGHT = 0.5  # of one below the plane: much can make a step slow, but only a fast worker makes it fast
_IDLE_KEEP = 0.9  # of what is known, after each state of an idle worker; they come once a second
_LEAST_KNOWN = 1e-3
_FLEET_KNOWN = 2.0  # observations that the fleet's plane counts for, against a worker's own mean
_MOMENT_WEIGHT = 0.01  # and about a hundred, for what hardly changes: how steps grow
_FLEET_WEIGHT = 4.0  # of the fleet's slopes against a worker's own
# Prior: how much longer each request makes a step, until batches of different sizes were observed.
_PRIOR_GROWTH = 0.01
_PRIOR_VARIANCE = 4.0  # requests squared; how much spread it takes to believe the data instead
# The same for contexts: a step that reads this many more tokens takes twice as long.
_PRIOR_CONTEXT = 200_000.0
_PRIOR_CONTEXT_VARIANCE = 1e8  # tokens squared
_OUTLIER = 3.0  # times the usual error, or the usual step: what is beyond counts as being there


class Moments(NamedTuple):
    """Observations: weighted means, and moments around them. n: requests, c: tokens of context, s: seconds."""

    n: float
    c: float
    s: float
    nn: float
    cc: float
    nc: float
    ns: float
    cs: float
    known: float  # observations that the means stand for


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A plane through what was observed."""

    base: float  # seconds of a step of an empty batch
    slope: float  # seconds that each request adds
    context_slope: float = 0.0  # seconds that each token of context adds
    moments: Moments | None = field(default=None, compare=False, repr=False)  # None: it was not observed

    def seconds(self, num_running: float, num_context_tokens: float = 0.0) -> float:
        """Takes a step of `num_requests` with `num_tokens` of context in all."""
        return self.base + self.slope * num_running + self.context_slope * num_context_tokens


class StepModel:
    """A weighted linear fit with memory, drawn to the prior while the batches hardly varied."""

    def __init__(self) -> None:
        self._n = self._context = self._seconds = 0.0  # weighted means
        self._nn = self._cc = self._nc = self._ns = self._cs = 0.0  # weighted moments around them
        self._known = 0.0
        self._times: StepTimes | None = None
        self._error = 0.0  # usual distance of an observation from the plane, in seconds

    def observe(self, num_running: int, seconds: float, num_context_tokens: int = 0) -> None:
        """Takes one state of the worker: its step times, requests and tokens of context."""
        if num_running <= 0:
            self._known = max(self._known * _IDLE_KEEP, _LEAST_KNOWN)
            self._times = None
            return
        if not 0 < seconds < float("inf"):
            return
        if self._seconds == 0.0:
            self._n, self._context, self._seconds = float(num_running), float(num_context_tokens), seconds
            self._error, self._known = seconds / 2, 1.0
            return
        expected = self._expected(num_running, num_context_tokens)
        seconds = self._clipped(expected, seconds)
        weight = max(_WEIGHT, 1.0 / (self._known + 1.0), _FASTER_WEIGHT if seconds < expected else 0.0)
        self._known = min(self._known + 1.0, 1.0 / _WEIGHT)
        self._times = None
        dn, dc, ds = num_running - self._n, num_context_tokens - self._context, seconds - self._seconds
        self._n += weight * dn
        self._context += weight * dc
        self._seconds += weight * ds
        keep, added = 1 - _MOMENT_WEIGHT, _MOMENT_WEIGHT
        self._nn = keep * (self._nn + added * dn * dn)
        self._cc = keep * (self._cc + added * dc * dc)
        self._nc = keep * (self._nc + added * dn * dc)
        self._ns = keep * (self._ns + added * dn * ds)
        self._cs = keep * (self._cs + added * dc * ds)

    @property
    def times(self) -> StepTimes | None:
        """Returns the plane, or None without observations."""
        if self._seconds == 0.0:
            return None
        if self._times is None:
            means = (self._n, self._context, self._seconds)
            moments = Moments(*means, self._nn, self._cc, self._nc, self._ns, self._cs, self._known)
            self._times = _plane(moments, moments)
        return self._times

    def _expected(self, num_running: int, num_context_tokens: int) -> float:
        times = self.times
        assert times is not None, "something was observed"
        return times.seconds(num_running, num_context_tokens)

    def _clipped(self, expected: float, seconds: float) -> float:
        """Returns the observation, limited to the usual distance from the expected value."""
        bound = _OUTLIER * max(self._error, expected)
        clipped = min(max(seconds, expected - bound), expected + bound)
        self._error += _WEIGHT * (abs(clipped - expected) - self._error)
        return clipped


def fleet_times(times: Sequence[StepTimes]) -> StepTimes | None:
    """Returns the plane through all of these workers' observations, or None without workers."""
    known = [one.moments for one in times if one.moments is not None]
    if not known:
        return times[0] if times else None
    total = sum(one.known for one in known)
    # Each around its own mean: a slow worker and a fast one do not make a slope.
    means = [sum(one.known * one[place] for one in known) / total for place in range(3)]
    within = [sum(values) for values in zip(*(one[3:] for one in known), strict=True)]
    moments = Moments(*means, *within)
    return _plane(moments, moments)


def drawn_to_fleet(own: StepTimes, fleet: StepTimes) -> StepTimes:
    """Returns a worker's plane: through its own mean as far as that is known, with slopes mostly of the fleet."""
    at, others = own.moments, fleet.moments
    if at is None or others is None:
        return own
    mixed = Moments(*[mine + _FLEET_WEIGHT * theirs for mine, theirs in zip(at, others, strict=True)])
    guess = fleet.seconds(at.n, at.c)
    believed = guess + at.known / (at.known + _FLEET_KNOWN) * (at.s - guess)
    return _plane(at._replace(s=believed), mixed)


def _plane(at: Moments, of: Moments) -> StepTimes:
    """Returns a plane through the means of `at`, with the slopes of the moments of `of`."""
    nn, cc = of.nn + _PRIOR_VARIANCE, of.cc + _PRIOR_CONTEXT_VARIANCE
    ns = of.ns + _PRIOR_VARIANCE * at.s * _PRIOR_GROWTH
    cs = of.cs + _PRIOR_CONTEXT_VARIANCE * at.s / _PRIOR_CONTEXT
    rest = nn * cc - of.nc * of.nc
    slope, context_slope = (ns * cc - cs * of.nc) / rest, (cs * nn - ns * of.nc) / rest
    # A step never shrinks with its batch: what would is left out, and the other takes its part.
    if slope < 0:
        slope, context_slope = 0.0, cs / cc
    elif context_slope < 0:
        slope, context_slope = ns / nn, 0.0
    slope, context_slope = max(slope, 0.0), max(context_slope, 0.0)
    # An extrapolation is never negative.
    grown = slope * at.n + context_slope * at.c
    if grown > at.s:
        slope, context_slope = slope * at.s / grown, context_slope * at.s / grown
        grown = at.s
    return StepTimes(at.s - grown, slope, context_slope, at)
