"""Every kind of request goes on on another worker when its own is killed, token by token as if nothing had been.

A gateway, REST and gRPC, over workers with the CPU engine. All kinds run at once; the engine of the worker that has
them all is killed in the middle, and the answers are compared with those of an undisturbed run.
"""

import asyncio
import contextlib
import json
import signal
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from support.gateway.rest_harness import RawClient, request_bytes
from support.gateway.scripted_services import ScriptedRouter, until
from support.processes import ports
from support.processes.engine_processes import engines_of
from support.processes.worker_harness import running_worker

from baton.gateway.config import GatewayConfig
from baton.gateway.server import serve
from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

MODEL = str(Path(__file__).parents[4] / "models" / "storyteller-7m")
NAME = "storyteller-7m"
MESSAGES = [{"role": "user", "content": "Once upon a time there was a dog by the river."}]
SEEDED = {"temperature": 1.0, "seed": 7}
GREEDY = {"temperature": 0.0}
LONG = {"ignore_eos": True, "max_tokens": 120}
CHAT = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, **LONG}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 30, "maxItems": 30}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "numbers", "strict": True, "schema": NUMBERS}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"]},
        },
    }
]
PROMPT = "Once upon a time there was a little girl who had a"
THINKING = {"thinking_token_budget": 20}

CHATS = "/v1/chat/completions"
TEXTS = "/v1/completions"
KINDS = {
    "greedy chat": (CHATS, {**CHAT, **GREEDY}),
    "seeded chat": (CHATS, {**CHAT, **SEEDED}),
    "whole chat": (CHATS, {**CHAT, **SEEDED, "stream": False, "stream_options": None}),
    "penalties": (
        CHATS,
        {**CHAT, **SEEDED, "presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    ),
    "choices": (CHATS, {**CHAT, **SEEDED, "n": 3, "logprobs": True, "top_logprobs": 3}),
    "stop strings": (TEXTS, {"prompt": PROMPT, "stream": True, **GREEDY, **LONG, "stop": ["e x", "###"]}),
    "schema": (CHATS, {**CHAT, **SEEDED, **THINKING, "response_format": SCHEMA, "ignore_eos": False}),
    "regex": (
        TEXTS,
        {
            "prompt": PROMPT,
            "stream": True,
            **SEEDED,
            "max_tokens": 120,
            "structured_outputs": {"regex": "([a-z]{3}-){30}"},
        },
    ),
    "tools": (
        CHATS,
        {
            **CHAT,
            **SEEDED,
            **THINKING,
            "tools": TOOLS,
            "tool_choice": "required",
            "ignore_eos": False,
            "max_tokens": 200,
        },
    ),
    "thinking": (CHATS, {**CHAT, **SEEDED, "thinking_token_budget": 40}),
    "bad words": (CHATS, {**CHAT, **GREEDY, "bad_words": ["dog", "the river", "was"]}),
    "min tokens": (CHATS, {**CHAT, **SEEDED, "ignore_eos": False, "min_tokens": 100}),
    "echo": (
        TEXTS,
        {"prompt": PROMPT, "stream": True, **SEEDED, **LONG, "echo": True, "logprobs": 2},
    ),
    "prompt logprobs": (TEXTS, {"prompt": PROMPT, **SEEDED, **LONG, "echo": True, "logprobs": 1, "prompt_logprobs": 1}),
    "two prompts": (TEXTS, {"prompt": [PROMPT, "The cat"], "stream": True, **SEEDED, **LONG, "n": 2}),
    "beams": (TEXTS, {"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 24}),
    "responses": ("/v1/responses", {"input": "Tell me of a dog.", "stream": True, **SEEDED, "max_output_tokens": 100}),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "stream": True, "temperature": 1.0, "seed": 3, "max_tokens": 100},
    ),
}


class Place:
    """A worker as the scripted router places on it."""

    def __init__(self, worker):
        self.worker_id = worker.config.worker_id
        self.endpoint = types_pb2.Endpoint(worker_id=self.worker_id, epoch=1, address=worker.address)


class Site:
    """A gateway, and workers; the first one in the router's list gets everything."""

    def __init__(self, router, rest, rpc, engines):
        self.router = router
        self.rest = rest
        self.rpc = rpc
        self.engines = engines  # by worker

    async def ask(self, path, body, progress):
        async with RawClient.connect(self.rest) as client, asyncio.timeout(60):
            await client.send(request_bytes("POST", path, {"model": NAME, **body}))
            status, headers = await client.head()
            if "chunked" not in headers.get("transfer-encoding", ""):
                data = await client.reader.readexactly(int(headers["content-length"]))
                assert status == 200, data
                return json.loads(data)
            data = b""
            while piece := await client.chunk():
                data += piece
                progress()
            return told(data)

    async def generate(self, progress):
        sampling = types_pb2.SamplingParams(temperature=1.0, seed=9)
        request = inference_pb2.GenerateRequest(
            model=NAME,
            text=PROMPT,
            sampling=sampling,
            stop=types_pb2.StopConditions(max_tokens=100, ignore_eos=True),
        )
        token_ids, text, usage = [], "", None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.rpc}") as channel, asyncio.timeout(60):
            async for response in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
                token_ids += response.token_ids
                text += response.text
                usage = response.usage.completion_tokens if response.HasField("usage") else usage
                progress()
        return token_ids, text, usage

    async def ask_all(self, on_half_way=None):
        """Returns the answer of every kind. Calls `on_half_way` when all streams have output."""
        pieces = defaultdict(int)

        def counting(kind):
            def progress():
                pieces[kind] += 1

            return progress

        asks = {kind: self.ask(path, body, counting(kind)) for kind, (path, body) in KINDS.items()}
        asks["grpc"] = self.generate(counting("grpc"))
        running = [asyncio.create_task(ask) for ask in asks.values()]
        if on_half_way is not None:
            num_streams = 1 + sum(bool(body.get("stream")) for _, body in KINDS.values())
            await until(lambda: len(pieces) == num_streams and min(pieces.values()) > 2, 30)
            on_half_way()
        answers = await asyncio.gather(*running, return_exceptions=True)
        return dict(zip(asks, answers, strict=True))


def told(data):
    """Returns a stream's content, without its chunks, ids, times and cached tokens, which may differ."""
    parts = defaultdict(list)
    for block in data.decode().split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                _collect(json.loads(line.removeprefix("data: ")), "", parts)
    return {path: "".join(values) if isinstance(values[0], str) else values for path, values in parts.items()}


_OPEN = ("content", "text", "reasoning", "reasoning_content", "arguments", "delta", "partial_json", "thinking")
_ONCE = ("finish_reason", "stop_reason", "completion_tokens", "prompt_tokens", "total_tokens", "output_tokens")


def _collect(value, path, parts):
    if isinstance(value, dict):
        index = value.get("index", "")
        for key, one in value.items():
            _collect(one, f"{path}.{index}.{key}" if index != "" else f"{path}.{key}", parts)
    elif isinstance(value, list):
        for one in value:
            _collect(one, path, parts)
    else:
        key = path.rpartition(".")[2]
        if (
            (key in _OPEN and isinstance(value, str))
            or (key in _ONCE and value is not None and value not in parts[path])
            or key == "logprob"
        ):
            parts[path].append(value)


def without_ids(answer):
    """Returns a whole answer without ids and times."""
    if isinstance(answer, dict):
        skipped = ("id", "created", "prompt_tokens_details", "created_at", "completed_at")
        return {key: without_ids(value) for key, value in answer.items() if key not in skipped}
    if isinstance(answer, list):
        return [without_ids(value) for value in answer]
    return answer


def same(answer, expected):
    """Compares answers. Numbers may differ by the rounding of another batch."""
    if isinstance(answer, float) and isinstance(expected, float):
        return abs(answer - expected) < 2e-3
    if isinstance(answer, dict) and isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(same(answer[key], expected[key]) for key in answer)
    if isinstance(answer, list | tuple) and isinstance(expected, list | tuple):
        return len(answer) == len(expected) and all(map(same, answer, expected))
    return answer == expected


def difference(expected, answer):
    """The parts that differ, from where they do."""
    if not isinstance(expected, dict) or not isinstance(answer, dict):
        return str(expected)[:300], repr(answer)[:300]
    names = [name for name in {**expected, **answer} if expected.get(name) != answer.get(name)]
    return {name: (str(expected.get(name))[-200:], str(answer.get(name))[-200:]) for name in names}


@pytest.fixture
async def site():
    async with AsyncExitStack() as stack:
        first, second, rest, rpc = ports.free_ports(4)
        fields = {
            "model": MODEL, "served_model_name": NAME, "num_blocks": 1200, "drain_timeout": 0.0,
            "executor": "cpu", "engine_process": True, "threads": 1,
        }  # fmt: skip
        workers, of = [], {}
        for name, port in (("w0", first), ("w1", second)):
            before = engines_of()
            workers.append(await stack.enter_async_context(running_worker(port, worker_id=name, **fields)))
            (of[name],) = set(engines_of()) - set(before)
        router = await stack.enter_async_context(ScriptedRouter([Place(worker) for worker in workers]))
        router.models = [(await workers[0].state()).model]
        config = GatewayConfig(
            rest_listen=f"127.0.0.1:{rest}",
            grpc_listen=f"127.0.0.1:{rpc}",
            router=(router.address,),
            model=MODEL,
            reasoning_parser="deepseek_r1",
            tool_call_parser="hermes",
            drain_timeout=1.0,
        )
        stop = asyncio.Event()
        serving = asyncio.create_task(serve(config, stop))
        stack.push_async_callback(asyncio.wait, [serving])
        stack.callback(stop.set)
        async with asyncio.timeout(20):
            await _until_ready(rest)
        yield Site(router, rest, rpc, of)


async def _until_ready(port):
    ready = await _is_ready(port)
    for _ in range(1000):
        if ready:
            return
        await asyncio.sleep(0.05)
        ready = await _is_ready(port)


async def _is_ready(port):
    with contextlib.suppress(OSError):
        async with RawClient.connect(port) as client:
            return (await client.request("GET", "/ready")).status == 200
    return False


@pytest.mark.timeout(180)
async def test_every_kind_of_request_outlives_its_worker(site):
    site.router.workers.reverse()
    undisturbed = await site.ask_all()
    refused = {kind: answer for kind, answer in undisturbed.items() if isinstance(answer, BaseException)}
    assert not refused
    site.router.workers.reverse()
    disturbed = await site.ask_all(lambda: site.engines["w0"].send_signal(signal.SIGKILL))
    wrong = {}
    for kind, answer in disturbed.items():
        expected = undisturbed[kind]
        if not same(without_ids(answer), without_ids(expected)):
            wrong[kind] = difference(without_ids(expected), without_ids(answer))
    assert not wrong, wrong
    moved = {place.request_id for place in site.router.places if "w0" in place.excluded_worker_ids}
    assert len(moved) >= len(KINDS) - 2
