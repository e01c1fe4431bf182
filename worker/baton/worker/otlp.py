"""Spans of the engine, exported over OTLP by threads of the SDK's own. Imports OpenTelemetry when it is used."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from baton.rpc.errors import Unsupported

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_log = logging.getLogger(__name__)

_FLUSH_MS = 2000


class SpanExporter:
    """Sends to the collector at `endpoint`: OTLP over gRPC, plain unless it begins with https://."""

    def __init__(self, endpoint: str, worker_id: str, model_name: str) -> None:
        """Raises Unsupported where OpenTelemetry is not installed."""
        try:
            self._provider = _provider(endpoint, worker_id, model_name)
        except ImportError as error:
            raise Unsupported(
                f"otlp_endpoint={endpoint} needs OpenTelemetry, which is not installed ({error.name}): "
                "pip install 'baton-inference[otel]'",
                field="otlp_endpoint",
            ) from error
        self._tracer = self._provider.get_tracer("baton.worker")

    def on_span(self, channel: int, payload: bytes) -> None:
        """A SPAN frame of the engine."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span: dict[str, Any] = json.loads(payload)
        parent = TraceContextTextMapPropagator().extract({"traceparent": span["traceparent"]})
        started = self._tracer.start_span(
            span["name"], context=parent, start_time=span["start_ns"], attributes=span["attributes"]
        )
        started.end(end_time=span["end_ns"])

    def close(self) -> None:
        """Sends what is left, for a bounded time. Idempotent."""
        if not self._provider.force_flush(_FLUSH_MS):
            _log.warning("spans are left that no collector took")
        self._provider.shutdown()


def _provider(endpoint: str, worker_id: str, model_name: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource(
        {"service.name": "baton-worker", "service.instance.id": worker_id, "baton.model_name": model_name}
    )
    # Whether a request is traced was decided by whoever sent its trace context.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=2)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    return provider
