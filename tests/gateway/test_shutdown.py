"""At the end of a gateway's drain, running requests get an error, over REST and gRPC."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from support.gateway.rest_harness import RawClient, request_bytes
from support.gateway.scripted_gateway import running
from support.gateway.scripted_services import until

from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub

REASON = "the gateway shut down before the generation finished"
BODY = {"prompt": "Hi", "max_tokens": 2000}


@pytest.fixture
async def gateway():
    """Its worker takes 4 s for an answer."""
    async with running(lambda submit: [10] * 2000, drain_timeout=0.3) as gateway:
        yield gateway


async def read_to_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_stream_ends_with_an_error_event(gateway):
    async with RawClient.connect(gateway.port) as client, asyncio.timeout(10):
        await client.send(request_bytes("POST", "/v1/completions", BODY | {"stream": True}))
        assert (await client.head())[0] == 200
        await client.chunk()
        gateway.stop.set()
        while piece := await client.chunk():
            last = piece
        assert await client.closed()
    event, done, _ = last.split(b"\n\n")
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert done == b"data: [DONE]"
    assert REASON in error["message"]
    assert error["code"] == "service_unavailable"
    await until(lambda: gateway.worker.aborts or gateway.worker.dropped)


async def test_no_worker_is_called_lost_that_has_not_answered_an_abort_yet(caplog):
    settings = {"drain_timeout": 0.3, "worker_silence_ms": 0}
    async with (
        running(lambda submit: [10] * 2000, **settings) as gateway,
        RawClient.connect(gateway.port) as client,
        asyncio.timeout(10),
    ):
        await client.send(request_bytes("POST", "/v1/completions", BODY | {"stream": True}))
        await client.head()
        await client.chunk()
        gateway.worker.silent = True
        gateway.stop.set()
        await gateway.service
    await until(lambda: gateway.worker.aborts or gateway.worker.dropped)
    assert "lost the stream" not in caplog.text


async def test_a_resumable_stream_ends_so_that_it_can_continue_elsewhere(redis_server):
    settings = {"drain_timeout": 0.3, "redis_url": redis_server.url, "resumable_streams": True}
    async with (
        running(lambda submit: [10] * 2000, **settings) as gateway,
        RawClient.connect(gateway.port) as client,
        asyncio.timeout(10),
    ):
        await client.send(request_bytes("POST", "/v1/completions", BODY | {"stream": True}, {"x-request-id": "r"}))
        data = await client.reader.readuntil(b"\n\n")
        gateway.stop.set()
        data += await client.reader.read()
    assert b"error" not in data
    assert b"[DONE]" not in data


async def is_told_with_a_503(gateway, condition):
    """A request that is under way when the condition holds and the gateway is stopped."""
    async with RawClient.connect(gateway.port) as client, asyncio.timeout(10):
        await client.send(request_bytes("POST", "/v1/completions", BODY))
        await until(condition)
        gateway.stop.set()
        answer = await client.answer()
    assert answer.status == 503
    assert REASON in answer.json["error"]["message"]
    assert answer.headers["connection"] == "close"


async def test_an_answer_that_has_not_begun_is_a_503(gateway):
    await is_told_with_a_503(gateway, lambda: gateway.worker.submits)


async def test_a_request_without_a_worker_yet_is_a_503(gateway):
    gateway.router.hangs = True
    await is_told_with_a_503(gateway, lambda: gateway.router.places)
    assert not gateway.worker.submits


async def test_a_grpc_stream_ends_as_unavailable(gateway):
    async with grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel, asyncio.timeout(10):
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="Hi"))
        await call.read()
        gateway.stop.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert REASON in caught.value.details()


async def test_an_idle_gateway_stops_before_the_drain_timeout():
    async with running(lambda submit: [10, 4], drain_timeout=60.0) as gateway, asyncio.timeout(20):
        gateway.stop.set()
        await gateway.service
