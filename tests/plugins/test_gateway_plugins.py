"""The gateway runs the example plugins, and a plugin's failure in a request is that request's alone."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from support.gateway.rest_harness import SAMPLE, RawClient
from support.gateway.scripted_gateway import running
from support.plugins.packages import install, install_example

from baton.gateway.config import GatewayConfig
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.server import serve
from baton.plugins.kinds import ENDPOINTS, METRIC_SINKS, TOOL_PARSERS
from baton.rpc.errors import ServiceError

_STOP = 4
_ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
_CHAT = {"model": "storyteller-7m", "messages": [{"role": "user", "content": "Hi"}]}

# Fails for outputs that name it, at three times.
_FAULTY = """
from baton.gateway.parsing.output_format import ToolFormat
from baton.gateway.parsing.events import ContentText

class Faulty:
    in_reasoning = False

    def __init__(self, tools):
        self.name = tools[0].name
        if self.name == "at_the_start":
            raise RuntimeError("secret detail")

    def push(self, text):
        if self.name == "at_a_token":
            raise RuntimeError("secret detail")
        return [ContentText(text)]

    def finish(self, cut=False):
        if self.name == "at_the_end":
            raise RuntimeError("secret detail")
        return []

FORMAT = ToolFormat(Faulty)
"""


_FAILING_ROUTE = """
from baton.gateway.rest.routing import Route

def fail(exchange):
    raise RuntimeError("secret detail")

def routes(serving):
    return [Route("GET", "/v1/fail", fail, "Fails.")]
"""
_FAILING_SINK = """
import threading
from baton.plugins.metric_sinks import MetricSink

CALLS = threading.Semaphore(0)

class Sink(MetricSink):
    interval_seconds = 0.01

    def write(self, metrics):
        CALLS.release()
        raise RuntimeError("the disk is full")
"""


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(SAMPLE / "tokenizer.json")
    yield tokenizer
    tokenizer.close()


async def _post(gateway, path, body):
    async with RawClient.connect(gateway.port) as client:
        return await client.request("POST", path, body)


def _says(tokenizer, text):
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), _STOP]
    return lambda submit: token_ids


async def _refusal(**settings):
    """Returns the message with which a gateway does not start."""
    config = GatewayConfig(model=str(SAMPLE), rest_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", **settings)
    with pytest.raises(ServiceError) as error:
        await serve(config, asyncio.Event())
    return error.value.message


async def test_a_gateway_runs_the_example_plugins(packages, tokenizer, tmp_path, monkeypatch):
    kinds = ("tool_parsers", "reasoning_parsers", "endpoints", "metric_sinks")
    tools, reasoning, *_ = names = [install_example(packages, kind) for kind in kinds]
    metrics = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("BATON_JSON_METRICS_FILE", str(metrics))
    monkeypatch.setenv("BATON_JSON_METRICS_SECONDS", "0.02")
    text = '<scratchpad>I must add.</scratchpad>Well. !add{"a": 1}'
    flags = {"plugins": tuple(names), "tool_call_parser": tools, "reasoning_parser": reasoning}
    async with running(_says(tokenizer, text), **flags) as gateway:
        answer = await _post(gateway, "/v1/chat/completions", {**_CHAT, "tools": [_ADD]})
        _check_chat(answer)
        await _check_counts(gateway, tokenizer)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert {line["service"] for line in lines} == {"gateway"}
    counts = [line for line in lines if line["name"] == "baton_gateway_requests_total"]
    assert [line["value"] for line in counts if line["labels"]["route"] == "/v1/chat/completions"][-1] == 1


def _check_chat(answer):
    message = answer.json["choices"][0]["message"]
    assert message["reasoning_content"] == "I must add."
    assert message["content"] == "Well."
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})


async def _check_counts(gateway, tokenizer):
    texts = ["Once upon a time", "", "a"]
    answer = await _post(gateway, "/v1/token_counts", {"texts": texts})
    assert answer.json["counts"] == [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    refused = await _post(gateway, "/v1/token_counts", {"texts": 1})
    assert (refused.status, refused.error["param"]) == (400, "texts")
    assert "/v1/token_counts" in (await gateway.get("/openapi.json")).json["paths"]


async def test_a_plugin_that_is_not_allowed_is_not_there(packages):
    name = install_example(packages, "tool_parsers")
    assert f"tool_call_parser: unknown parser '{name}'" in await _refusal(tool_call_parser=name)
    assert "plugins: 'bing' is not installed; did you mean bang?" in await _refusal(plugins=("bing",))


async def test_a_failure_in_a_request_is_that_requests_alone(packages, tokenizer, caplog):
    install(packages, "faulty", _FAULTY, {TOOL_PARSERS.group: {"faulty": "FORMAT"}})
    install(packages, "failing", _FAILING_ROUTE, {ENDPOINTS.group: {"failing": "routes"}})
    install(packages, "bad-sink", _FAILING_SINK, {METRIC_SINKS.group: {"bad": "Sink"}})

    def chat(name, stream):
        tool = {"type": "function", "function": {"name": name, "parameters": {}}}
        return {**_CHAT, "tools": [tool], "stream": stream}

    flags = {"plugins": ("faulty", "failing", "bad"), "tool_call_parser": "faulty"}
    places = ("fine", "at_the_start", "fine", "at_a_token", "at_the_end", "fine")
    async with running(_says(tokenizer, "Hello you"), **flags) as gateway:
        for stream in (False, True):
            asked = [_post(gateway, "/v1/chat/completions", chat(place, stream)) for place in places]
            answers = dict(zip(enumerate(places), await asyncio.gather(*asked), strict=True))
            for (_, place), answer in answers.items():
                # A parser that fails later leaves the text as it is.
                assert answer.status == (500 if place == "at_the_start" else 200), (place, answer.body)
                assert b"secret" not in answer.body
                assert place == "at_the_start" or b"Hello" in answer.body
        failed = await gateway.get("/v1/fail")
        assert failed.status == 500
        assert b"secret" not in failed.body
        assert (await _post(gateway, "/v1/chat/completions", chat("fine", False))).status == 200
        import bad_sink

        for _ in range(3):
            assert await asyncio.to_thread(bad_sink.CALLS.acquire, timeout=10)
    assert len([one for one in caplog.records if "the metric sink bad failed" in one.getMessage()]) == 1
    assert any("Faulty failed" in one.getMessage() for one in caplog.records)


@pytest.mark.parametrize(
    ("route", "raised"),
    [
        ('Route("POST", "/v1/completions", print, "Mine.")', "ValueError: POST /v1/completions has a route already"),
        ('"/v1/mine"', "TypeError: it returned a str; it must return a list of Route"),
    ],
)
async def test_an_endpoint_cannot_replace_a_route(packages, route, raised):
    source = f"from baton.gateway.rest.routing import Route\ndef routes(serving):\n    return [{route}]\n"
    install(packages, "mine", source, {ENDPOINTS.group: {"mine": "routes"}})
    assert re.fullmatch(f"plugins: 'mine' cannot be started .*: {raised}.*", await _refusal(plugins=("mine",)))


async def test_a_plugin_that_raises_at_start_ends_the_gateway(packages):
    name = install_example(packages, "metric_sinks")
    message = await _refusal(plugins=(name,))
    assert message == (
        "plugins: 'json-metrics' cannot be started (entry point baton.metric_sinks.v1: json-metrics = "
        "baton_json_metrics:JsonMetrics, of the package baton-json-metrics 0.1.0): KeyError: 'BATON_JSON_METRICS_FILE'"
    )
