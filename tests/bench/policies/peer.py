"""The state shared by other systems' policies: live workers, their unfinished placements, and the prefix index."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from baton.router.fleet.worker_view import WorkerView
from baton.rpc.errors import Unavailable
from baton.services.simulate.cluster.policy import RouterParts
from baton.v1 import router_pb2, types_pb2


@dataclass(slots=True)
class Placed:
    """A request that was placed and has not ended."""

    worker_id: str
    num_prompt_tokens: int
    num_uncached_tokens: int
    waits: bool = True  # until its first token


@dataclass(slots=True)
class Load:
    """A worker's load as seen by a router, without its reports."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_waiting_tokens: int = 0  # uncached, of requests without a first token


class Peer(ABC):
    """A policy over live workers. Refuses nothing, because these systems leave that to the engines' queues."""

    uses_index = True

    def __init__(self, parts: RouterParts) -> None:
        self.random = random.Random(parts.seed)
        self.clock = parts.clock
        self._fleet = parts.fleet
        self._index = parts.index
        self._loads: dict[str, Load] = {}
        self._placed: dict[int, Placed] = {}
        self._last_id = 0

    @abstractmethod
    def choose(self, request: router_pb2.PlaceRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """Returns the worker that runs the request."""

    def place(self, request: router_pb2.PlaceRequest) -> router_pb2.PlaceResponse:
        excluded = set(request.excluded_worker_ids)
        views = [view for view in self._fleet.alive() if view.worker_id not in excluded]
        workers = [view for view in views if view.can_decode]
        if not workers:
            raise Unavailable("no live worker decodes")
        decode = self.choose(request, workers)
        cached = self.cached_tokens(request).get(decode.worker_id, 0) if self.uses_index else 0
        prefill = self.choose_prefill(request, decode, views, cached)
        self._last_id += 1
        computes, held = (decode, cached) if prefill is None else prefill
        self._begin(self._last_id, request, decode, computes, held)
        response = router_pb2.PlaceResponse(
            placement_id=self._last_id, decode=endpoint(decode), decode_cached_tokens=cached
        )
        if prefill is not None:
            response.prefill.CopyFrom(endpoint(computes))
            response.prefill_cached_tokens = held
        return response

    def choose_prefill(
        self, request: router_pb2.PlaceRequest, decode: WorkerView, views: Sequence[WorkerView], cached: int
    ) -> tuple[WorkerView, int] | None:
        """Returns the prefill worker, and the tokens cached there. None: the decode worker prefills."""
        return None

    def cached_tokens(self, request: router_pb2.PlaceRequest) -> dict[str, int]:
        """Returns the prompt tokens that each worker has cached."""
        held = self._index.lookup(request.block_hashes)
        sizes = {view.worker_id: view.block_size for view in self._fleet.alive()}
        return {name: blocks * sizes[name] for name, blocks in held.items() if name in sizes}

    def load(self, worker_id: str) -> Load:
        """Returns the load of the worker's unfinished placements."""
        return self._loads.setdefault(worker_id, Load())

    def first_token(self, placement_id: int) -> None:
        placed = self._placed.get(placement_id)
        if placed is not None and placed.waits:
            placed.waits = False
            self.load(placed.worker_id).num_waiting_tokens -= placed.num_uncached_tokens

    def report(self, outcome: router_pb2.PlacementOutcome) -> None:
        self.first_token(outcome.placement_id)
        placed = self._placed.pop(outcome.placement_id, None)
        if placed is not None:
            load = self.load(placed.worker_id)
            load.num_requests -= 1
            load.num_prompt_tokens -= placed.num_prompt_tokens

    def _begin(
        self,
        placement_id: int,
        request: router_pb2.PlaceRequest,
        decode: WorkerView,
        computes: WorkerView,
        cached: int,
    ) -> None:
        uncached = request.num_prompt_tokens - cached
        if computes is not decode:
            # The prefill worker's load has the prompt. One placement ends both.
            uncached = 0
        self._placed[placement_id] = Placed(decode.worker_id, request.num_prompt_tokens, uncached)
        load = self.load(decode.worker_id)
        load.num_requests += 1
        load.num_prompt_tokens += request.num_prompt_tokens
        load.num_waiting_tokens += uncached


def endpoint(view: WorkerView) -> types_pb2.Endpoint:
    """Returns the worker's endpoint for a response."""
    return types_pb2.Endpoint(worker_id=view.worker_id, epoch=view.epoch, address=view.address)
