"""What a router has learnt: rates, output lengths, how fast requests come, what its estimates missed. Owns no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from baton.router.calibration import Arrivals, Bias
from baton.router.explain import Decision
from baton.router.output_lengths import OutputLengths
from baton.router.rates import Rates, fleet_rates, rates_of
from baton.router.standing import Traffic
from baton.router.worker_view import WorkerView
from baton.v1 import router_pb2

_FLEET_SECONDS = 1.0  # for which the fleet's medians are kept
_STALL_WEIGHT = 0.02  # of one placement; about fifty of memory
_MAX_STALLED = 0.9


class Learnt:
    """Grows with every outcome; nothing in it is configured."""

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self.arrivals = Arrivals()
        self._stall_seconds = 0.0  # of the decodes beside, for each placement
        self._biases: dict[tuple[bytes, bool], Bias] = defaultdict(Bias)  # by model digest and whether remote
        self._rates: dict[str, tuple[WorkerView, Rates, Rates]] = {}
        self._fleet: dict[bytes, tuple[float, Rates]] = {}

    def placed(self, prefill_seconds: float, is_remote: bool, now: float) -> None:
        """A request was placed; its prompt takes so long, beside the decodes of its worker unless `is_remote`."""
        self.arrivals.observe(now)
        self._stall_seconds += _STALL_WEIGHT * ((0.0 if is_remote else prefill_seconds) - self._stall_seconds)

    def stalled_part(self, num_workers: int, now: float) -> float:
        """The part of the time, in [0, 0.9], in which decodes stand still for prompts."""
        return min(_MAX_STALLED, self._stall_seconds * self.arrivals.per_second(now) / max(1, num_workers))

    def learn(self, decision: Decision, outcome: router_pb2.PlacementOutcome, now: float) -> None:
        """A placement went well."""
        self.lengths.observe(decision.request.model, outcome.num_output_tokens)
        if outcome.first_token_us:
            best = decision.chosen
            digest = best.decode.view.model_digest
            bias = self._biases[digest, best.prefill is not None]
            bias.observe(best.costs.to_first_token, outcome.first_token_us / 1e6, now)

    def traffic(self, digest: bytes, num_workers: int, now: float) -> Traffic:
        """What comes to each of so many workers, and what the estimates for a model are to be multiplied with."""
        return Traffic(
            self.arrivals.per_second(now) / max(1, num_workers),
            self._biases[digest, False].factor(now),
            self._biases[digest, True].factor(now),
        )

    def rates(self, view: WorkerView, fallback: Rates) -> Rates:
        """A worker's rates, made once for each state and fallback."""
        known = self._rates.get(view.worker_id)
        if known is not None and known[0] is view and known[1] is fallback:
            return known[2]
        rates = rates_of(view, fallback)
        self._rates[view.worker_id] = (view, fallback, rates)
        return rates

    def fleet_rates(self, digest: bytes, views: Sequence[WorkerView], now: float) -> Rates:
        """What a worker of this model is taken to be like until it has measured itself."""
        known = self._fleet.get(digest)
        if known is not None and now - known[0] <= _FLEET_SECONDS:
            return known[1]
        rates = fleet_rates(views)
        self._fleet[digest] = (now, rates)
        return rates

    def lose(self, worker_id: str) -> None:
        """A worker died."""
        self._rates.pop(worker_id, None)

    def forget_fleet(self) -> None:
        """The models or their workers are others now."""
        self._fleet.clear()
