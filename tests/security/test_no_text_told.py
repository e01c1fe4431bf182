"""Prompts, keys and outputs stay out of logs, traces, metrics and other clients' errors, at log level debug."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from support.gateway.access_rig import key_file
from support.processes.stack import MODEL_NAME, Stack, start_stack, wait_until

from baton.v1 import inference_pb2
from baton.v1.inference_pb2_grpc import InferenceServiceStub

TRACED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MARK = "zqx"  # what every marker begins with; no other text has it
FORCED = {"structured_outputs": {"choice": [f"{MARK}output"]}, "max_tokens": 40}


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps all that it gets, as text."""

    address: str = ""
    texts: list[str] = field(default_factory=list)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.texts.append(str(request))
        return trace_service_pb2.ExportTraceServiceResponse()


@dataclass
class Rig:
    """A stack with keys, its collector, and every marker that was sent."""

    stack: Stack
    collector: Collector
    key: str
    other_key: str
    markers: set[str] = field(default_factory=set)
    errors: list[tuple[int, str]] = field(default_factory=list)

    def mark(self, where: str) -> str:
        marker = f"{MARK}{where}"
        self.markers.add(marker)
        return marker

    def send(
        self, path: str, body: Any, headers: dict[str, str] | None = None, method: str = "POST"
    ) -> tuple[int, str]:
        connection = HTTPConnection(self.stack.rest, timeout=60)
        fields = {"authorization": f"Bearer {self.key}", "traceparent": TRACED, "content-type": "application/json"}
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {**fields, **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def chat(self, **fields: Any) -> tuple[int, str]:
        return self.send("/v1/chat/completions", {"model": MODEL_NAME, "max_tokens": 4, **fields})

    def told(self) -> dict[str, str]:
        """Returns all output for operators, by source."""
        found = {f"log of {name}": service.log() for name, service in self.stack.services.items()}
        found["traces"] = "\n".join(self.collector.texts)
        for name, service in self.stack.services.items():
            host, _, port = service.plan.metrics.rpartition(":")
            connection = HTTPConnection(host, int(port), timeout=10)
            connection.request("GET", "/metrics", headers={"authorization": f"Bearer {self.other_key}"})
            found[f"metrics of {name}"] = connection.getresponse().read().decode()
            connection.close()
        return found


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("told")
    tenants: dict[str, dict[str, Any]] = {"alice": {}, "bob": {}}
    path, made = key_file(folder, [{"tenant": "alice"}, {"tenant": "bob", "scopes": ["admin"]}], tenants)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    debug = ("--log-level", "debug")
    flags = dict.fromkeys(("gateway", "router", "kvstore"), debug)
    flags["gateway"] += ("--api-keys", str(path), "--trust-request-chat-template", "--tool-call-parser", "hermes")
    flags["worker"] = (*debug, "--otlp-endpoint", collector.address)
    with ExitStack() as cleanup:
        cleanup.callback(server.stop, 0)
        stack = start_stack(folder, cleanup, flags, threads=1)
        yield Rig(stack, collector, made[0], made[1])


def sent_well(rig: Rig) -> None:
    """Requests that are answered, with a marker in each place that takes text."""
    mark = rig.mark
    system, user = {"role": "system", "content": mark("system")}, {"role": "user", "content": mark("user") * 40}
    tool = {
        "type": "function",
        "function": {
            "name": mark("toolname"),
            "description": mark("tooldescription"),
            "parameters": {"type": "object", "properties": {mark("property"): {"type": "string"}}},
        },
    }
    mark("output")
    good = [
        {"messages": [system, user], **FORCED},
        {"messages": [system, user], "stop": [mark("stop")], "user": mark("username"), "bad_words": [mark("badword")]},
        {"messages": [user], "tools": [tool]},
        {"messages": [user], "metadata": {"a": mark("metadata")}, "prompt_cache_key": mark("cachekey")},
        {"messages": [user], "cache_salt": mark("salt"), "logprobs": True, "top_logprobs": 3},
        {"messages": [user], "chat_template": "{{ messages[0].content }} " + mark("template")},
        {"messages": [user], "response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"type": "object", "properties": {mark("schema"): {"type": "integer"}}}}}},
    ]  # fmt: skip
    for body in good:
        status, text = rig.chat(**body)
        assert status == 200, (body, text)
    status, text = rig.send("/v1/completions", {"model": MODEL_NAME, "prompt": mark("prompt") * 30, **FORCED})
    assert status == 200, text
    assert f"{MARK}output" in text, "the output has its marker"
    status, text = rig.send("/v1/responses", {"model": MODEL_NAME, "input": mark("input"), "max_output_tokens": 4})
    assert status == 200, text
    body = {"model": MODEL_NAME, "max_tokens": 4, "messages": [user], "system": mark("anthropicsystem")}
    status, text = rig.send("/v1/messages", body)
    assert status == 200, text
    assert rig.send("/tokenize", {"model": MODEL_NAME, "prompt": mark("tokenize")})[0] == 200


def sent_badly(rig: Rig) -> None:
    """Sends requests that are refused with every error that quotes input, and requests that fail while they run."""
    mark = rig.mark
    user = {"role": "user", "content": mark("baduser")}
    bad: list[dict[str, Any]] = [
        {"messages": [user], "model": mark("model")},
        {"messages": [user], mark("field"): 1},
        {"messages": [user], "temperature": mark("temperature")},
        {"messages": [{"role": mark("role"), "content": "x"}]},
        {"messages": [user], "structured_outputs": {"regex": f"({mark('regex')}"}},
        {"messages": [user], "structured_outputs": {"grammar": f"start: {mark('rule')}"}},
        {"messages": [user], "structured_outputs": {"grammar": f'start: "{mark("literal")}" ('}},
        {"messages": [user], "response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"type": mark("type")}}}},
        {"messages": [user], "response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"$ref": f"#/{mark('ref')}"}}}},
        {"messages": [user], "chat_template": "{{ raise_exception('" + mark("raised") + "') }}"},
        {"messages": [user], "chat_template": "{% " + mark("syntax") + " %}"},
        {"messages": [{"role": "user", "content": mark("long") * 3000}]},
    ]  # fmt: skip
    statuses = [rig.chat(**body)[0] for body in bad]
    assert statuses.count(400) >= 8, statuses
    rig.send("/v1/chat/completions", f'{{"{mark("torn")}": '.encode())
    rig.send(f"/v1/models?api_key={mark('query')}", b"", method="GET")
    rig.send("/v1/models", b"", {"cookie": mark("cookie"), "x-secret": mark("header")}, "GET")
    for headers in (
        {"authorization": f"Bearer {mark('bearer')}"},
        {"authorization": f"Bearer sk-baton-{mark('likeakey')}"},
        {"authorization": f"Basic {mark('basic')}"},
        {"authorization": "", "x-api-key": mark("xapikey")},
        {"x-api-key": mark("second")},
    ):
        assert rig.send("/v1/models", b"", headers, "GET")[0] in (400, 401)
    # A path is told; what follows it is not.
    with socket.create_connection(tuple(rig.stack.rest.split(":"))) as raw:  # type: ignore[arg-type]
        raw.sendall(f"GET /?{mark('rawquery')} {mark('version')}\r\n{mark('noheader')}\r\n\r\n".encode())
        raw.settimeout(20)
        with suppress(OSError):
            raw.recv(65536)


def sent_over_grpc(rig: Rig) -> None:
    mark = rig.mark
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content=mark("grpcuser"))])
    requests = [
        inference_pb2.GenerateRequest(chat=chat, stop={"max_tokens": 4}),
        inference_pb2.GenerateRequest(chat=chat, request_id=f"two\nlines {mark('grpcid')}"),
        inference_pb2.GenerateRequest(chat=chat, model=mark("grpcmodel")),
    ]
    with grpc.insecure_channel(rig.stack.config.grpc_listen) as channel:
        stub = InferenceServiceStub(channel)
        for request in requests:
            for metadata in ([("authorization", f"Bearer {rig.key}")], [("x-api-key", mark("grpckey"))]):
                with suppress(grpc.RpcError):
                    list(stub.Generate(request, metadata=metadata, timeout=60))


def test_no_log_metric_or_trace_has_a_prompt_a_key_or_an_output(rig: Rig):
    sent_well(rig)
    sent_badly(rig)
    sent_over_grpc(rig)
    rig.stack.wait_all_blocks_back(20.0)
    wait_until(lambda: any("baton.worker.decode" in text for text in rig.collector.texts), "spans", 20.0)
    # A later request of another tenant must not reveal an earlier one.
    other = {"authorization": f"Bearer {rig.other_key}"}
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], "temperature": "x"}
    told = {**rig.told(), "an error of another": rig.send("/v1/chat/completions", body, other)[1]}
    told["what another lists"] = rig.send("/v1/models", b"", other, "GET")[1]
    assert "DEBUG" in told["log of gateway"], "the level is the lowest"
    leaks = {
        f"{where}: {line.strip()[:300]}"
        for where, text in told.items()
        for line in text.splitlines()
        if MARK in line or rig.key in line or rig.other_key in line
    }
    assert not leaks, "\n".join(sorted(leaks))
    assert len(rig.markers) > 40
