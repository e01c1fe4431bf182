"""Traces requests from their start to their end: HTTP exchanges and gRPC calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc

from baton.gateway.http.exchange import Exchange
from baton.gateway.tracing.request import GatewayTracing
from baton.rpc.tracing.tracer import Value

# By route, of OpenTelemetry's conventions where they have a name; others are conversations.
_OPERATIONS = {
    **dict.fromkeys(("/v1/completions", "/inference/v1/generate"), "text_completion"),
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/pooling"), "embeddings"),
    **dict.fromkeys(("/score", "/v1/score", "/generative_scoring"), "score"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "rerank"),
    "/classify": "classify",
}
_HEADER = b"traceparent"


def trace_exchange(tracing: GatewayTracing, exchange: Exchange, route: str) -> None:
    """Traces an exchange from its headers to its last byte.

    Passes the trace to generations in its traceparent header.
    """
    began_ns = time.time_ns() - round(exchange.age * 1e9)
    trace = tracing.begin(exchange.headers.get(_HEADER, b"").decode("latin-1"), began_ns)
    if trace is None:
        return
    exchange.headers = {**exchange.headers, _HEADER: trace.context.traceparent.encode()}

    def end(ended: Exchange) -> None:
        facts: dict[str, Value] = {
            "http.route": route,
            "http.request.method": ended.method,
            "http.response.status_code": ended.status,
            "baton.client_request_id": ended.request_id,
            "gen_ai.operation.name": _OPERATIONS.get(route, "chat"),
        }
        tracing.end(trace, facts, f"status {ended.status}" if ended.status >= 400 else "")

    exchange.on_end.append(end)


def trace_call(
    tracing: GatewayTracing | None, context: grpc.aio.ServicerContext[Any, Any], method: str, outcome: Callable[[], str]
) -> str:
    """Traces a call until its end. Returns the traceparent for its generations. `outcome` returns the final status."""
    given = traceparent_of(context)
    trace = tracing.begin(given, time.time_ns()) if tracing is not None else None
    if tracing is None or trace is None:
        return given

    def end(_: object) -> None:
        name = outcome()
        facts: dict[str, Value] = {"rpc.system": "grpc", "rpc.method": method, "rpc.grpc.status": name}
        tracing.end(trace, facts, "" if name == "OK" else name)

    context.add_done_callback(end)  # type: ignore[arg-type]
    return trace.context.traceparent


def traceparent_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Returns a call's traceparent, or an empty text."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""
