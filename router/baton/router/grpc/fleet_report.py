"""The fleet's state for consoles: totals of this router's placements, and the latest of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from baton.router.placement.explain import Decision
from baton.router.placement.placer import Outcome
from baton.v1 import control_pb2, router_pb2

_BOUNDS_A_DECADE = 16  # neighbours differ by 15 %
_TTFT_DECADES = range(-3, 3)  # seconds
_ITL_DECADES = range(-4, 2)
_MAX_REMEMBERED = 128


def bounds_of(decades: range) -> tuple[float, ...]:
    """Returns growing bounds in seconds, as many in each decade, for example from 1 ms to 1000 s."""
    first, last = decades[0] * _BOUNDS_A_DECADE, (decades[-1] + 1) * _BOUNDS_A_DECADE
    return tuple(10.0 ** (step / _BOUNDS_A_DECADE) for step in range(first, last + 1))


class _Counts:
    """Values in buckets of fixed bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Counts a value that came so often."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def message(self) -> control_pb2.Histogram:
        return control_pb2.Histogram(bounds=self._bounds, counts=self._counts, sum=self._sum)


@dataclass(slots=True)
class _Totals:
    """Fields of router.proto's PlacementTotals: counting in a message takes longer."""

    num_placed: int = 0
    num_remote: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_predicted_tokens: int = 0
    num_output_tokens: int = 0


class FleetReport:
    """Counts what becomes of placements. Cheap enough for each of them."""

    def __init__(self) -> None:
        self._totals = _Totals()
        self._ttft = _Counts(bounds_of(_TTFT_DECADES))
        self._itl = _Counts(bounds_of(_ITL_DECADES))
        self._placed: deque[Decision] = deque(maxlen=_MAX_REMEMBERED)
        self._reported: deque[Decision] = deque(maxlen=_MAX_REMEMBERED)

    def placed(self, decision: Decision) -> None:
        self._totals.num_placed += 1
        self._totals.num_remote += decision.chosen.prefill is not None
        self._placed.append(decision)

    def refused(self) -> None:
        """Records a refused placement."""
        self._totals.num_refused += 1

    def reported(self, outcome: Outcome, message: router_pb2.PlacementOutcome) -> None:
        """Records the outcome of a placement."""
        self._reported.append(outcome.decision)
        totals = self._totals
        if outcome.worker_failed:
            totals.num_failed += 1
            return
        totals.num_prompt_tokens += outcome.decision.grounds.asked.demand.num_prompt_tokens
        totals.num_cached_tokens += outcome.actual_tokens
        totals.num_predicted_tokens += outcome.predicted_tokens
        totals.num_output_tokens += message.num_output_tokens
        if message.first_token_us:
            self._ttft.observe((message.first_token_us + message.times.place_us) * 1e-6)
        if message.times.mean_itl_us and message.num_output_tokens > 1:
            self._itl.observe(message.times.mean_itl_us * 1e-6, message.num_output_tokens - 1)

    def message(
        self, workers: Iterable[router_pb2.WorkerEntry], num_in_flight: int, max_placements: int, now: float
    ) -> router_pb2.GetFleetResponse:
        """Returns the response to GetFleet at `now` (monotonic seconds)."""
        totals = router_pb2.PlacementTotals(
            num_in_flight=num_in_flight,
            ttft_seconds=self._ttft.message(),
            itl_seconds=self._itl.message(),
            **asdict(self._totals),
        )
        return router_pb2.GetFleetResponse(
            workers=workers,
            totals=totals,
            placed=_newest(self._placed, max_placements, now),
            reported=_newest(self._reported, max_placements, now),
        )


def _newest(decisions: deque[Decision], count: int, now: float) -> list[router_pb2.PlacementSummary]:
    newest = min(count, len(decisions))
    return [_summary(decisions[-1 - at], now) for at in range(newest)]


def _summary(decision: Decision, now: float) -> router_pb2.PlacementSummary:
    request, response = decision.request, decision.response
    return router_pb2.PlacementSummary(
        placement_id=response.placement_id,
        request_id=request.request_id,
        model=request.model,
        tenant=request.tenant,
        num_prompt_tokens=request.num_prompt_tokens,
        num_predicted_tokens=decision.chosen.num_cached_tokens,
        decode_worker_id=response.decode.worker_id,
        prefill_worker_id=response.prefill.worker_id,
        age_ms=max(0, round((now - decision.placed) * 1000)),
        outcome=decision.outcome,
    )
