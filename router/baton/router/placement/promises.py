"""The latency that a placement promises, how well promises are kept, and whether one more stream adds good ones. Pure.

A stream is good if its first token and its mean gap meet the objectives. A request adds its own chance to be good and
reduces that of others. It is admitted while it adds more than it takes, both counted in streams.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from baton.router.placement.costs import Costs
from baton.router.placement.worker_snapshot import Demand, Objectives, Traffic, WorkerSnapshot

_MEMORY_OUTCOMES = 50.0  # that are remembered at least
_MEMORY_SECONDS = 10.0  # in which others are forgotten
_PRIOR_OUTCOMES = 10.0  # that the prior spread, and the prior slope, count for
_PRIOR_SPREAD = 0.4
_PRIOR_VARIED = 0.02  # variance of promises that it takes to believe their slope instead of 1
_LEAST_SPREAD = 0.1
_MOST_OFF = 1.5  # in logarithms; an outcome further off counts as so far
_MOST_STALLED = 0.95
_FIRST_TOKEN_FACTOR = 2.0  # times an idle worker's time: a long prompt's first token may take this long
_LIKELY = 0.5  # a chance below it is not worth its work
_MOST_GROWTH = 0.7  # of steps with their batch: beyond it a queue grows, not the batch


class Promise(NamedTuple):
    """The expected latencies of one stream, in seconds."""

    first_token: float
    between: float  # two tokens, on average


class Kept:
    """The relation of actual to promised times, in logarithms: a line that adapts, and the spread around it."""

    def __init__(self) -> None:
        self.num_outcomes = 0
        self._known = 0.0  # outcomes that the means stand for
        self._heard = 0.0
        self._promised = 0.0  # mean
        self._offset = 0.0  # mean of what came later than promised
        self._varied = _PRIOR_VARIED  # of what was promised
        self._together = _PRIOR_VARIED
        self._square = _PRIOR_SPREAD**2

    def observe(self, promised: float, actual: float, now: float = 0.0, part: float = 1.0) -> None:
        """Takes one outcome with weight `part`."""
        if promised <= 0 or actual <= 0:
            return
        promise, came = math.log(promised), math.log(actual)
        self.num_outcomes += 1
        # Outcomes that arrive quickly still cover the last seconds and a whole batch.
        faded = self._known * math.exp(min(0.0, self._heard - now) / _MEMORY_SECONDS)
        self._known = max(faded, min(self._known, _MEMORY_OUTCOMES)) + part
        self._heard = max(self._heard, now)
        weight, drawn = part / self._known, part / (self._known + _PRIOR_OUTCOMES)
        off = min(max(came - self._expected(promise), -_MOST_OFF), _MOST_OFF)
        self._square += drawn * (off * off * min(part, 1.0) - self._square)
        dx, dy = promise - self._promised, came - promise - self._offset
        self._promised += weight * dx
        self._offset += weight * dy
        if self.num_outcomes > 1:
            self._varied += drawn * (dx * dx - self._varied)
            self._together += drawn * (dx * (dx + dy) - self._together)

    @property
    def spread(self) -> float:
        """Returns the standard deviation of the logarithm around the line."""
        return max(_LEAST_SPREAD, math.sqrt(self._square))

    def distance(self, promised: float, limit: float) -> float:
        """Returns by how many spreads the expected time stays below a limit."""
        return (math.log(limit) - self._expected(math.log(max(promised, 1e-6)))) / self.spread

    def _expected(self, promise: float) -> float:
        slope = (self._together + _PRIOR_VARIED) / (self._varied + _PRIOR_VARIED)
        return self._promised + self._offset + min(max(slope, 0.0), 1.0) * (promise - self._promised)


class Promises:
    """Grows with every outcome."""

    def __init__(self) -> None:
        self.first_token = Kept()
        self.between = Kept()

    def observe(
        self, promise: Promise, first_token: float, between: float, now: float = 0.0, length: float = 1.0
    ) -> None:
        """Takes the outcome of one stream.

        `between` is 0 if it had too few tokens; `length` is relative to the usual one.

        A batch has more long streams than short ones, because short ones end first.
        """
        self.first_token.observe(promise.first_token, first_token, now)
        if between:
            self.between.observe(promise.between, between, now, length)

    def gain(
        self,
        decode: WorkerSnapshot,
        prefill: WorkerSnapshot | None,
        costs: Costs,
        demand: Demand,
        limits: Objectives,
        now: Traffic,
    ) -> float:
        """Returns the number of good streams that a placement adds, less those that it spoils."""
        promise = promise_of(decode, costs, demand, now)
        alone = _alone(decode, costs, demand)
        own = 1.0
        for kept, promised, idle, limit in (
            (self.first_token, promise.first_token, alone.first_token, limits.ttft_seconds),
            (self.between, promise.between, alone.between, limits.itl_seconds),
        ):
            own *= _below(kept.distance(promised, max(limit, _FIRST_TOKEN_FACTOR * idle)))
        if own < _LIKELY:
            # If all streams are late, one more spoils none; but later ones could be good once the queue is empty.
            return own - 1.0
        return own - self._spoilt(decode, prefill, costs, demand, promise, limits, now)

    def _spoilt(
        self,
        decode: WorkerSnapshot,
        prefill: WorkerSnapshot | None,
        costs: Costs,
        demand: Demand,
        promise: Promise,
        limits: Objectives,
        now: Traffic,
    ) -> float:
        stalled = min(_MOST_STALLED, decode.stalled_part)
        step, beside = decode.rates.step, decode.num_beside
        seconds = decode.step_seconds(demand)
        context = demand.num_prompt_tokens + demand.num_output_tokens / 2
        growth = (step.slope + step.context_slope * context) / seconds
        longer = beside * growth
        if prefill is None:
            prefills = decode.prefill_seconds(demand)
            longer += beside * prefills / (now.num_output_tokens * promise.between * (1.0 - stalled))
        # Slower streams stay longer, and make the others slower.
        longer /= 1.0 - min(_MOST_GROWTH, beside * growth)
        between = self.between
        spoilt = longer * _density(between.distance(promise.between, limits.itl_seconds)) / between.spread
        computes = prefill or decode
        behind = computes.num_behind + now.placements_per_second * (computes.backlog_seconds + costs.prefill)
        later = behind * costs.prefill / max(promise.first_token, costs.prefill)
        first = self.first_token
        return spoilt + later * _density(first.distance(promise.first_token, limits.ttft_seconds)) / first.spread


def promise_of(decode: WorkerSnapshot, costs: Costs, demand: Demand, now: Traffic) -> Promise:
    """Returns the latencies to expect. A worker with few prompts now will get its share of those to come."""
    stalled = min(_MOST_STALLED, max(decode.stalled_part, now.lasting_stall))
    return Promise(costs.to_first_token, decode.step_seconds(demand) / (1.0 - stalled))


def _alone(decode: WorkerSnapshot, costs: Costs, demand: Demand) -> Promise:
    """Returns the latencies on an idle worker."""
    step = decode.rates.step
    context = demand.num_prompt_tokens + demand.num_output_tokens / 2
    return Promise(costs.to_first_token - costs.queue, step.seconds(1, context))


def _below(distance: float) -> float:
    return 0.5 * math.erfc(-distance / math.sqrt(2.0))


def _density(distance: float) -> float:
    return math.exp(-0.5 * distance * distance) / math.sqrt(2.0 * math.pi)
