"""The access log: the fields of REST and gRPC lines, requests that are not logged, and the setting."""

from __future__ import annotations

import logging

import grpc
import pytest
from support.gateway.access_rig import key_file
from support.gateway.rest_harness import INFO, SAMPLE, FakeGenerator, RawClient, say
from support.gateway.scripted_gateway import running

from baton.gateway.access_log import NAME, log_exchange, rpc_client, switch_access_log
from baton.gateway.grpc.servicer import InferenceServicer
from baton.gateway.models.served import ModelCatalog, load_served_model
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub

CHAT = {"messages": [{"role": "user", "content": "zqxprompt"}], "max_tokens": 2}


@pytest.fixture(autouse=True)
def restored(caplog):
    caplog.set_level(logging.DEBUG, NAME)
    yield
    switch_access_log(True)


@pytest.fixture
def key(tmp_path):
    path, (key,) = key_file(tmp_path, [{"tenant": "acme"}], {"acme": {}})
    return path, key


def records(caplog):
    return [record for record in caplog.records if record.name == NAME]


async def call_both(gateway, key):
    headers = {"authorization": f"Bearer {key}", "x-request-id": "one"}
    async with RawClient.connect(gateway.port) as client:
        port = client.writer.get_extra_info("sockname")[1]
        for path in ("/health", "/ping", "/ready", "/load", "/metrics"):
            await client.request("GET", path, headers=headers)
        await client.request("GET", "/v1/models?api-version=zqxquery", headers=headers)
        answer = await client.request("POST", "/v1/chat/completions", CHAT, headers)
    async with grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel:
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="zqxprompt")])
        request = pb.GenerateRequest(request_id="two", chat=chat)
        stream = InferenceServiceStub(channel).Generate(request, metadata=(("x-api-key", key),))
        assert [response async for response in stream]
    return port, answer


async def test_log_lines_of_both_protocols_have_the_tenant_and_no_text(key, caplog):
    async with running(lambda submit: [10, 4], api_keys=str(key[0])) as gateway:
        caplog.clear()
        port, answer = await call_both(gateway, key[1])
        shown = [record for record in records(caplog) if record.levelno >= logging.INFO]
    rest, call = shown[-2:]
    assert [record.getMessage() for record in shown] == [
        "GET /v1/models 200",
        "POST /v1/chat/completions 200",
        "Generate OK",
    ]
    assert (rest.request_id, rest.tenant, rest.client) == ("one", "acme", f"127.0.0.1:{port}")
    assert (rest.bytes, rest.milliseconds > 0) == (len(answer.body), True)
    assert (call.request_id, call.tenant, call.milliseconds > 0) == ("two", "acme", True)
    assert call.client.startswith("127.0.0.1:")
    text = "\n".join(str(vars(record)) for record in caplog.records)
    assert "zqx" not in text
    assert key[1] not in text


async def test_probes_and_scrapes_are_logged_at_debug(key, caplog):
    async with running(lambda submit: [10, 4], api_keys=str(key[0])) as gateway:
        caplog.clear()
        await call_both(gateway, key[1])
        quiet = [record for record in records(caplog) if record.levelno == logging.DEBUG]
    paths = {record.getMessage().split()[1] for record in quiet}
    assert paths == {"/health", "/ping", "/ready", "/load", "/metrics"}


async def test_it_can_be_switched_off(key, caplog):
    async with running(lambda submit: [10, 4], api_keys=str(key[0]), no_access_log=True) as gateway:
        caplog.clear()
        await call_both(gateway, key[1])
        assert not records(caplog)


@pytest.mark.parametrize("path", ["/a\x85b", "/\xff", "/a\x1b[2J", "/" + "x" * 5000])
def test_a_path_stays_one_short_line_of_ascii(path, caplog):
    log_exchange("GET", path, 404, request_id="a b\nc", tenant="", client="", seconds=0.1)
    (record,) = records(caplog)
    message = record.getMessage()
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 1000
    assert record.request_id == "invalid"


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:10.0.0.1:5000", "10.0.0.1:5000"), ("ipv6:%5B::1%5D:5000", "[::1]:5000"), ("unix:", "unix:")],
)
def test_grpcs_peers_are_written_as_rests(peer, address):
    assert rpc_client(peer) == address


async def test_a_calls_client_is_read_while_the_call_lives(caplog):
    """gRPC's own context crashes the process where a call that has ended is asked for its peer."""

    class Context:
        ended = False

        def invocation_metadata(self):
            return ()

        def add_done_callback(self, _):
            """The test ends the call."""

        def peer(self):
            assert not self.ended
            return "ipv4:127.0.0.1:5000"

    context = Context()
    catalog = ModelCatalog([load_served_model(str(SAMPLE))])
    catalog.update([INFO])
    answers = InferenceServicer(FakeGenerator(say("Hi")), catalog).Generate(pb.GenerateRequest(text="Hi"), context)
    await anext(answers)
    context.ended = True
    await answers.aclose()
    assert records(caplog)[-1].client == "127.0.0.1:5000"
