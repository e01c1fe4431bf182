"""`baton traces`: a collector for one terminal. Services export to it; each request is shown when it is complete."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from baton.otlp.v1 import trace_pb2 as pb
from baton.rpc.address import split_address
from baton.services import settings
from baton.services.process.signals import watch_signals
from baton.services.traces.view import Span, render, root_of

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_MISUSED = 2

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_SETTLE_SECONDS = 1.5  # after a trace's last span; services export twice a second
_TICK_SECONDS = 0.25
_FORGET_SECONDS = 300.0
_MAX_SPANS = 200_000  # of traces that are not complete


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """The settings of `baton traces`."""

    listen: str = field(
        default="127.0.0.1:4317",
        metadata={"help": "Address to which services send spans: OTLP over gRPC, plain text.", "metavar": "HOST:PORT"},
    )
    least_ms: float = field(
        default=0.0, metadata={"help": "Requests that took less are not shown.", "minimum": 0.0, "metavar": "MS"}
    )
    file: str = field(
        default="", metadata={"help": "File to which every span is appended as a JSON line. Empty: none."}
    )

    def validate(self) -> None:
        """Raises InvalidRequest for an address that is none."""
        split_address(self.listen, "listen")


class Traces:
    """Spans of traces that are not complete. `show` is called with each that is."""

    def __init__(self, show: Callable[[str, list[Span]], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._clock = clock
        self._waiting: dict[str, tuple[float, list[Span]]] = {}  # time of the last span, by trace
        self._num_spans = 0

    def take(self, request: pb.ExportRequest) -> list[tuple[str, Span]]:
        """Takes received spans and returns them."""
        taken = []
        for resource in request.resource_spans:
            instance = str(_facts(resource.resource.attributes).get("service.instance.id", ""))
            for scope in resource.scope_spans:
                taken += [_span(pb.Span.FromString(packed), instance) for packed in scope.spans]
        now = self._clock()
        for trace_id, span in taken:
            _, spans = self._waiting.pop(trace_id, (now, []))
            self._waiting[trace_id] = (now, [*spans, span])
        self._num_spans += len(taken)
        return taken

    def settle(self) -> None:
        """Shows traces that are complete or overdue. Call it regularly."""
        now = self._clock()
        for trace_id, (since, spans) in list(self._waiting.items()):
            complete = root_of(spans) is not None and now - since >= _SETTLE_SECONDS
            if complete or now - since >= _FORGET_SECONDS or self._num_spans > _MAX_SPANS:
                del self._waiting[trace_id]
                self._num_spans -= len(spans)
                self._show(trace_id, spans)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Shows traces until Ctrl-C. Returns the process's exit code."""
    about = "Shows each traced request when it is complete. Services: --otlp-endpoint http://HOST:PORT."
    try:
        (config,) = settings.load("traces", (TracesConfig,), argv, environ, about)
        _append(config.file, [])
    except settings.SettingsError as error:
        print(f"baton traces: {error}", file=sys.stderr)
        return EXIT_MISUSED
    except OSError as error:
        print(f"baton traces: --file: {error}", file=sys.stderr)
        return EXIT_FAILED
    return asyncio.run(_serve(config))


async def _serve(config: TracesConfig) -> int:
    stop = asyncio.Event()
    watch_signals(stop, lambda _: None)

    def show(trace_id: str, spans: list[Span]) -> None:
        root = root_of(spans)
        if root is None or (root.end - root.start) / 1e6 >= config.least_ms:
            print(render(trace_id, spans), flush=True)

    traces = Traces(show)

    async def export(request: pb.ExportRequest, context: Any) -> bytes:
        _append(config.file, traces.take(request))
        return b""

    server = grpc.aio.server()
    handler: Any = grpc.unary_unary_rpc_method_handler(export, request_deserializer=pb.ExportRequest.FromString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler}),))
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError:
        print(f"baton traces: --listen {config.listen}: nothing can listen there; give another", file=sys.stderr)
        return EXIT_FAILED
    await server.start()
    host, _ = split_address(config.listen, "listen")
    print(f"waiting for spans at http://{host}:{port}; Ctrl-C ends", flush=True)
    while not stop.is_set():
        traces.settle()
        try:
            await asyncio.wait_for(stop.wait(), _TICK_SECONDS)
        except TimeoutError:
            continue
    await server.stop(0)
    return EXIT_OK


def _append(path: str, taken: Sequence[tuple[str, Span]]) -> None:
    """Writes a line for each span. Raises OSError."""
    if path:
        lines = [json.dumps({"trace_id": trace_id, **_document(span)}) + "\n" for trace_id, span in taken]
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(lines)


def _document(span: Span) -> dict[str, Any]:
    return {**asdict(span), "span_id": span.span_id.hex(), "parent_id": span.parent_id.hex()}


def _span(span: pb.Span, instance: str) -> tuple[str, Span]:
    error = ""
    if span.status.code == pb.STATUS_CODE_ERROR:
        error = span.status.message or "error"
    made = Span(
        name=span.name,
        instance=instance,
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        facts=_facts(span.attributes),
        error=error,
    )
    return span.trace_id.hex(), made


def _facts(attributes: Any) -> dict[str, Any]:
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        if kind is not None:
            found[one.key] = getattr(one.value, kind)
    return found
