"""Placement as a whole: fleet, index and what is in flight go in, one answer comes out. Does no I/O."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from baton.router import filter as filters
from baton.router.costs import Demand, Standing, seconds_per_seat, standing_of
from baton.router.explain import Decisions
from baton.router.fleet import Fleet
from baton.router.in_flight import InFlight, Share
from baton.router.output_lengths import OutputLengths
from baton.router.policy import Option, rank
from baton.router.prefix_index import PrefixIndex
from baton.router.rates import Rates, fleet_rates, rates_of
from baton.router.worker_view import WorkerView
from baton.rpc.block_hash import HASH_BYTES
from baton.rpc.errors import InvalidRequest, NoCapacity, NotFound, Unavailable
from baton.v1 import router_pb2, types_pb2

_MAX_CANDIDATES = 5  # told in an answer
_FALLBACK_SECONDS = 1.0  # for which the fleet's medians are kept
_RETRY_SECONDS = (0.1, 10.0)
_NO_WORKER_RETRY_MS = 1000

_KINDS = (
    router_pb2.COST_KIND_QUEUE,
    router_pb2.COST_KIND_PREFILL,
    router_pb2.COST_KIND_TRANSFER,
    router_pb2.COST_KIND_DECODE,
    router_pb2.COST_KIND_MEMORY,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a report says of one placement, beside what was predicted."""

    predicted_tokens: int
    actual_tokens: int
    worker_failed: bool


class Placer:
    """Decides, counts what it decided, and learns from the outcomes. A FleetListener."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        max_queue_depth: int,
        explain_capacity: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.in_flight = InFlight()
        self.decisions = Decisions(explain_capacity)
        self._fleet = fleet
        self._index = index
        self._max_queue_depth = max_queue_depth
        self._clock = clock
        self._lengths = OutputLengths()
        # A restarted router must not take reports for placements of its former life.
        self._placement_ids = itertools.count(time.time_ns())
        self._known_rates: dict[str, tuple[WorkerView, Rates, Rates]] = {}
        self._fallbacks: dict[bytes, tuple[float, Rates]] = {}
        fleet.listen(self)

    def place(self, request: router_pb2.PlaceRequest) -> router_pb2.PlaceResponse:
        """The workers for one request, counted as load from now on. Raises what router.proto says."""
        now = self._clock()
        self.in_flight.expire(now)
        model = self._model(request.model)
        _check(request, model)
        demand = Demand(request.num_prompt_tokens, self._lengths.expected(request.model, request.max_tokens))
        standings = self._standings(request, model, now)
        decodes = self._with_room([one for one in standings if one.view.can_decode], demand, model)
        prefills = [one for one in standings if one.view.can_prefill_for_others and self._has_room(one, demand)]
        placement_id = next(self._placement_ids)
        options = rank(decodes, prefills, demand, placement_id)
        best = options[0]
        _check_deadline(request, best)
        response = _response(placement_id, options)
        self.in_flight.begin(placement_id, now, _shares(best, demand), request.block_hashes)
        self.decisions.add(request, response, now)
        return response

    def report(self, outcome: router_pb2.PlacementOutcome) -> Outcome | None:
        """Ends a placement. None: it is not known, or was reported before."""
        if not self.in_flight.end(outcome.placement_id):
            return None
        decision = self.decisions.get(outcome.placement_id)
        if decision is None:
            return None
        decision.outcome = outcome
        if not outcome.worker_failed:
            self._lengths.observe(decision.request.model, outcome.num_output_tokens)
        predicted = max(decision.response.decode_cached_tokens, decision.response.prefill_cached_tokens)
        return Outcome(predicted, outcome.num_cached_tokens, outcome.worker_failed)

    def on_state(self, view: WorkerView, is_new: bool) -> None:
        """What was placed long enough before a state is in it; entries of a former epoch are not true any more."""
        if is_new and self._index.epoch(view.worker_id) not in (None, view.epoch):
            self._index.drop(view.worker_id)
        self.in_flight.hear(view.worker_id, view.received)

    def on_lost(self, worker_id: str) -> None:
        """Nothing is on its way to a dead worker."""
        self.in_flight.lose(worker_id)
        self._known_rates.pop(worker_id, None)

    def on_models(self) -> None:
        """Rates are kept by model."""
        self._fallbacks.clear()

    def _model(self, name: str) -> types_pb2.ModelInfo:
        model = self._fleet.models.get(name)
        if model is not None:
            return model
        known = {worker.state.model.name for worker in self._fleet if worker.state is not None}
        if not self._fleet.models or name in known:
            raise Unavailable(
                f"no live worker decodes for model {name!r}",
                phase=types_pb2.PHASE_PLACEMENT,
                retry_after_ms=_NO_WORKER_RETRY_MS,
            )
        raise NotFound(f"no model {name!r}; served are: {', '.join(sorted(self._fleet.models))}", field="model")

    def _standings(self, request: router_pb2.PlaceRequest, model: types_pb2.ModelInfo, now: float) -> list[Standing]:
        excluded = self._still_excluded(request)
        views, refused = filters.usable(self._fleet.alive(), model, excluded)
        if not any(view.can_decode for view in views):
            reasons = "; ".join(f"{worker_id} {reason}" for worker_id, reason in sorted(refused.items()))
            raise Unavailable(
                f"no worker can decode for model {model.name!r} now: {reasons}",
                phase=types_pb2.PHASE_PLACEMENT,
                retry_after_ms=_NO_WORKER_RETRY_MS,
            )
        held = self._index.lookup(request.block_hashes)
        coming = self.in_flight.expected_prefixes(request.block_hashes)
        fallback = self._fallback(model, views, now)
        most = (request.num_prompt_tokens - 1) // model.block_size  # the last token is always computed
        return [self._standing(view, held, coming, most, fallback) for view in views]

    def _standing(
        self, view: WorkerView, held: Mapping[str, int], coming: Mapping[str, int], most: int, fallback: Rates
    ) -> Standing:
        worker_id = view.worker_id
        num_blocks = held.get(worker_id, 0) if self._index.epoch(worker_id) == view.epoch else 0
        num_blocks = min(most, max(num_blocks, coming.get(worker_id, 0)))
        rates = self._rates(view, fallback)
        return standing_of(view, self.in_flight.load(worker_id), rates, num_blocks * view.block_size)

    def _rates(self, view: WorkerView, fallback: Rates) -> Rates:
        """A worker's rates, made once for each state and fallback."""
        known = self._known_rates.get(view.worker_id)
        if known is not None and known[0] is view and known[1] is fallback:
            return known[2]
        rates = rates_of(view, fallback)
        self._known_rates[view.worker_id] = (view, fallback, rates)
        return rates

    def _still_excluded(self, request: router_pb2.PlaceRequest) -> Collection[str]:
        """Without those that started anew after they were given the request."""
        if not request.excluded_worker_ids:
            return ()
        last = self.decisions.last_of(request.request_id)
        excluded = set(request.excluded_worker_ids)
        if last is None:
            return excluded
        for worker_id in request.excluded_worker_ids:
            worker = self._fleet.find(worker_id)
            if worker is not None and worker.alive and worker.alive_since > last.placed:
                excluded.discard(worker_id)
        return excluded

    def _with_room(self, decodes: Sequence[Standing], demand: Demand, model: types_pb2.ModelInfo) -> Sequence[Standing]:
        """The decode workers that can take one more. NoCapacity: none."""
        able = [one for one in decodes if filters.can_ever_hold(one, demand)]
        if not able:
            largest = max(one.view.num_blocks for one in decodes) * model.block_size
            raise InvalidRequest(
                f"the prompt has {demand.num_prompt_tokens} tokens; the largest worker's KV pool holds {largest}",
                field="num_prompt_tokens",
            )
        free = [one for one in able if filters.has_room(one, self._max_queue_depth)]
        if not free:
            seconds = min(seconds_per_seat(one, demand) for one in able)
            raise NoCapacity(
                f"each of {len(able)} workers for model {model.name!r} has {self._max_queue_depth} requests waiting",
                phase=types_pb2.PHASE_PLACEMENT,
                retry_after_ms=_retry_ms(seconds),
            )
        return free

    def _has_room(self, prefill: Standing, demand: Demand) -> bool:
        return filters.can_ever_hold(prefill, demand) and filters.has_room(prefill, self._max_queue_depth)

    def _fallback(self, model: types_pb2.ModelInfo, views: Sequence[WorkerView], now: float) -> Rates:
        made, rates = self._fallbacks.get(model.digest, (float("-inf"), None))
        if rates is None or now - made > _FALLBACK_SECONDS:
            rates = fleet_rates(views)
            self._fallbacks[model.digest] = (now, rates)
        return rates


def _check(request: router_pb2.PlaceRequest, model: types_pb2.ModelInfo) -> None:
    longest = model.max_model_len - 1
    if not 0 < request.num_prompt_tokens <= longest:
        raise InvalidRequest(
            f"num_prompt_tokens is {request.num_prompt_tokens}; model {model.name!r} takes 1 to {longest}",
            field="num_prompt_tokens",
        )
    num_hashes, rest = divmod(len(request.block_hashes), HASH_BYTES)
    if rest or num_hashes > request.num_prompt_tokens // model.block_size:
        raise InvalidRequest(
            f"block_hashes has {len(request.block_hashes)} bytes; it must be {HASH_BYTES} for each of at most "
            f"{request.num_prompt_tokens // model.block_size} full blocks of {model.block_size} tokens",
            field="block_hashes",
        )


def _check_deadline(request: router_pb2.PlaceRequest, best: Option) -> None:
    """Refuses what would come too late, where that is known and not guessed."""
    wait = best.costs.to_first_token
    measured = (best.prefill or best.decode).rates.is_measured
    if request.timeout_ms and measured and wait > request.timeout_ms / 1000:
        raise NoCapacity(
            f"the first token would take {wait:.2f} s, longer than the time limit of {request.timeout_ms} ms",
            phase=types_pb2.PHASE_PLACEMENT,
            retry_after_ms=_retry_ms(best.costs.queue),
        )


def _retry_ms(seconds: float) -> int:
    shortest, longest = _RETRY_SECONDS
    return round(1000 * min(max(seconds, shortest), longest))


def _shares(best: Option, demand: Demand) -> tuple[Share, ...]:
    decode, prefill = best.decode, best.prefill
    uncached = demand.num_prompt_tokens - decode.num_cached_tokens
    num_blocks = -(-uncached // max(1, decode.view.block_size))
    if prefill is None:
        return (Share(decode.view.worker_id, 1, uncached, num_blocks),)
    uncached_there = demand.num_prompt_tokens - prefill.num_cached_tokens
    return (
        Share(decode.view.worker_id, 1, 0, num_blocks),
        Share(prefill.view.worker_id, 0, uncached_there, -(-uncached_there // max(1, prefill.view.block_size))),
    )


def _response(placement_id: int, options: Sequence[Option]) -> router_pb2.PlaceResponse:
    best = options[0]
    response = router_pb2.PlaceResponse(
        placement_id=placement_id,
        decode=_endpoint(best.decode.view),
        decode_cached_tokens=best.decode.num_cached_tokens,
        candidates=[_candidate(option) for option in options[:_MAX_CANDIDATES]],
    )
    if best.prefill is not None:
        response.prefill.CopyFrom(_endpoint(best.prefill.view))
        response.prefill_cached_tokens = best.prefill.num_cached_tokens
    return response


def _endpoint(view: WorkerView) -> types_pb2.Endpoint:
    return types_pb2.Endpoint(worker_id=view.worker_id, epoch=view.epoch, address=view.address)


def _candidate(option: Option) -> router_pb2.Candidate:
    return router_pb2.Candidate(
        decode_worker_id=option.decode.view.worker_id,
        prefill_worker_id=option.prefill.view.worker_id if option.prefill is not None else "",
        total_seconds=option.total,
        costs=[
            router_pb2.Cost(kind=kind, seconds=seconds)
            for kind, seconds in zip(_KINDS, option.costs, strict=True)
            if seconds
        ],
    )
