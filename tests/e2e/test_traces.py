"""Traces of a real stack: the spans of each request, which cover all of its time."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
from support.network.otlp_collector import collecting
from support.processes.stack import MODEL_NAME, start_stack, wait_until

from baton.v1 import inference_pb2, inference_pb2_grpc

_PARTS = {"prepare", "place", "generate"}
_WORKER_PARTS = {"baton.worker.queue", "baton.worker.prefill", "baton.worker.decode"}
_TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
# By OpenTelemetry's conventions, where they have a name.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/pooling"), "embeddings"),
    **dict.fromkeys(("/score", "/v1/score", "/generative_scoring"), "score"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "rerank"),
    "/classify": "classify",
}
_LONG = "Tell me a long story about a dog and a river. " * 12


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    with ExitStack() as cleanup:
        collector = cleanup.enter_context(collecting())
        stack = start_stack(
            tmp_path_factory.mktemp("traces"),
            cleanup,
            extra={"worker": ("--sim-eos-every", "0")},
            executor="sim",
            decode_workers=2,
            otlp_endpoint=collector.address,
        )
        yield stack, collector


def _post(stack, body, path="/v1/completions", **headers):
    """Status, and the whole answer, of a POST with headers of one's own."""
    connection = http.client.HTTPConnection(stack.rest, timeout=60)
    try:
        fields = {"content-type": "application/json", **headers}
        connection.request("POST", path, json.dumps({"model": MODEL_NAME, **body}), fields)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _trace_of(collector, request_id, seconds=20.0):
    """The spans of a client's request, once its root is there and those of the other services."""
    others = {"baton.router.place", "baton.worker.prefill", "baton.worker.decode"}

    def found():
        for spans in collector.traces().values():
            roots = [one for one in spans if one.facts.get("baton.client_request_id") == request_id]
            if roots and others <= {one.name for one in spans}:
                return spans
        return None

    return wait_until(found, f"the trace of {request_id}", seconds)


def _root(spans):
    (root,) = [span for span in spans if span.name == "baton.gateway.request"]
    return root


def _uncovered(root, spans):
    """Nanoseconds of the root's that none of the spans covers."""
    missing, reached = 0, root.start
    for span in sorted(spans, key=lambda span: span.start):
        missing += max(0, min(span.start, root.end) - reached)
        reached = max(reached, min(span.end, root.end))
    return missing + max(0, root.end - reached)


def test_spans_cover_a_requests_whole_time(rig):
    stack, collector = rig
    ids = [f"covered-{number}" for number in range(48)]

    def ask(request_id):
        number = int(request_id.partition("-")[2])
        body = {"prompt": f"{number} {_LONG}", "max_tokens": 2 + number, "stream": number % 2 == 0, "n": 1 + number % 3}
        return _post(stack, body, **{"x-request-id": request_id})[0]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, ids)) == {200}
    total, untold, untold_by_leaves = 0, 0, 0
    for request_id in ids:
        spans = _trace_of(collector, request_id)
        root = _root(spans)
        parents = {span.parent_id for span in spans}
        missing = _uncovered(root, [span for span in spans if span.parent_id == root.span_id])
        assert missing <= 0.01 * (root.end - root.start), (request_id, spans)
        total += root.end - root.start
        untold += missing
        untold_by_leaves += _uncovered(root, [span for span in spans if span.span_id not in parents])
    print(f"{len(ids)} requests: {100 - 100 * untold / total:.3f} % of their time is in a part's span, "
          f"{100 - 100 * untold_by_leaves / total:.2f} % in a span without further parts")  # fmt: skip


def test_every_service_exports_its_spans(rig):
    stack, collector = rig
    status, _ = _post(stack, {"prompt": f"alone {_LONG * 4}", "max_tokens": 9}, **{"x-request-id": "parts"})
    assert status == 200
    spans = _trace_of(collector, "parts")
    root, by_name = _root(spans), {span.name: span for span in spans}
    assert not root.parent_id
    assert {f"baton.gateway.{part}" for part in _PARTS} | {"baton.router.place"} | _WORKER_PARTS <= set(by_name)
    assert {span.service for span in spans} == {"baton-gateway", "baton-router", "baton-worker"}
    place, generate, decode = (
        by_name[f"baton.{name}"] for name in ("gateway.place", "gateway.generate", "worker.decode")
    )
    assert by_name["baton.router.place"].parent_id == place.span_id
    assert all(by_name[name].parent_id == generate.span_id for name in _WORKER_PARTS)
    assert decode.instance == generate.facts["baton.worker"]
    assert by_name["baton.router.place"].facts["baton.decode_worker"] == generate.facts["baton.worker"]
    assert {"baton.predicted_cached_tokens", "baton.cached_tokens", "baton.queue_ms", "baton.preemptions"} <= set(
        generate.facts
    )
    assert root.facts["baton.output_tokens"] == decode.facts["baton.output_tokens"] == 9
    assert root.facts["http.response.status_code"] == 200
    assert root.facts["baton.failovers"] == 0
    assert root.facts["gen_ai.operation.name"] == "text_completion"
    assert root.facts["gen_ai.request.model"] == root.facts["gen_ai.response.model"] == root.facts["baton.model"]
    assert root.facts["gen_ai.usage.input_tokens"] == root.facts["baton.prompt_tokens"]
    assert root.facts["gen_ai.usage.output_tokens"] == 9
    waits = [root.facts[f"gen_ai.latency.{part}"] for part in ("time_in_queue", "time_to_first_token", "e2e")]
    assert waits == sorted(waits)
    assert waits[2] == pytest.approx(root.seconds, abs=1e-3)


def test_spans_have_predicted_and_found_cached_tokens(rig):
    stack, collector = rig
    body = {"prompt": f"twice {_LONG * 2}", "max_tokens": 2}
    _post(stack, body, **{"x-request-id": "first"})
    _trace_of(collector, "first")

    def again():
        name = f"again-{len(collector.spans)}"
        _post(stack, body, **{"x-request-id": name})
        spans = _trace_of(collector, name)
        (generate,) = [span for span in spans if span.name == "baton.gateway.generate"]
        return generate.facts["baton.predicted_cached_tokens"] and generate.facts

    facts = wait_until(again, "the index knows the prompt", 30)
    assert facts["baton.cached_tokens"] == facts["baton.predicted_cached_tokens"] > 0


def test_the_clients_trace_is_continued(rig):
    stack, collector = rig
    sampled, unsampled = (f"00-{_TRACE_ID}-b7ad6b7169203331-0{flag}" for flag in (1, 0))
    assert _post(stack, {"prompt": "Hi", "max_tokens": 3}, traceparent=unsampled, **{"x-request-id": "out"})[0] == 200
    assert _post(stack, {"prompt": "Hi", "max_tokens": 3}, traceparent=sampled, **{"x-request-id": "in"})[0] == 200
    spans = _trace_of(collector, "in")
    assert {span.trace_id for span in spans} == {_TRACE_ID}
    assert _root(spans).parent_id == "b7ad6b7169203331"
    assert not [span for span in collector.spans if span.facts.get("baton.client_request_id") == "out"]


def test_a_refused_request_has_its_status(rig):
    stack, collector = rig
    status, _ = _post(stack, {"prompt": "Hi", "max_tokens": -1}, **{"x-request-id": "refused"})
    assert status == 400

    def refused():
        return [one for one in collector.spans if one.facts.get("baton.client_request_id") == "refused"]

    (root,) = wait_until(refused, "its root", 20)
    assert root.is_error
    assert root.facts["http.response.status_code"] == 400


def test_grpc_requests_are_traced_too(rig):
    stack, collector = rig
    with grpc.insecure_channel(stack.config.grpc_listen) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(model=MODEL_NAME, text="Hi there", request_id="by-grpc")
        request.stop.max_tokens = 4
        parent = f"00-{'5' * 32}-b7ad6b7169203331-01"
        assert list(stub.Generate(request, metadata=(("traceparent", parent),), timeout=30))

    def complete():
        spans = collector.traces().get("5" * 32, [])
        names = {span.name for span in spans}
        return spans if {"baton.gateway.request", "baton.worker.decode", "baton.router.place"} <= names else None

    root = _root(wait_until(complete, "the trace of a gRPC request", 20))
    assert (root.facts["rpc.method"], root.facts["rpc.grpc.status"]) == ("Generate", "OK")
    assert root.parent_id == "b7ad6b7169203331"


def test_a_failover_has_a_span_and_leaves_no_gap(rig):
    """Kills a worker: the last test of this file."""
    stack, collector = rig
    body = {"prompt": f"fails over {_LONG}", "max_tokens": 400}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(_post, stack, body, **{"x-request-id": "moved"})

        def running():
            return [one for one in stack.workers if one.plan.name != "worker prefill-0" and _is_busy(stack, one)]

        (worker, *_) = wait_until(running, "a worker decodes it", 30)
        worker.kill()
        assert answer.result(60)[0] == 200
    spans = _trace_of(collector, "moved")
    root = _root(spans)
    assert root.facts["baton.failovers"] == 1
    lost, kept = sorted((span for span in spans if span.name == "baton.gateway.generate"), key=lambda span: span.start)
    assert (lost.is_error, kept.is_error) == (True, False)
    assert lost.facts["baton.worker"] != kept.facts["baton.worker"]
    assert lost.facts["baton.output_tokens"] + kept.facts["baton.output_tokens"] == 400
    parts = [span for span in spans if span.parent_id == root.span_id]
    assert _uncovered(root, parts) <= 0.01 * (root.end - root.start)


def _is_busy(stack, worker):
    return stack.stats(worker).state.load.num_running > 0


def test_operations_have_their_names(rig):
    stack, collector = rig
    for path in _OPERATIONS:
        _post(stack, {"prompt": 1.5}, path, **{"x-request-id": "named"})  # refused, and traced

    def found():
        roots = [span for span in collector.spans if span.facts.get("baton.client_request_id") == "named"]
        return len(roots) == len(_OPERATIONS) and roots

    roots = wait_until(found, "a trace of each route", 30)
    assert {one.facts["http.route"]: one.facts["gen_ai.operation.name"] for one in roots} == _OPERATIONS
