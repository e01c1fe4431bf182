"""`baton traces`: the display of requests, its timing, and the received spans."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.processes import ports
from support.processes.stack import ROOT, wait_until

from baton.otlp.v1 import trace_pb2 as pb
from baton.rpc.errors import InvalidRequest
from baton.rpc.tracing.context import new_trace, sampled_context
from baton.rpc.tracing.exporters import Endpoint, ExportFailed
from baton.rpc.tracing.tracer import Tracer, TracingCollector
from baton.services import cli
from baton.services.traces.command import Traces
from baton.services.traces.view import Span, render

MS = 1_000_000


def _span(name, span_id, parent_id, start, end, facts=None, error=""):
    return Span(name, "w0", span_id, parent_id, start * MS, end * MS, facts or {}, error)


REQUEST = [
    _span(
        "baton.gateway.request", b"r", b"", 0, 100, {"http.route": "/v1/completions", "http.response.status_code": 200}
    ),
    _span("baton.gateway.generate", b"g", b"r", 10, 100, {"baton.worker": "w0", "baton.cached_tokens": 32}),
    _span("baton.worker.decode", b"d", b"g", 50, 99, {"baton.output_tokens": 7}),
    _span("baton.gateway.prepare", b"p", b"r", 0, 10),
]


def test_a_request_is_a_tree_in_the_order_of_time():
    head, *lines = render("abc", REQUEST).splitlines()
    assert head == "abc  /v1/completions  200  100.0 ms"
    assert [line.split()[0] for line in lines] == ["gateway.prepare", "gateway.generate", "worker.decode"]
    assert lines[2].startswith("    worker.decode")
    assert lines[2].rstrip().endswith("w0, tokens 7")
    assert "found 32" in lines[1]
    prepare, generate = (line.split("|")[1] for line in lines[:2])
    assert prepare == "=" * 4 + " " * 36
    assert generate == " " * 4 + "=" * 36


def test_a_span_whose_parent_never_came_is_shown_all_the_same():
    text = render("abc", [_span("baton.worker.decode", b"d", b"lost", 5, 9, error="gone")])
    assert "has not come" in text
    assert "gone" in text
    assert "x" in text.splitlines()[1]


def test_a_trace_is_shown_once_nothing_more_comes():
    shown, now = [], [0.0]
    traces = Traces(lambda trace_id, spans: shown.append((trace_id, len(spans))), lambda: now[0])
    root, child = (pb.Span(trace_id=b"t" * 16, span_id=b"s" * 8, name=name).SerializeToString()
                   for name in ("baton.gateway.request", "baton.worker.decode"))  # fmt: skip
    for packed in (root, child):
        traces.take(_export(packed))
        traces.settle()
        now[0] += 1.0
    assert not shown
    now[0] += 1.0
    traces.settle()
    assert shown == [((b"t" * 16).hex(), 2)]


def test_a_trace_without_its_request_is_given_up():
    shown, now = [], [0.0]
    traces = Traces(lambda trace_id, spans: shown.append(trace_id), lambda: now[0])
    traces.take(_export(pb.Span(trace_id=b"t" * 16, name="baton.worker.decode").SerializeToString()))
    now[0] = 10.0
    traces.settle()
    assert not shown
    now[0] = 1000.0
    traces.settle()
    assert len(shown) == 1


def test_the_command_shows_a_tracers_spans(tmp_path):
    (port,) = ports.free_ports(1)
    words = [sys.executable, "-m", "baton.services.cli", "traces", "--listen", f"127.0.0.1:{port}"]
    log, file = tmp_path / "shown.txt", tmp_path / "spans.jsonl"
    with log.open("wb") as out:
        shower = subprocess.Popen([*words, "--file", str(file)], stdout=out, stderr=out, cwd=ROOT)
    try:
        wait_until(lambda: "waiting for spans" in log.read_text(), "it listens", 60)
        context = new_trace()
        asyncio.run(_send(f"http://127.0.0.1:{port}", context))
        wait_until(lambda: context.trace_id.hex() in log.read_text(), "the trace is shown", 60)
        assert "worker.decode" in log.read_text()
        names = {json.loads(line)["name"] for line in file.read_text().splitlines()}
        assert names == {"baton.gateway.request", "baton.worker.decode"}
    finally:
        os.kill(shower.pid, signal.SIGTERM)
    assert shower.wait(30) == 0


async def _send(url, context):
    async with Tracer(Endpoint.of(url), {"service.instance.id": "w0"}) as tracer:
        tracer.record(
            "baton.worker.decode", context.child(), context.span_id, 5 * MS, 9 * MS, {"baton.output_tokens": 7}
        )
        tracer.record("baton.gateway.request", context, b"", 0, 10 * MS, {"http.route": "/x", "a": 1.5, "b": True})


async def test_spans_that_no_collector_takes_are_dropped_and_counted():
    (port,) = ports.free_ports(1)
    async with Tracer(Endpoint.of(f"127.0.0.1:{port}"), {}) as tracer:
        for number in range(9000):
            tracer.record("s", new_trace(), b"", number, number, {})
        assert tracer.num_dropped > 0
    samples = [sample for metric in TracingCollector(tracer).collect() for sample in metric.samples]
    assert {sample.labels["result"]: sample.value for sample in samples}["exported"] == 0
    assert tracer.num_dropped > 9000 - 8192


async def test_every_export_has_time_left(monkeypatch):
    now, given = iter(range(100)), []

    class Collector:
        async def export(self, request, seconds):
            given.append(seconds)

        async def close(self):
            pass

    monkeypatch.setattr(Endpoint, "exporter", lambda self: Collector())
    async with Tracer(Endpoint.of("127.0.0.1:1"), {}) as tracer:
        monkeypatch.setattr("baton.rpc.tracing.tracer.time", SimpleNamespace(monotonic=lambda: next(now)))
        for number in range(3000):
            tracer.record("s", new_trace(), b"", number, number, {})
    assert given == [1]  # of two seconds, one passes at each look at the clock


async def test_only_some_requests_are_sampled_and_a_clients_word_is_taken():
    sampled = new_trace().traceparent
    async with (
        Tracer(Endpoint.of("127.0.0.1:1"), {}, sampling=1.0) as always,
        Tracer(Endpoint.of("127.0.0.1:1"), {}) as never,
    ):
        assert always.sampled("")[1] == b""
        assert always.sampled(sampled[:-1] + "0") is None
        assert never.sampled("") is None
        assert never.sampled("garbage") is None
        context, parent_id = never.sampled(sampled)
        assert context.trace_id == sampled_context(sampled).trace_id
        assert parent_id == sampled_context(sampled).span_id


@contextlib.contextmanager
def http_collector(statuses=(), closes=False):
    """A collector of OTLP over HTTP. Yields its URL, its paths and its requests, decoded by OpenTelemetry's code."""
    found, waiting = [], list(statuses)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            found.append((self.path, self.headers["content-type"], ExportTraceServiceRequest.FromString(body)))
            self.send_response(waiting.pop(0) if waiting else 200)
            self.send_header("content-length", "0")
            self.end_headers()
            self.close_connection = closes  # without a word to the client

        def log_message(self, *facts):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", found
        finally:
            server.shutdown()
            thread.join()


async def test_spans_go_to_a_collector_over_http():
    context = new_trace()
    with http_collector() as (url, found):
        await _send(url, context)
    ((path, kind, request),) = found
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    spans = request.resource_spans[0].scope_spans[0].spans
    assert [span.name for span in spans] == ["baton.worker.decode", "baton.gateway.request"]
    assert spans[1].trace_id == context.trace_id


async def test_a_connection_that_the_collector_closed_is_opened_again():
    with http_collector(closes=True) as (url, found):
        exporter = Endpoint.of(url).exporter()
        for _ in range(3):
            await exporter.export(pb.ExportRequest(), 5.0)
        await exporter.close()
    assert len(found) == 3


async def test_an_answer_of_the_collector_other_than_200_is_a_failure():
    with http_collector([503]) as (url, _):
        exporter = Endpoint.of(url).exporter()
        with pytest.raises(ExportFailed, match="status 503"):
            await exporter.export(pb.ExportRequest(), 5.0)
        await exporter.export(pb.ExportRequest(), 5.0)
        await exporter.close()


async def test_a_collector_that_is_not_there_is_a_failure():
    (port,) = ports.free_ports(1)
    exporter = Endpoint.of(f"http://127.0.0.1:{port}/v1/traces").exporter()
    with pytest.raises(ExportFailed, match="Connection refused"):
        await exporter.export(pb.ExportRequest(), 5.0)


@pytest.mark.parametrize("url", ["", "collector", "ftp://h:1", "http://h", "http://user@h:1", "http://h:port"])
def test_an_endpoint_that_is_none_is_named(url):
    with pytest.raises(InvalidRequest, match="otlp_endpoint"):
        Endpoint.of(url)


def test_a_listen_address_that_is_none(capsys):
    assert cli.main(["traces", "--listen", "nowhere"], {}) == 2
    assert "listen" in capsys.readouterr().err


def _export(packed):
    return pb.ExportRequest(resource_spans=[pb.ResourceSpans(scope_spans=[pb.ScopeSpans(spans=[packed])])])
