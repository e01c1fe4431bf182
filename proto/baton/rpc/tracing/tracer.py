"""Exports ended spans to an OpenTelemetry collector in batches, in the background.

A span of ten attributes costs about 20 us, serialized when it ends; OpenTelemetry's own SDK took 65 us. If the
collector is too slow, spans are dropped and counted, and no request waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Self, TypeAlias

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.otlp.v1 import trace_pb2 as pb
from baton.rpc.tracing.context import SpanContext, is_context, new_trace, sampled_context
from baton.rpc.tracing.exporters import Endpoint, ExportFailed

_log = logging.getLogger(__name__)

_MAX_WAITING = 8192  # spans; more are dropped
_BATCH = 512
_INTERVAL_SECONDS = 2.0  # or when there is a batch: an export costs as much CPU as 50 spans
_EXPORT_SECONDS = 2.0

SERVER = pb.SPAN_KIND_SERVER
CLIENT = pb.SPAN_KIND_CLIENT
INTERNAL = pb.SPAN_KIND_INTERNAL
Kind: TypeAlias = pb.SpanKind.ValueType

Value = str | int | float | bool


class Tracer:
    """Sends one service's spans for the lifetime of an `async with`. `record` is for the event loop's thread."""

    def __init__(self, endpoint: Endpoint, attributes: Mapping[str, str], sampling: float = 0.0) -> None:
        """Starts without spans.

        `attributes` describe this service; `sampling` is the traced part of requests without a context.
        """
        self._endpoint = endpoint
        self._resource = pb.Resource(attributes=_key_values(attributes))
        self._sampling = sampling
        self._waiting: deque[bytes] = deque()
        self._full = asyncio.Event()  # there is a batch
        self._task: asyncio.Task[None] | None = None
        self._failing = False
        self.num_exported = 0
        self.num_dropped = 0

    async def __aenter__(self) -> Self:
        self._exporter = self._endpoint.exporter()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Sends what is left, for a bounded time."""
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._flush()
        await self._exporter.close()

    def sampled(self, traceparent: str) -> tuple[SpanContext, bytes] | None:
        """Returns a request's span and its parent's id, if the request is traced; an empty id: it is the root."""
        parent = sampled_context(traceparent)
        if parent is not None:
            return parent.child(), parent.span_id
        if is_context(traceparent) or not self._sampling or random.random() >= self._sampling:
            return None
        return new_trace(), b""

    def record(
        self,
        name: str,
        context: SpanContext,
        parent_id: bytes,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Value],
        kind: Kind = INTERNAL,
        error: str = "",
    ) -> None:
        """Takes a span that ended. Times are nanoseconds since 1970; `error` is empty where all went well."""
        if len(self._waiting) >= _MAX_WAITING:
            self.num_dropped += 1
            return
        span = pb.Span(
            trace_id=context.trace_id,
            span_id=context.span_id,
            parent_span_id=parent_id,
            name=name,
            kind=kind,
            start_time_unix_nano=start_ns,
            end_time_unix_nano=max(start_ns, end_ns),
            attributes=_key_values(attributes),
            status=pb.Status(code=pb.STATUS_CODE_ERROR, message=error) if error else None,
        )
        self._waiting.append(span.SerializeToString())
        if len(self._waiting) >= _BATCH:
            self._full.set()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL_SECONDS):
                    await self._full.wait()
            self._full.clear()
            await self._flush()

    async def _flush(self) -> None:
        until = time.monotonic() + _EXPORT_SECONDS
        while self._waiting and (seconds := until - time.monotonic()) > 0:
            spans = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            scope = pb.ScopeSpans(spans=spans)
            request = pb.ExportRequest(resource_spans=[pb.ResourceSpans(resource=self._resource, scope_spans=[scope])])
            try:
                await self._exporter.export(request, seconds)
            except ExportFailed as error:
                self.num_dropped += len(spans)
                self._log_problem(str(error))
                return
            self.num_exported += len(spans)
            self._log_problem("")

    def _log_problem(self, problem: str) -> None:
        """Logs once that the collector fails, and once that it accepts spans again."""
        if problem and not self._failing:
            _log.warning("the collector at %s takes no spans: %s", self._endpoint.address, problem)
        elif self._failing and not problem:
            _log.info(
                "the collector at %s takes spans again; %d were dropped", self._endpoint.address, self.num_dropped
            )
        self._failing = bool(problem)


class TracingCollector(Collector):
    """The Prometheus metrics of tracing. None: this service exports no spans."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer

    def collect(self) -> Iterable[Metric]:
        spans = CounterMetricFamily("baton_tracing_spans", "Spans exported, or dropped.", labels=("result",))
        if self._tracer is not None:
            spans.add_metric(("exported",), self._tracer.num_exported)
            spans.add_metric(("dropped",), self._tracer.num_dropped)
        return (spans,)


@contextlib.asynccontextmanager
async def tracing(url: str, service: str, instance: str, sampling: float = 0.0) -> AsyncIterator[Tracer | None]:
    """Runs the tracer of a service; yields None if `url` is empty."""
    if not url:
        yield None
        return
    attributes = {
        "service.name": f"baton-{service}",
        "service.instance.id": instance,
        "host.name": socket.gethostname(),
    }
    async with Tracer(Endpoint.of(url), attributes, sampling) as tracer:
        yield tracer


def _key_values(attributes: Mapping[str, Value]) -> list[pb.KeyValue]:
    return [pb.KeyValue(key=key, value=_any_value(value)) for key, value in attributes.items()]


def _any_value(value: Value) -> pb.AnyValue:
    if isinstance(value, str):
        return pb.AnyValue(string_value=value)
    if isinstance(value, bool):
        return pb.AnyValue(bool_value=value)
    if isinstance(value, int):
        return pb.AnyValue(int_value=value)
    return pb.AnyValue(double_value=value)
