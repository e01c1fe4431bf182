"""Spans of traced requests: those of a hand-over between two workers, and data that is never exported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from support.engine.engine_harness import make_request
from support.fleet.kvstore_node import eventually
from support.processes import ports
from support.processes.worker_harness import running_worker, submit

from baton.v1 import control_pb2, types_pb2
from baton.worker.core import FinishReason
from baton.worker.executors.sim.adapters import digest_of
from baton.worker.process.spans import SpanSender, is_sampled
from baton.worker.requests.outputs import Finish

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = f"00-{TRACE_ID}-{SPAN_ID}-01"


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that records spans."""

    address: str = ""
    spans: list[tuple[dict[str, Any], Any]] = field(default_factory=list)  # the resource's attributes, and the span

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            of = attributes_of(resource.resource)
            self.spans += [(of, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Any]:
        return [span for _, span in self.spans if span.name == name]


def attributes_of(carrier: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in carrier.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    made = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    made.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made
    server.stop(0).wait()


async def test_a_traced_request_has_a_span_of_each_part(collector: Collector) -> None:
    first, second = ports.free_ports(2)
    traced = {"otlp_endpoint": collector.address}
    prompt = [5 + i % 900 for i in range(300)]
    async with (
        running_worker(first, role="prefill", worker_id="p", **traced) as prefill,
        running_worker(second, role="decode", worker_id="d", **traced) as decode,
    ):
        endpoint = types_pb2.Endpoint(worker_id="p", epoch=1, address=prefill.address)
        await decode.stream().generate(
            submit(1, prompt, 5, prefill=endpoint, traceparent=TRACED),
            submit(2, prompt[::-1], 5, prefill=endpoint),
        )
        await prefill.until_idle()
    # Whoever stops sends what it has first.
    spans = {span.name: (attributes_of(span), resource, span) for resource, span in collector.spans}
    assert sorted(spans) == [f"baton.worker.{part}" for part in ("decode", "prefill", "queue", "transfer")]
    assert len(collector.spans) == 5, "the request without a trace context has none; both workers have a queue"
    for attributes, _, span in spans.values():
        assert span.trace_id.hex() == TRACE_ID
        assert span.parent_span_id.hex() == SPAN_ID
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        assert attributes["baton.request_id"] == "r1"
    transfer, of_transfer, _ = spans["baton.worker.transfer"]
    assert of_transfer["service.instance.id"] == "d"
    assert transfer["baton.bytes"] == 19 * 16 * 8 * 2
    assert transfer["baton.retries"] == 0
    assert transfer["baton.exposed_ms"] >= 0
    assert transfer["baton.until_launch_ms"] > 0
    assert transfer["baton.gigabytes_per_second"] > 0
    assert transfer["baton.transport"]
    prefilled, of_prefill, prefill_span = spans["baton.worker.prefill"]
    assert of_prefill["service.instance.id"] == "p"
    assert prefilled["baton.prompt_tokens"] == 300
    decoded, _, decode_span = spans["baton.worker.decode"]
    assert (decoded["baton.output_tokens"], decoded["baton.transferred_tokens"]) == (5, 300)
    assert prefill_span.start_time_unix_nano <= decode_span.end_time_unix_nano


async def test_a_prompt_computed_where_it_is_decoded_has_its_prefill_there(collector: Collector) -> None:
    (port,) = ports.free_ports(1)
    async with running_worker(port, otlp_endpoint=collector.address) as worker:
        await worker.stream().generate(submit(1, [5, 6, 7] * 30, 4, traceparent=TRACED))
        await eventually(lambda: collector.named("baton.worker.decode"), "what the worker sends every few seconds")
    assert len(collector.named("baton.worker.decode")) == 1
    (prefill,) = collector.named("baton.worker.prefill")
    assert attributes_of(prefill)["baton.remote"] is False


async def test_a_failed_request_has_a_span_with_the_error(collector: Collector, free_port: int) -> None:
    constraint = types_pb2.Constraint(regex="secret")  # of a model whose folder has no tokenizer
    async with running_worker(free_port, otlp_endpoint=collector.address) as worker:
        asked = submit(1, [5, 6, 7] * 30, 4, traceparent=TRACED, constraint=constraint)
        slots = await worker.stream().generate(asked, submit(2, [5, 6, 7], 4, constraint=constraint))
        assert slots[0].failure is not None
        await eventually(lambda: collector.spans, "what the worker sends every few seconds")
    ((_, span),) = collector.spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("baton.worker.failed", TRACE_ID, SPAN_ID)
    assert span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert span.status.message == "INVALID_ARGUMENT in model", "and nothing of what was asked for"
    attributes = attributes_of(span)
    assert (attributes["baton.request_id"], attributes["baton.prompt_tokens"]) == ("r1", 90)
    assert attributes["baton.output_tokens"] == 0


async def test_a_collector_that_is_not_there_costs_no_request(free_port: int) -> None:
    (dead,) = ports.free_ports(1)
    async with running_worker(free_port, otlp_endpoint=f"http://127.0.0.1:{dead}") as worker:
        slots = await worker.stream().generate(submit(1, [5, 6, 7] * 30, 4, traceparent=TRACED))
        assert len(slots[0].tokens) == 4


@pytest.mark.parametrize(
    ("traceparent", "sampled"),
    [
        (TRACED, True),
        (TRACED[:-1] + "0", False),
        (TRACED[:-1] + "3", True),
        (TRACED.replace("00-", "01-", 1) + "-what-comes-later", True),
        (TRACED + "-what-comes-later", False),
        (f"00-{'0' * 32}-{SPAN_ID}-01", False),
        ("", False),
        ("garbage", False),
        (TRACED.upper(), False),
    ],
)
def test_only_sampled_trace_contexts_have_spans(traceparent: str, sampled: bool) -> None:
    assert is_sampled(traceparent) is sampled


@pytest.mark.parametrize("num_drafts", [0, 12])
def test_a_decode_span_counts_the_drafts_of_a_request_that_had_some(num_drafts: int) -> None:
    sent: list[bytes] = []
    sender = SpanSender(lambda kind, channel, payload: sent.append(payload))
    finish = Finish(
        make_request([1, 2, 3], traceparent=TRACED),
        FinishReason.LENGTH,
        num_draft_tokens=num_drafts,
        num_accepted_tokens=num_drafts // 2,
    )
    sender.finished([finish])
    _, spans = json.loads(sent[0])
    counts = {key: value for key, value in spans[-1][3].items() if key.endswith(("draft_tokens", "accepted_tokens"))}
    assert counts == ({"baton.draft_tokens": 12, "baton.accepted_tokens": 6} if num_drafts else {})


def test_a_spans_wall_time_matches_its_monotonic_time() -> None:
    sent: list[bytes] = []
    sender = SpanSender(lambda kind, channel, payload: sent.append(payload), lambda: 110.0, lambda: 5_000_000_000_000)
    request = make_request([1, 2, 3], traceparent=TRACED, arrival=100.0)
    sender.finished([Finish(request, FinishReason.LENGTH, queue_seconds=1.0, prefill_seconds=2.0)])
    (traceparent, spans), *others = map(json.loads, sent)
    assert not others
    assert traceparent == TRACED
    assert [(name.removeprefix("baton.worker."), start, end) for name, start, end, *_ in spans] == [
        ("queue", 4_990_000_000_000, 4_991_000_000_000),
        ("prefill", 4_991_000_000_000, 4_993_000_000_000),
        ("decode", 4_993_000_000_000, 5_000_000_000_000),
    ]


async def test_a_request_that_waits_for_its_adapter_has_a_span_of_it(collector: Collector, free_port: int) -> None:
    settings = {"enable_lora": True, "lora_folders": ("/adapters",), "max_loras": 1, "sim_slowness": 1.0}
    async with running_worker(free_port, otlp_endpoint=collector.address, **settings) as worker:
        loads = [control_pb2.LoadAdapterRequest(name=name, path=f"/adapters/{name}") for name in ("poet", "judge")]
        infos = [(await worker.control.LoadAdapter(one)).adapter for one in loads]
        fresh = types_pb2.AdapterInfo(name="fresh", path="/adapters/fresh", digest=digest_of("/adapters/fresh"))
        for slot, info in enumerate((*infos, fresh)):
            request = submit(slot, [5, 6, 7], 2, adapter=info.name, adapter_info=info, traceparent=TRACED)
            (answer,) = await worker.stream().generate(request)
            assert answer.failure is None
    await eventually(lambda: len(collector.named("baton.worker.decode")) == 3, "all spans are exported")
    found = {attributes_of(span)["baton.adapter"]: span for span in collector.named("baton.worker.adapter")}
    assert attributes_of(found["fresh"])["baton.adapter_source"] == "files"
    assert attributes_of(found["fresh"])["baton.adapter_read_ms"] >= 50
    seconds = (found["fresh"].end_time_unix_nano - found["fresh"].start_time_unix_nano) * 1e-9
    assert seconds >= 0.05
    for name in found.keys() - {"fresh"}:
        assert attributes_of(found[name])["baton.adapter_source"] == "host_memory"
        assert attributes_of(found[name])["baton.adapter_read_ms"] == 0
    queues = {span.trace_id + span.parent_span_id for span in collector.named("baton.worker.queue")}
    assert {span.trace_id + span.parent_span_id for span in found.values()} == queues, "children of the caller's span"
