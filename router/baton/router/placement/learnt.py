"""What a router learns: rates, output lengths, arrival rates and the errors of its estimates. Owns no clock."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from baton.router.fleet.rates import GUESS, Rates, fleet_rates, rates_of
from baton.router.fleet.worker_view import WorkerView
from baton.router.learning.calibration import Arrivals, Bias
from baton.router.learning.output_lengths import OutputLengths
from baton.router.placement.explain import Decision
from baton.router.placement.promises import Promises, promise_of
from baton.router.placement.worker_snapshot import Traffic
from baton.router.requests.in_flight import Share
from baton.v1 import router_pb2, types_pb2

_FLEET_SECONDS = 1.0  # for which the fleet's medians are kept
_STALL_MEMORY_SECONDS = 2.0  # of the prompts that a worker was given
_MAX_STALLED = 0.9
_LASTING_SECONDS = 10.0  # about as long as a stream lives
_MAX_LASTING_STALL = 0.8  # a fleet that has just begun computes what it will soon have cached
_FEWEST_GAPS = 4  # between tokens, to measure a stream's speed
_MOST_LENGTH = 3.0  # times the expected one: no stream counts for more


class _Given(NamedTuple):
    """Tokens of prompts that a worker was given."""

    of_late: float
    left: float  # that it cannot have computed yet
    at: float


_NOTHING_GIVEN = _Given(0.0, 0.0, 0.0)


class Learnt:
    """Learns from every outcome. Nothing in it is configured."""

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self.arrivals = Arrivals()
        self._lasting = Arrivals(_LASTING_SECONDS)
        self._prompt_seconds = Arrivals()  # of those that stand in the way of decodes
        self.promises = Promises()
        self._given: dict[str, _Given] = {}  # by worker
        self._biases: dict[tuple[bytes, bool], Bias] = defaultdict(Bias)  # by model digest and whether remote
        self._rates: dict[str, tuple[WorkerView, Rates, Rates]] = {}
        self._fleet: dict[bytes, tuple[float, Rates]] = {}

    def placed(self, shares: Sequence[Share], now: float) -> None:
        """Takes a placement of this router or another."""
        self.arrivals.observe(now)
        self._lasting.observe(now)
        for share in shares:
            if share.num_prefill_tokens and share.num_requests:
                self._prompt_seconds.observe(now, share.num_prefill_tokens / self._speed(share.worker_id))
            if share.num_prefill_tokens:
                given = self._given_until(share.worker_id, now)
                num_tokens = share.num_prefill_tokens
                self._given[share.worker_id] = _Given(given.of_late + num_tokens, given.left + num_tokens, now)

    def given(self, worker_id: str, now: float) -> tuple[float, float]:
        """Returns the part of a worker's time, in [0, 0.9], in which prompts stall its decodes.

        Also returns the seconds of prompt work left, if the worker did nothing else.
        """
        given = self._given_until(worker_id, now)
        speed = self._speed(worker_id)
        return min(_MAX_STALLED, given.of_late / _STALL_MEMORY_SECONDS / speed), given.left / speed

    def _given_until(self, worker_id: str, now: float) -> _Given:
        given = self._given.get(worker_id)
        if given is None:
            return _NOTHING_GIVEN
        seconds = now - given.at
        of_late = given.of_late * math.exp(-seconds / _STALL_MEMORY_SECONDS)
        left = given.left - seconds * self._speed(worker_id)
        return _Given(of_late, left if left > 0 else 0.0, now)

    def _speed(self, worker_id: str) -> float:
        known = self._rates.get(worker_id)
        return (known[2] if known is not None else GUESS).prefill_tokens_per_second

    def learn(self, decision: Decision, outcome: router_pb2.PlacementOutcome, now: float) -> None:
        """Learns from the outcome of a successful placement."""
        if outcome.first_token_us:
            best = decision.chosen
            digest = best.decode.view.model_digest
            is_remote = best.prefill is not None
            bias = self._biases[digest, is_remote]
            factor = decision.grounds.traffic.remote_bias if is_remote else decision.grounds.traffic.bias
            first_token = outcome.first_token_us / 1e6
            demand, work = decision.grounds.asked.demand, best.costs.prefill
            # The step that runs when it comes is waited for, half of it on average, and its own decodes for others too.
            steps = 0.0 if is_remote or not best.decode.num_beside else 1.5 * best.decode.step_seconds(demand)
            bias.observe(work / factor, best.costs.to_first_token - work + steps, first_token, now)
            promise = promise_of(best.decode, best.costs, demand, decision.grounds.traffic)
            gaps = outcome.num_output_tokens - 1
            streamed = max(0.0, now - decision.placed - first_token)
            between = streamed / gaps if gaps >= _FEWEST_GAPS else 0.0
            length = outcome.num_output_tokens / demand.num_output_tokens
            self.promises.observe(promise, first_token, between, now, min(length, _MOST_LENGTH))

    def traffic(self, model: types_pb2.ModelInfo, num_workers: int, now: float) -> Traffic:
        """Returns the traffic per worker, and the factors by which a model's estimates must be corrected."""
        digest = model.digest
        per_second, count = self.arrivals.per_second(now), max(1, num_workers)
        prompt_seconds = self._prompt_seconds.per_second(now) / per_second if per_second else 0.0
        return Traffic(
            per_second / count,
            self._biases[digest, False].factor(now),
            self._biases[digest, True].factor(now),
            self.lengths.expected(model.name, 0),
            min(_MAX_LASTING_STALL, self._lasting.since_begun(now) / count * prompt_seconds),
        )

    def rates(self, view: WorkerView, fallback: Rates) -> Rates:
        """Returns a worker's rates, cached for each state and fallback."""
        known = self._rates.get(view.worker_id)
        if known is not None and known[0] is view and known[1] is fallback:
            return known[2]
        rates = rates_of(view, fallback)
        self._rates[view.worker_id] = (view, fallback, rates)
        return rates

    def fleet_rates(self, digest: bytes, views: Sequence[WorkerView], now: float) -> Rates:
        """Returns the rates to assume for a worker of this model that has not measured its own."""
        known = self._fleet.get(digest)
        # What the first worker measures is worth more than a guess at once: the others would look slower than it.
        if known is not None and known[1].is_measured and now - known[0] <= _FLEET_SECONDS:
            return known[1]
        rates = fleet_rates(views)
        self._fleet[digest] = (now, rates)
        return rates

    def lose(self, worker_id: str) -> None:
        """Forgets a dead worker."""
        self._rates.pop(worker_id, None)
        self._given.pop(worker_id, None)

    def forget_fleet(self) -> None:
        """Forgets models that are not served any more."""
        self._fleet.clear()
