"""A stream whose gateway is gone continues at another one, without repeated or missing events."""

import asyncio
import contextlib
import json
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from support.fleet.kvstore_node import eventually
from support.gateway.rest_harness import RawClient, request_bytes
from support.gateway.scripted_services import ScriptedRouter, ScriptedWorker
from support.processes import ports

from baton.gateway.access.keys.api_key import digest_of, id_of, new_key
from baton.gateway.config import GatewayConfig
from baton.gateway.rest.sse import with_id
from baton.gateway.resume.position import ChoicePosition, Cursor, parse_position, position_text
from baton.gateway.resume.store import StreamStore
from baton.gateway.server import serve
from baton.rpc.errors import InvalidRequest, NotFound
from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

SAMPLE = str(Path(__file__).parents[3] / "models" / "storyteller-7m")
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 60,
    "ignore_eos": True,
}
TEXT = {"prompt": "Once", "stream": True, "max_tokens": 60, "ignore_eos": True}


def words(submit):
    """Returns tokens by seed and position."""
    return [300 + (submit.sampling.seed * 7 + at * 13) % 3000 for at in range(submit.stop.max_tokens)]


class Gateways:
    """Gateways that share a router, a worker and a Redis."""

    def __init__(self, worker, router, redis, stack):
        self.worker = worker
        self.router = router
        self.redis = redis
        self.stack = stack

    async def start(self, **settings):
        rest, rpc = ports.free_ports(2)
        fields = {"resumable_streams": True, "redis_url": self.redis.url, **settings}
        config = GatewayConfig(
            rest_listen=f"127.0.0.1:{rest}",
            grpc_listen=f"127.0.0.1:{rpc}",
            router=(self.router.address,),
            model=SAMPLE,
            drain_timeout=0.1,
            **fields,
        )
        stop = asyncio.Event()
        serving = asyncio.create_task(serve(config, stop))
        self.stack.push_async_callback(asyncio.wait, [serving])
        self.stack.callback(stop.set)
        async with asyncio.timeout(20):
            await _until_ready(rest)
        self.rpc = f"127.0.0.1:{rpc}"
        return rest

    async def until_written(self, path, num_tokens=0, request_id="r", tenant=""):
        """Waits until Redis has the stream, with at least this many tokens of each choice."""

        async def is_written():
            try:
                known = (await store.resume(tenant, request_id, path, None, "")).known
            except NotFound:
                return False
            return all(len(token_ids) >= num_tokens for token_ids in known)

        async with StreamStore(self.redis.url) as store:
            await eventually(is_written, f"{num_tokens} tokens of {request_id} are written")


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


@pytest.fixture
async def gateways(redis_server):
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ScriptedWorker("w0", words, step_seconds=0.004))
        router = await stack.enter_async_context(ScriptedRouter([worker]))
        yield Gateways(worker, router, redis_server, stack)


async def listen(port, path, body, headers, num_events=None):
    """Returns the events (id, data) of a stream, or the first ones and disconnects."""
    async with RawClient.connect(port) as client, asyncio.timeout(20):
        await client.send(request_bytes("POST", path, body, headers))
        status, _ = await client.head()
        assert status == 200, await client.reader.read(500)
        data = b""
        while piece := await client.chunk():
            data += piece
            if num_events is not None and data.count(b"\n\n") >= num_events:
                break
    return events_of(data)


def events_of(data):
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        events.append((lines.get("id"), lines["data"]))
    return events


def told(events):
    """Returns the text and the finish reason of every choice, and the usages."""
    texts, ends, usages = {}, {}, []
    for _, data in events:
        if data == "[DONE]":
            continue
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        if chunk.get("usage"):
            usages.append((chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]))
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            texts[index] = texts.get(index, "") + (delta.get("role") or "") + (delta.get("content") or "")
            texts[index] += choice.get("text") or ""
            if choice["finish_reason"]:
                ends.setdefault(index, []).append(choice["finish_reason"])
    return texts, ends, usages


def last_id(events):
    return next(name for name, _ in reversed(events) if name)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "n": 3, "temperature": 1.0}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {**TEXT, "stop": ["zzz", "qq"]}),
        ("/v1/completions", {**TEXT, "n": 2, "echo": True, "seed": 5}),
    ],
)
async def test_another_gateway_continues_at_the_clients_position(gateways, path, fields):
    first, second = await gateways.start(), await gateways.start()
    fields = {"seed": 11, **fields}
    whole = await listen(first, path, fields, {"x-request-id": "whole"})
    for number, num_events in enumerate((2, 30)):
        headers = {"x-request-id": f"cut-{number}"}
        begun = await listen(first, path, fields, headers, num_events)
        await gateways.until_written(path, 0, f"cut-{number}")  # the client's position may or may not be
        kept = next(at for at, (name, _) in reversed(list(enumerate(begun))) if name) + 1
        rest = await listen(second, path, {}, {"last-event-id": last_id(begun)})
        assert told(begun[:kept] + rest) == told(whole)
        ids = {json.loads(data)["id"] for _, data in begun + rest if data != "[DONE]"}
        assert len(ids) == 1


async def test_a_seed_that_the_client_did_not_give_is_kept(gateways):
    first, second = await gateways.start(), await gateways.start()
    begun = await listen(first, "/v1/completions", TEXT, {"x-request-id": "r"}, 20)
    await gateways.until_written("/v1/completions", 1)
    await listen(second, "/v1/completions", {}, {"last-event-id": last_id(begun)})
    seeds = {submit.sampling.seed for submit in gateways.worker.submits}
    assert len(seeds) == 1
    assert gateways.worker.submits[-1].resume.output_token_ids


async def test_a_complete_stream_ends_again_without_a_worker(gateways):
    port = await gateways.start()
    events = await listen(port, "/v1/chat/completions", CHAT, {"x-request-id": "r"})
    await gateways.until_written("/v1/chat/completions", 60)
    num_submits = len(gateways.worker.submits)
    rest = await listen(port, "/v1/chat/completions", {}, {"last-event-id": last_id(events)})
    texts, ends, usages = told(rest)
    assert (texts, ends) == ({}, {})
    assert usages[0][1] == 60
    assert rest[-1][1] == "[DONE]"
    assert len(gateways.worker.submits) == num_submits


@pytest.mark.parametrize(
    ("last", "status", "what"),
    [
        ("nobody/3", 404, "no stream"),
        ("r/3.4", 400, "2 choices"),
        ("r/x", 400, "invalid position"),
        ("r", 400, "as received"),
        ("r/", 400, "invalid position"),
        ("r/99999999999999999999", 400, "invalid position"),
    ],
)
async def test_a_wrong_id_is_refused_and_disturbs_nothing(gateways, last, status, what):
    port = await gateways.start()
    await listen(port, "/v1/completions", TEXT, {"x-request-id": "r"}, 5)
    await gateways.until_written("/v1/completions")
    async with RawClient.connect(port) as client:
        answer = await client.request("POST", "/v1/completions", {}, {"last-event-id": last})
    assert (answer.status, answer.error["param"]) == (status, "last-event-id")
    assert what in answer.error["message"]
    async with RawClient.connect(port) as client:
        other = await client.request("POST", "/v1/chat/completions", {}, {"last-event-id": "r/3"})
    assert other.status == 404


async def test_another_tenants_stream_is_as_if_it_were_not_there(gateways, tmp_path):
    keys = {tenant: new_key()[0] for tenant in ("mine", "theirs")}
    entries = [{"id": id_of(key), "tenant": name, "sha256": digest_of(key).hex()} for name, key in keys.items()]
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": entries, "tenants": {name: {} for name in keys}}))
    port = await gateways.start(api_keys=str(file))
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in keys.values())
    begun = await listen(port, "/v1/completions", {**TEXT, "seed": 3}, {**mine, "x-request-id": "r"}, 5)
    await gateways.until_written("/v1/completions", tenant="mine")
    async with RawClient.connect(port) as client:
        headers = {**theirs, "last-event-id": last_id(begun)}
        answer = await client.request("POST", "/v1/completions", {}, headers)
    assert (answer.status, answer.error["param"]) == (404, "last-event-id")
    rest = await listen(port, "/v1/completions", {}, {**mine, "last-event-id": last_id(begun)})
    assert rest[-1][1] == "[DONE]"


async def test_a_position_that_no_stream_of_the_request_can_have_is_refused(gateways):
    port = await gateways.start()
    await listen(port, "/v1/completions", TEXT, {"x-request-id": "r"}, 5)
    await gateways.until_written("/v1/completions")
    async with RawClient.connect(port) as client:
        answer = await client.request("POST", "/v1/completions", {}, {"last-event-id": "r/61"})
    assert (answer.status, answer.error["param"]) == (400, "last-event-id")


async def test_streams_without_resume_have_no_ids_and_no_state(gateways):
    on, off = await gateways.start(), await gateways.start(resumable_streams=False)
    for port, headers in ((on, {}), (off, {"x-request-id": "r"})):
        events = await listen(port, "/v1/completions", TEXT, headers)
        assert not any(name for name, _ in events)
    async with RawClient.connect(off) as client:
        answer = await client.request("POST", "/v1/completions", {}, {"last-event-id": "r/3"})
    assert answer.status == 400
    assert "resumable_streams" in answer.error["message"]


async def generate(address, request, num_responses=None):
    responses = []
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
        async for response in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
            responses.append(response)
            if num_responses is not None and len(responses) >= num_responses:
                break
    return responses


def heard(responses):
    told = {index: ([], "", 0) for index in range(2)}
    for response in responses:
        token_ids, text, finish = told[response.index]
        told[response.index] = (
            token_ids + list(response.token_ids),
            text + response.text,
            finish + response.finish_reason,
        )
    return told, [response.usage.completion_tokens for response in responses if response.HasField("usage")]


async def test_a_grpc_stream_continues_at_another_gateway(gateways):
    await gateways.start()
    first = gateways.rpc
    await gateways.start()
    fields = {"stop": types_pb2.StopConditions(max_tokens=60, ignore_eos=True), "n": 2, "text": "Once"}
    sampling = types_pb2.SamplingParams(seed=4)
    whole = await generate(first, inference_pb2.GenerateRequest(request_id="w", sampling=sampling, **fields))
    request = inference_pb2.GenerateRequest(request_id="r", sampling=sampling, **fields)
    begun = await generate(first, request, 30)
    await gateways.until_written("baton.v1.InferenceService/Generate")
    came, _ = heard(begun)
    choices = [inference_pb2.ChoicePosition(num_tokens=len(came[at][0]), finished=came[at][2] > 0) for at in range(2)]
    resume = inference_pb2.ResumePosition(choices=choices)
    rest = await generate(gateways.rpc, inference_pb2.GenerateRequest(request_id="r", resume=resume))
    assert heard(begun + rest) == heard(whole)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(gateways.rpc, inference_pb2.GenerateRequest(request_id="nobody", resume=resume))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    del resume.choices[1:]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(gateways.rpc, inference_pb2.GenerateRequest(request_id="r", resume=resume))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_resumable_streams_need_a_redis():
    with pytest.raises(InvalidRequest, match="redis_url"):
        GatewayConfig(model=SAMPLE, resumable_streams=True).validate()


def test_a_position_as_text_and_back():
    position = (ChoicePosition(12), ChoicePosition(15, True))
    assert position_text(position) == "12.15f"
    assert parse_position("12.15f", "x") == position


def test_a_cursor_returns_only_new_events():
    cursor = Cursor(parse_position("2.1f", "x"))
    assert cursor.resumed
    assert [cursor.advance(0, 1, False) for _ in range(3)] == [False, False, True]
    assert cursor.behind
    assert not cursor.advance(1, 1, False)
    assert not cursor.advance(1, 0, True)
    assert not cursor.behind
    assert cursor.text == "3.1f"


def test_the_id_goes_to_the_last_event():
    assert with_id(b"data: 1\n\n", "a") == b"id: a\ndata: 1\n\n"
    assert with_id(b"data: 1\n\ndata: 2\n\n", "a") == b"data: 1\n\nid: a\ndata: 2\n\n"
