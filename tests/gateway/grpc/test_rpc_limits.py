"""What strangers may hold and send at the public gRPC port: as many generations, bytes and headers as at REST's."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import grpc
import pytest
from support.gateway.rest_harness import RawClient
from support.gateway.scripted_gateway import running
from support.gateway.scripted_services import until

from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub


@contextlib.asynccontextmanager
async def edge(**settings):
    """A gateway, and a stub."""
    async with (
        running(lambda submit: [10, 4], **settings) as gateway,
        grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel,
    ):
        yield gateway, InferenceServiceStub(channel)


async def test_generations_over_grpc_and_rest_share_the_limit():
    async with edge(max_streams=1, drain_timeout=0.1) as (gateway, stub):
        gateway.worker.steps_last = True
        first = stub.Generate(pb.GenerateRequest(text="Hi"))
        await until(lambda: gateway.worker.submits)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(text="Hi"), timeout=30).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "retry later" in caught.value.details()
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        async with RawClient.connect(gateway.port) as client:
            answer = await client.request("POST", "/v1/chat/completions", body)
        assert answer.status == 429
        first.cancel()
        await until(lambda: gateway.worker.aborts)
        gateway.worker.steps_last = False
        for _ in range(200):
            with contextlib.suppress(grpc.aio.AioRpcError):
                if await stub.Generate(pb.GenerateRequest(text="Hi"), timeout=30).read():
                    break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("the place is not given back")


async def test_choices_take_a_place_each():
    async with edge(max_streams=2) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(text="Hi", n=3)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "n" in caught.value.details()


async def test_messages_and_headers_over_the_limits_are_refused():
    async with edge(max_body_bytes=4096, max_header_bytes=8192) as (_, stub):
        for request, metadata in (
            (pb.TokenizeRequest(text="x" * 5000), ()),
            (pb.TokenizeRequest(text="x"), (("x-large", "y" * 20_000),)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tokenize(request, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Tokenize(pb.TokenizeRequest(text="x" * 3000))).token_ids


async def test_a_silent_connection_is_closed():
    async with edge(header_timeout=1.0) as (gateway, stub):
        host, port = gateway.config.grpc_listen.split(":")

        def closed():
            with socket.create_connection((host, int(port)), timeout=30) as silent:
                while silent.recv(4096):
                    pass
            return True

        assert await asyncio.to_thread(closed)
        assert (await stub.ListModels(pb.ListModelsRequest())).models
