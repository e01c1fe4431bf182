"""Measures the CPU of one exported span: Baton's tracer, and OpenTelemetry's SDK with its exporters.

baton bench otlp [--spans 20000] [--rounds 5] [--json FILE]

The collector answers in a process of its own and reads nothing. Needs opentelemetry-sdk, and the packages
opentelemetry-exporter-otlp-proto-grpc and -http.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc

from baton.rpc.tracing.context import new_trace
from baton.rpc.tracing.exporters import Endpoint
from baton.rpc.tracing.tracer import Tracer
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json

_ATTRIBUTES: dict[str, str | int | float] = {
    "baton.request_id": "cmpl-0123456789abcdef",
    "baton.model": "storyteller-7m",
    "baton.tenant": "tenant",
    "baton.worker": "127.0.0.1-8100",
    "baton.prompt_tokens": 1234,
    "baton.output_tokens": 128,
    "baton.cached_tokens": 1024,
    "baton.queue_ms": 0.25,
    "baton.prefill_ms": 17.5,
    "http.route": "/v1/completions",
}
_BATCH = 512  # spans that both sides send together
_PAUSE_SPANS = 4096  # both queues hold more


class _Collector(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *facts: object) -> None:
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="baton bench otlp", description=__doc__.splitlines()[0])
    parser.add_argument("--spans", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    reader = multiprocessing.get_context("spawn").SimpleQueue()  # type: ignore[var-annotated]
    collector = multiprocessing.get_context("spawn").Process(target=_collect, args=(reader,), daemon=True)
    collector.start()
    rpc, web = reader.get()
    kinds: dict[str, Callable[[int], float]] = {
        "Baton, gRPC": lambda count: asyncio.run(_ours(f"http://127.0.0.1:{rpc}", count)),
        "OpenTelemetry, gRPC": lambda count: _theirs(_grpc_exporter(rpc), count),
        "Baton, HTTP": lambda count: asyncio.run(_ours(f"http://127.0.0.1:{web}/v1/traces", count)),
        "OpenTelemetry, HTTP": lambda count: _theirs(_http_exporter(web), count),
    }
    costs: dict[str, list[float]] = {name: [] for name in kinds}
    for round_number in range(options.rounds + 1):
        for name, run in kinds.items():
            cost = 1e6 * run(options.spans) / options.spans
            if round_number:  # the first one warms up
                costs[name].append(cost)
    collector.terminate()
    print(facts_line(machine_facts(("grpcio", "protobuf", "opentelemetry-sdk"))))
    rows = [[name, f"{median(found):.1f}", f"{min(found):.1f} to {max(found):.1f}"] for name, found in costs.items()]
    print(render_table(("exporter", "us CPU a span", "rounds"), rows, markdown=True))
    write_json(options.json, costs)
    return 0


async def _ours(url: str, count: int) -> float:
    async with Tracer(Endpoint.of(url), {"service.name": "bench"}) as tracer:
        began = time.process_time()
        for number in range(count):
            now = time.time_ns()
            tracer.record("baton.gateway.request", new_trace(), b"12345678", now, now, _ATTRIBUTES)
            if number % _PAUSE_SPANS == 0:
                await _exported(tracer, number - _BATCH)
        await _exported(tracer, count - _BATCH)
    assert not tracer.num_dropped
    return time.process_time() - began


async def _exported(tracer: Tracer, count: int) -> None:
    while tracer.num_exported < count:  # noqa: ASYNC110 - a tracer signals no export
        await asyncio.sleep(0.005)


def _theirs(exporter: Any, count: int) -> float:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource({"service.name": "bench"}))
    processor = BatchSpanProcessor(exporter, max_queue_size=1 << 16, max_export_batch_size=_BATCH)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("bench")
    began = time.process_time()
    for number in range(count):
        span = tracer.start_span("baton.gateway.request", attributes=_ATTRIBUTES)
        span.end()
        if number % _PAUSE_SPANS == 0:
            processor.force_flush()
    processor.force_flush()
    cost = time.process_time() - began
    provider.shutdown()
    return cost


def _grpc_exporter(port: int) -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(f"http://127.0.0.1:{port}", insecure=True)


def _http_exporter(port: int) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(f"http://127.0.0.1:{port}/v1/traces")


def _collect(ports: Any) -> None:
    handler = grpc.method_handlers_generic_handler(
        "opentelemetry.proto.collector.trace.v1.TraceService",
        {"Export": grpc.unary_unary_rpc_method_handler(lambda request, context: b"")},
    )
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=(handler,), options=(("grpc.so_reuseport", 0),))
    rpc = server.add_insecure_port("127.0.0.1:0")
    server.start()
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    ports.put((rpc, web.server_address[1]))
    web.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
