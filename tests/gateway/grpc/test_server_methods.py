"""GetTokenizer, GetServerInfo and Abort, and the session and worker of a request."""

import asyncio
import io
import json
import zipfile
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256

import grpc
import pytest
from support.gateway.rest_harness import INFO, FakeGenerator, sample_model, say, until
from tokenizers import Tokenizer

from baton.gateway.access.gate import FREE_PERMIT
from baton.gateway.access.identity import Identity, Scope, Tenant
from baton.gateway.grpc.server_methods import ServerFacts
from baton.gateway.grpc.servicer import InferenceServicer
from baton.gateway.models.served import ModelCatalog
from baton.gateway.serving.affinity import session_name
from baton.rpc.channel import open_channel
from baton.rpc.server.server import RpcServer, Service
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc, types_pb2


class Keys:
    """Implements Gate. Tenants and scopes by key: TENANT or TENANT:SCOPE."""

    ready = True

    def tenant_of(self, keys):
        return ""

    async def admit(self, identity, cost):
        return FREE_PERMIT

    def identify(self, keys, scope=None):
        name, _, one = (keys[0] if keys else "").partition(":")
        return Identity(Tenant(name), {Scope.INFERENCE, *([Scope(one)] if one else [])})


@asynccontextmanager
async def api(script=None, gives_tokenizer=True):
    generator, catalog = FakeGenerator(script), ModelCatalog([sample_model()])
    catalog.update([INFO])
    facts = ServerFacts(gives_tokenizer, lambda: 7, lambda: True)
    servicer = InferenceServicer(generator, catalog, gate=Keys(), server=facts, listen="0.0.0.0:1")
    register = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    async with AsyncExitStack() as stack:
        service = Service("baton.v1.InferenceService", servicer, register)
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [service], grace_seconds=0))
        channel = open_channel(f"127.0.0.1:{server.port}")
        stack.push_async_callback(channel.close)
        yield generator, inference_pb2_grpc.InferenceServiceStub(channel)


def key(text):
    return (("authorization", f"Bearer {text}"),)


async def test_the_tokenizer_arrives_as_an_archive_that_tokenizes_alike():
    async with api() as (_, stub):
        pieces = [piece async for piece in stub.GetTokenizer(pb.GetTokenizerRequest(), metadata=key("a"))]
        archive = b"".join(piece.chunk for piece in pieces)
        assert max(len(piece.chunk) for piece in pieces) <= 64 << 10
        assert pieces[-1].sha256 == sha256(archive).digest()
        assert not any(piece.sha256 for piece in pieces[:-1])
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            theirs = Tokenizer.from_str(files.read("tokenizer.json").decode())
            config = json.loads(files.read("tokenizer_config.json"))
            assert files.read("chat_template.jinja").decode() == config["chat_template"]
        text = "Once upon a time there was a dog."
        answer = await stub.Tokenize(pb.TokenizeRequest(text=text), metadata=key("a"))
        assert theirs.encode(text).ids == list(answer.token_ids)


async def test_the_tokenizer_is_given_on_the_operators_wish_only():
    async with api(gives_tokenizer=False) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [piece async for piece in stub.GetTokenizer(pb.GetTokenizerRequest(), metadata=key("a"))]
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "--enable-tokenizer-info-endpoint" in refused.value.details()


async def test_the_server_describes_itself_and_its_load_to_those_who_may_see_it():
    async with api() as (_, stub):
        info = await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=key("a"))
        assert (bool(info.version), info.ready, info.HasField("num_running")) == (True, True, False)
        info = await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=key("a:metrics"))
        assert info.num_running == 7


async def test_a_tenant_ends_its_own_requests_only():
    async with api() as (generator, stub):
        request = pb.GenerateRequest(text="Hi", request_id="mine")
        call = stub.Generate(request, metadata=key("a"), timeout=10)
        reading = asyncio.create_task(_all(call))
        await until(lambda: generator.started)
        abort = pb.AbortRequest(request_ids=["mine", "unknown"])
        assert (await stub.Abort(abort, metadata=key("b"))).num_aborted == 0
        assert (await stub.Abort(abort, metadata=key("a"))).num_aborted == 1
        responses = await reading
        assert responses[0].finish_reason == types_pb2.FINISH_REASON_ABORT
        assert responses[-1].HasField("usage")


@pytest.mark.parametrize(("ids", "field"), [(["a b"], "request_ids.0"), (["x"] * 1025, "request_ids")])
async def test_wrong_ids_are_refused(ids, field):
    async with api() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Abort(pb.AbortRequest(request_ids=ids), metadata=key("a"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in refused.value.details()


async def test_a_request_names_its_session_and_an_operators_its_worker():
    async with api(say("x")) as (generator, stub):
        request = pb.GenerateRequest(text="Hi", session_id="s", worker_id="w")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _all(stub.Generate(request, metadata=key("a")))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await _all(stub.Generate(request, metadata=key("a:admin")))
        (started,) = generator.started
        assert (started.request.session_id, started.request.worker_id) == (session_name("a", "s"), "w")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _all(stub.Generate(pb.GenerateRequest(text="Hi", session_id="s" * 513), metadata=key("a")))
        assert "session_id has 513 bytes" in refused.value.details()


async def _all(call):
    return [response async for response in call]


@pytest.mark.parametrize(
    ("caller", "status", "words"),
    [
        ("a", grpc.StatusCode.PERMISSION_DENIED, "needs an API key with the scope admin"),
        ("a:metrics", grpc.StatusCode.PERMISSION_DENIED, "needs an API key with the scope admin"),
        ("a:admin", grpc.StatusCode.UNIMPLEMENTED, "controls no workers"),
    ],
)
async def test_adapters_are_for_admins_of_gateways_with_workers(caller, status, words):
    async with api() as (_, stub):
        for call, request in (
            (stub.AddAdapter, pb.AddAdapterRequest(name="poet", path="/adapters/poet")),
            (stub.RemoveAdapter, pb.RemoveAdapterRequest(name="poet")),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as raised:
                await call(request, metadata=key(caller))
            assert raised.value.code() is status
