"""An OTLP collector that records spans, decoded by OpenTelemetry's generated code."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """A span. Times are in nanoseconds."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    facts: dict[str, Any]
    is_error: bool

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """All exported spans."""

    address: str = ""
    spans: list[Span] = field(default_factory=list)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            of = attributes_of(resource.resource)
            self.spans += [_span(of, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def traces(self) -> dict[str, list[Span]]:
        """Returns the spans by trace id."""
        found: dict[str, list[Span]] = {}
        for span in list(self.spans):
            found.setdefault(span.trace_id, []).append(span)
        return found


def attributes_of(carrier: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in carrier.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs the collector within a `with` statement."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    made = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    made.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield made
    finally:
        server.stop(0).wait()


def _span(of: dict[str, Any], span: Any) -> Span:
    return Span(
        name=span.name,
        service=of.get("service.name", ""),
        instance=of.get("service.instance.id", ""),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        facts=attributes_of(span),
        is_error=span.status.code == 2,
    )
