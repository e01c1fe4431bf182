"""The last placements, to be asked for afterwards. Bounded by number and by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.router.placement.answer import evidence_of, response_of
from baton.router.placement.decision import Asked, candidates
from baton.router.placement.policy import Option
from baton.router.placement.worker_snapshot import Traffic, WorkerSnapshot
from baton.rpc.errors import NotFound
from baton.v1 import router_pb2

_MAX_BYTES = 32 << 20
_BYTES_PER_SNAPSHOT = 300


class Grounds(NamedTuple):
    """All that a decision was made upon; it can be made again from this."""

    asked: Asked
    snapshots: Sequence[WorkerSnapshot]
    refused: Mapping[str, str]  # worker id -> why
    rotation: int
    traffic: Traffic


@dataclass(slots=True)
class Decision:
    """One placement: what was asked, answered, and reported, and what it was decided upon."""

    request: router_pb2.PlaceRequest
    response: router_pb2.PlaceResponse
    placed: float  # monotonic seconds
    grounds: Grounds
    chosen: Option
    num_bytes: int = 0
    outcome: router_pb2.PlacementOutcome | None = None


class Decisions:
    """A ring of decisions; the oldest goes first."""

    def __init__(self, capacity: int, max_bytes: int = _MAX_BYTES) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_placement: OrderedDict[int, Decision] = OrderedDict()
        self._by_request: dict[str, int] = {}  # the request's last placement

    def __len__(self) -> int:
        return len(self._by_placement)

    def add(self, decision: Decision, num_hash_bytes: int) -> None:
        """Keeps a decision, whose request has `num_hash_bytes` of block hashes."""
        request, placement_id = decision.request, decision.response.placement_id
        decision.num_bytes = num_hash_bytes + 1000 + _BYTES_PER_SNAPSHOT * len(decision.grounds.snapshots)
        self._by_placement[placement_id] = decision
        self._by_request[request.request_id] = placement_id
        self._num_bytes += decision.num_bytes
        while len(self._by_placement) > self._capacity or self._num_bytes > self._max_bytes:
            placement_id, oldest = self._by_placement.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
            if self._by_request.get(oldest.request.request_id) == placement_id:
                del self._by_request[oldest.request.request_id]

    def get(self, placement_id: int) -> Decision | None:
        """Returns a placement's decision, or None if it is not kept."""
        return self._by_placement.get(placement_id)

    def last_of(self, request_id: str) -> Decision | None:
        """Returns a request's last decision, or None if it is not kept."""
        placement_id = self._by_request.get(request_id)
        return self._by_placement.get(placement_id) if placement_id is not None else None

    def explain(self, request: router_pb2.ExplainRequest) -> router_pb2.ExplainResponse:
        """Returns the response to an ExplainRequest. Raises NotFound if the placement is unknown or too old."""
        if request.WhichOneof("placement") == "request_id":
            decision, wanted = self.last_of(request.request_id), f"request {request.request_id!r}"
        else:
            decision, wanted = self.get(request.placement_id), f"placement {request.placement_id}"
        if decision is None:
            raise NotFound(f"{wanted} is unknown, or too old: the last {len(self)} placements are kept")
        return _explained(decision)


def _explained(decision: Decision) -> router_pb2.ExplainResponse:
    grounds = decision.grounds
    options = candidates(grounds.asked, grounds.snapshots, grounds.rotation, grounds.traffic)
    others = [option for option in options if option != decision.chosen]
    return router_pb2.ExplainResponse(
        request=decision.request,
        response=response_of(decision.response.placement_id, decision.chosen, [decision.chosen, *others]),
        outcome=decision.outcome,
        evidence=evidence_of(grounds.snapshots, grounds.refused, decision.placed),
        expected_output_tokens=grounds.asked.demand.num_output_tokens,
    )
