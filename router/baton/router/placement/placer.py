"""Placement as a whole: fleet, index and what is in flight go in, one answer comes out. Does no I/O."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from baton.router.fleet.fleet import Fleet
from baton.router.fleet.worker_view import WorkerView
from baton.router.index.prefix_index import PrefixIndex
from baton.router.placement.answer import response_of
from baton.router.placement.decision import Asked, admitted, decide
from baton.router.placement.explain import Decision, Decisions, Grounds
from baton.router.placement.fair_share import RecentFullness, fullness
from baton.router.placement.learnt import Learnt
from baton.router.placement.policy import Option
from baton.router.placement.snapshots import Snapshots, Usable
from baton.router.placement.worker_snapshot import Demand, Objectives, WorkerSnapshot
from baton.router.requests.in_flight import InFlight, Placed, Share
from baton.router.requests.placed_adapters import PlacedAdapters
from baton.router.requests.prompt_sketch import Sketch, sketch_of
from baton.router.requests.sessions import Sessions
from baton.rpc.block_hash import HASH_BYTES
from baton.rpc.errors import InvalidRequest, NotFound, Unavailable
from baton.v1 import router_pb2, types_pb2

_NO_WORKER_RETRY_MS = 1000


class Outcome(NamedTuple):
    """A placement's outcome beside its prediction."""

    decision: Decision
    predicted_tokens: int
    actual_tokens: int
    worker_failed: bool


class PlacerListener(Protocol):
    """Receives what happens to this router's placements."""

    def on_placed(self, placed: Placed) -> None:
        """Called after a placement."""

    def on_ended(self, placement_id: int) -> None:
        """Called after the outcome of a placement was reported, also of another router's."""

    def on_suspected(self, worker_id: str, epoch: int) -> None:
        """Called after a gateway lost a worker."""


class Placer:
    """Decides, counts what it decided, and learns from the outcomes. A FleetListener."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        max_queue_depth: int,
        explain_capacity: int,
        clock: Callable[[], float] = time.monotonic,
        first_placement_id: int | None = None,
        objectives: Objectives | None = None,
        in_flight: InFlight | None = None,
        listener: PlacerListener | None = None,
    ) -> None:
        self.in_flight = InFlight() if in_flight is None else in_flight
        self.decisions = Decisions(explain_capacity)
        self._listener = listener
        self._fleet = fleet
        self._index = index
        self._max_queue_depth = max_queue_depth
        self._clock = clock
        self._learnt = Learnt()
        self._objectives = objectives or Objectives()
        self._sessions = Sessions()
        self._adapters = PlacedAdapters()
        self._fullness: dict[str, RecentFullness] = {}  # by model
        self._snapshots = Snapshots(
            fleet, index, self.in_flight, self._learnt, self._sessions, self._adapters, self.decisions
        )
        # A restarted router must not take reports for placements of its former life.
        self._placement_ids = itertools.count(time.time_ns() if first_placement_id is None else first_placement_id)
        fleet.listen(self)

    def place(self, request: router_pb2.PlaceRequest) -> router_pb2.PlaceResponse:
        """Places one request and counts it as load. Raises what router.proto says."""
        now = self._clock()
        self.in_flight.expire(now)
        model = self._model(request.model)
        hashes = request.block_hashes  # each look into the message copies them
        _check(request, hashes, model)
        usable = self._snapshots.usable(request, model)
        snapshots = self._snapshots.of(request, hashes, model, usable.views, now)
        asked = self._asked(request, model, usable, now)
        placement_id = next(self._placement_ids)
        traffic = self._learnt.traffic(model, usable.num_decodes, now)
        tenants, sheds = self.in_flight.tenants, self._objectives.sheds
        how_full = self._how_full(model, snapshots, now) if len(tenants) > 1 else 0.0
        options = decide(asked, snapshots, tenants, self._max_queue_depth, placement_id, traffic, sheds, how_full)
        if sheds:
            options = admitted(options, asked, self._learnt.promises, self._objectives, traffic, tenants)
        response = response_of(placement_id, options[0])
        self._begin(placement_id, request, sketch_of(hashes), asked, options[0], now)
        grounds = Grounds(asked, snapshots, usable.refused, placement_id, traffic)
        self.decisions.add(Decision(request, response, now, grounds, options[0]), len(hashes))
        return response

    def report(self, outcome: router_pb2.PlacementOutcome) -> Outcome | None:
        """Ends a placement, here and where else it is known. None: this router did not make it, or forgot it."""
        placed = self.in_flight.end(outcome.placement_id)
        if self._listener is not None:
            self._listener.on_ended(outcome.placement_id)
        if placed is None:
            return None
        decision = self.decisions.get(outcome.placement_id)
        if decision is None:
            return None
        decision.outcome = outcome
        now = self._clock()
        num_tokens = 0 if outcome.worker_failed else outcome.num_output_tokens
        self._learnt.lengths.end(decision.request.model, outcome.placement_id, num_tokens, now)
        if outcome.worker_failed:
            decode = decision.response.decode
            if self._fleet.suspect(decode.worker_id, decode.epoch) and self._listener is not None:
                self._listener.on_suspected(decode.worker_id, decode.epoch)
        else:
            self._learnt.learn(decision, outcome, now)
        return Outcome(decision, decision.chosen.num_cached_tokens, outcome.num_cached_tokens, outcome.worker_failed)

    def on_remote_placement(self, placed: Placed, at: float) -> None:
        """Counts another router's placement."""
        self._learnt.placed(placed.shares, at)

    def on_state(self, view: WorkerView, is_new: bool) -> None:
        """Drops placements that the state includes, and index entries of a former epoch.

        The index may be ahead: after a partition, older states arrive first.
        """
        known = self._index.epoch(view.worker_id) if is_new else None
        if known is not None and known < view.epoch:
            self._index.drop(view.worker_id)
        if is_new:
            self.in_flight.forget_prefixes(view.worker_id)
        self.in_flight.expire(view.received)  # also of workers that receive no placements any more
        self.in_flight.on_state(view.worker_id, view.received)

    def on_lost(self, worker_id: str) -> None:
        """Drops a dead worker's placements."""
        self.in_flight.lose(worker_id)
        self._learnt.lose(worker_id)
        self._adapters.lose(worker_id)

    def on_models(self) -> None:
        """Forgets the rates of models that are not served any more."""
        self._learnt.forget_fleet()
        self._fullness.clear()
        self._snapshots.forget_models()

    def expected_output_tokens(self, model: str, max_tokens: int) -> float:
        """Returns the expected output tokens. max_tokens 0: no limit."""
        return self._learnt.lengths.expected(model, max_tokens)

    def _how_full(self, model: types_pb2.ModelInfo, snapshots: Sequence[WorkerSnapshot], now: float) -> float:
        decoding = [one for one in snapshots if one.view.can_decode]
        recent = self._fullness.setdefault(model.name, RecentFullness())
        return recent.update(fullness(decoding, self._max_queue_depth), now)

    def _asked(self, request: router_pb2.PlaceRequest, model: types_pb2.ModelInfo, usable: Usable, now: float) -> Asked:
        num_output_tokens = self._learnt.lengths.expected(request.model, request.max_tokens)
        part, itl_seconds = 1.0, 0.0
        if not usable.has_prefills:
            # Streams and prompts cannot be kept apart: delays are dealt out by what is felt of them. Where workers
            # for prompts alone stand by, a second is a second.
            part = self._objectives.stream_part(num_output_tokens)
            itl_seconds = self._objectives.itl_seconds
        return Asked(
            model,
            Demand(
                request.num_prompt_tokens,
                num_output_tokens,
                request.adapter,
                part,
                itl_seconds,
                request.num_choices or 1,
            ),
            request.tenant,
            request.tenant_weight or 1.0,
            request.priority,
            request.timeout_ms / 1000,
        )

    def _begin(
        self,
        placement_id: int,
        request: router_pb2.PlaceRequest,
        sketch: Sketch,
        asked: Asked,
        best: Option,
        now: float,
    ) -> None:
        placed = Placed(
            placement_id,
            _shares(best, asked.demand),
            sketch,
            asked.tenant,
            asked.tenant_weight,
            asked.num_tokens,
            asked.priority,
        )
        self.in_flight.begin(placed, now)
        self._learnt.placed(placed.shares, now)
        self._learnt.lengths.begin(request.model, placement_id, now)
        if request.session_id:
            view = best.decode.view
            self._sessions.remember(request.session_id, view.worker_id, view.epoch, sketch, now)
        if request.adapter:
            self._adapters.remember(request.adapter, [share.worker_id for share in placed.shares], now)
        if self._listener is not None:
            self._listener.on_placed(placed)

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


def _check(request: router_pb2.PlaceRequest, hashes: bytes, model: types_pb2.ModelInfo) -> None:
    num_prompt_tokens, longest = request.num_prompt_tokens, model.max_model_len - 1
    # The texts of a model that pools are placed together; workers check the length of each.
    is_too_long = num_prompt_tokens > longest and not model.HasField("pooler")
    if not num_prompt_tokens or is_too_long:
        raise InvalidRequest(
            f"num_prompt_tokens is {num_prompt_tokens}; model {model.name!r} takes 1 to {longest}",
            field="num_prompt_tokens",
        )
    num_hashes, rest = divmod(len(hashes), HASH_BYTES)
    if rest or num_hashes > num_prompt_tokens // model.block_size:
        raise InvalidRequest(
            f"block_hashes has {len(hashes)} bytes; it must be {HASH_BYTES} for each of at most "
            f"{num_prompt_tokens // model.block_size} full blocks of {model.block_size} tokens",
            field="block_hashes",
        )
    if not 0 <= request.tenant_weight < float("inf"):
        raise InvalidRequest(f"tenant_weight is {request.tenant_weight}; it must be above 0", field="tenant_weight")


def _shares(best: Option, demand: Demand) -> tuple[Share, ...]:
    decode, prefill = best.decode, best.prefill
    uncached = demand.num_prompt_tokens - decode.num_cached_tokens
    num_blocks = -(-uncached // max(1, decode.view.block_size))
    if prefill is None:
        return (Share(decode.view.worker_id, demand.num_choices, uncached, num_blocks),)
    uncached_there = demand.num_prompt_tokens - prefill.num_cached_tokens
    return (
        Share(decode.view.worker_id, demand.num_choices, 0, num_blocks),
        Share(prefill.view.worker_id, 0, uncached_there, -(-uncached_there // max(1, prefill.view.block_size))),
    )
