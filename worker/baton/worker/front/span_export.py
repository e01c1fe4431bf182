"""Exports the engine's spans through the service's tracer."""

from __future__ import annotations

import json

from baton.rpc.tracing.context import sampled_context
from baton.rpc.tracing.tracer import Tracer


def export_spans(tracer: Tracer, payload: bytes) -> None:
    """Exports a SPAN frame: each of its spans is a child of the caller's."""
    traceparent, spans = json.loads(payload)
    parent = sampled_context(traceparent)
    if parent is None:
        return
    for name, start_ns, end_ns, attributes, error in spans:
        tracer.record(name, parent.child(), parent.span_id, start_ns, end_ns, attributes, error=error)
