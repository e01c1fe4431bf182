"""One span a placement of a traced request: what was chosen, what it is expected to cost, and why it was refused."""

from __future__ import annotations

import time

from baton.router.placement.explain import Decision
from baton.rpc.tracing.context import sampled_context
from baton.rpc.tracing.tracer import SERVER, Tracer, Value
from baton.v1 import router_pb2

_NAME = "baton.router.place"


class PlacementSpans:
    """Used by the event loop only."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def placed(self, request: router_pb2.PlaceRequest, seconds: float, decision: Decision | None) -> None:
        """Records a span for a placement that took `seconds`. Does nothing if the decision is not kept."""
        self._record(request, seconds, {} if decision is None else _facts(decision))

    def refused(self, request: router_pb2.PlaceRequest, seconds: float, reason: str) -> None:
        """Records a span for a refused placement."""
        self._record(request, seconds, {}, reason)

    def _record(
        self, request: router_pb2.PlaceRequest, seconds: float, facts: dict[str, Value], error: str = ""
    ) -> None:
        parent = sampled_context(request.traceparent) if request.traceparent else None
        if parent is None:
            return
        now = time.time_ns()
        facts["baton.request_id"] = request.request_id
        began = now - round(seconds * 1e9)
        self._tracer.record(_NAME, parent.child(), parent.span_id, began, now, facts, SERVER, error)


def _facts(decision: Decision) -> dict[str, Value]:
    """Returns the predicted costs in seconds of added delay, by Explain's names."""
    chosen, response = decision.chosen, decision.response
    block_size = max(1, chosen.decode.view.block_size)
    facts: dict[str, Value] = {
        "baton.placement_id": response.placement_id,
        "baton.decode_worker": response.decode.worker_id,
        "baton.prefill_worker": response.prefill.worker_id,
        "baton.predicted_cached_blocks": chosen.num_cached_tokens // block_size,
        "baton.workers_considered": len(decision.grounds.snapshots),
        "baton.workers_refused": len(decision.grounds.refused),
        "baton.cost_ms": chosen.total * 1e3,
    }
    for name, seconds in chosen.costs._asdict().items():
        if seconds:
            facts[f"baton.cost_{name}_ms"] = seconds * 1e3
    return facts
